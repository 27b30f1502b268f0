"""A run that died is continued, and only on the same ground."""

import json

import pytest

MODULE = """
import os, signal
import pytest

@pytest.mark.parametrize("i", range(3))
def test_before(world, i):
    with open("ran", "a") as file:
        file.write(f"{i}")

def test_fails(world):
    assert os.path.exists("repaired")

def test_dies(world):
    world.run(lambda rank: None)
    if not os.path.exists("repaired"):
        os.kill(os.getpid(), signal.SIGKILL)

def test_after(world):
    pass
"""


@pytest.fixture
def died(fleet):
    run = fleet(MODULE)
    assert run.status == -9
    return run


def resume(run_pytest, died, *arguments, **environment):
    files = {"test_inner.py": MODULE, "repaired": "", "ran": ""}
    options = ("--rehearse=2", "--fleet-dir=runs", f"--fleet-resume={died.folders[0]}")
    return run_pytest(*options, *arguments, files=files, **environment)


def test_a_killed_run_leaves_whole_lines(died):
    for line in (died.folders[0] / "evidence.jsonl").read_text().splitlines():
        json.loads(line)
    assert list(died.record.checks)[-1].endswith("test_fails")
    assert died.record.started[-1].endswith("test_dies")


def test_only_what_did_not_pass_runs_again(run_pytest, died):
    run = resume(run_pytest, died)
    assert (run.root / "ran").read_text() == ""
    assert run.status == 0, run.text
    assert set(run.outcomes.values()) == {"passed"}
    assert len(run.outcomes) == 6
    assert run.check("test_before[1]").run == died.folders[0].name
    assert run.check("test_fails").run == ""
    page = (run.folders[0] / "report.html").read_text()
    assert f'<th scope="row">{died.folders[0].name}</th><td>test_inner.py::test_before[1]</td>' in page
    assert f"Carried over from {died.folders[0].name}: 3 checks" in run.text


def test_a_resumed_run_can_be_resumed(run_pytest, died):
    first = resume(run_pytest, died)
    second = resume(run_pytest, first)
    assert second.status == 0, second.text
    assert second.check("test_before[1]").run == died.folders[0].name
    assert second.check("test_fails").run == first.folders[0].name


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--fleet-level=quick"], {}, "level was 'standard', is 'quick'"),
        ([], {"NCCL_ALGO": "Ring"}, "NCCL_ALGO"),
    ],
)
def test_another_ground_is_refused(run_pytest, died, arguments, environment, words):
    run = resume(run_pytest, died, *arguments, **environment)
    assert run.status == 4
    assert words in run.text
    assert not run.folders


def test_other_hardware_is_refused(run_pytest, died):
    evidence = died.folders[0] / "evidence.jsonl"
    evidence.write_text(evidence.read_text().replace('"driver": null', '"driver": "535.1"'))
    run = resume(run_pytest, died)
    assert run.status == 4
    assert "driver was '535.1', is None" in run.text


def test_nothing_to_resume(run_pytest):
    run = run_pytest("--rehearse=2", "--fleet-resume=nowhere", files={"test_inner.py": "def test_it(): pass"})
    assert run.status == 4
    assert "no evidence of a run can be read there" in run.text
