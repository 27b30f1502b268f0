"""Every command that reads a run refuses one whose files do not belong together, whatever is different."""

import shutil

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.safe_files import sha256
from tests.conftest import ACCEPTANCE, RECORDED, REPORTS
from tests.edited_evidence import edit, seal

COMMANDS = {  # what is said of the run as it is, which is INCOMPLETE, and the options of each
    "verify": ("belong together",),
    "judge": ("INCOMPLETE",),
    "report": ("report.html: INCOMPLETE",),
    "fleet": ("INCOMPLETE",),
    "compare": ("There is nothing to compare",),
    "calibrate": ("no profile can be made of these runs", "-o", "new.toml"),
    "export": ("points", "--to=csv", "-o", "new"),
    "order": ("what ", "-o", "new.toml"),
    "sign": ("nothing was signed: ssh-keygen cannot use the key key", "--key=key", "--as=ann"),
}


@pytest.fixture(scope="module")
def whole(run_pytest):
    """A real run of this version on a recorded machine of four H200."""
    check = ACCEPTANCE / "test_1_inventory.py::test_gpu_count"
    (folder,) = run_pytest(check, "--gpus=4", f"--fleet-dir={REPORTS}", *RECORDED).folders
    return folder


@pytest.fixture
def command_on(whole, tmp_path, monkeypatch, gpufleet):
    """command_on(command, folder): its exit status and what it printed; compare has an untouched run beside it."""
    monkeypatch.chdir(tmp_path)

    def run(command, folder):
        beside = [shutil.copytree(whole, tmp_path / "beside")] if command == "compare" else []
        return gpufleet(command, folder, *beside, *COMMANDS[command][1:])

    return run


def replaced(name, old, new):

    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def judged(folder):
    cli.main(["judge", str(folder), "-o", str(folder / "judged.html")])
    (folder / "judged.html").replace(folder / "report.html")


def of_another_state(folder, outcome="passed", **header):
    """As other code may have judged it: ACCEPTED, which this code does not."""

    def change(events):
        events[0].update({"code": "0" * 64, "commit": "1f" * 20, **header})
        events[-1].update(verdict="ACCEPTED", exit_status=0)
        for event in events:
            if event["event"] == "check_finished":
                event["check"]["outcome"] = outcome

    edit(folder / "evidence.jsonl", change)
    return seal(folder)


def accepted(folder):
    """A verdict that nothing amounts to, in all three files."""
    edit(folder / "evidence.jsonl", lambda events: events[-1].update(verdict="ACCEPTED", exit_status=0))
    seal(folder)


DIFFERENCES = {
    "all lines of the evidence alike": (
        replaced("evidence.jsonl", "H200", "H201"), "report.html was not made of this evidence.jsonl"),
    "the evidence, and no page": (
        lambda folder: (replaced("evidence.jsonl", "H200", "H201")(folder), (folder / "report.html").unlink()),
        "summary.json was not made of this evidence.jsonl"),
    "a letter of the page": (replaced("report.html", "H200", "H201"), "report.html is not the one of which"),
    "the verdict of the page": (
        replaced("report.html", "fleet-incomplete", "fleet-accepted"), "report.html states another verdict"),
    "the page of a judgement": (judged, "report.html was not made of this evidence.jsonl"),
    "the verdict of the summary": (
        replaced("summary.json", '"verdict": "INCOMPLETE"', '"verdict": "ACCEPTED"'), "summary.json states another"),
    "a figure of the summary": (replaced("summary.json", "H200", "H201"), "evidence.jsonl says: run, gpus"),
    "a summary cut short": (replaced("summary.json", "}", ""), "summary.json is no summary"),
    "a page without its summary": (
        lambda folder: (folder / "summary.json").unlink(), "nobody knows whether the page was changed"),
    "a verdict that no version gives": (
        lambda folder: of_another_state(folder, "failed", plugin="0.3.0"), "its verdict is ACCEPTED, but"),
    "the exit status of another state": (
        lambda folder: replaced("summary.json", '_status": 0', '_status": 1')(of_another_state(folder)), "exit_status"),
    "the verdict of all three": (accepted, "its verdict is ACCEPTED, but what stands before it amounts to INCOMPLETE"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_as_it_was_left_is_read(command, whole, tmp_path, command_on):
    _, text = command_on(command, shutil.copytree(whole, tmp_path / "run"))
    assert COMMANDS[command][0] in text


@pytest.mark.parametrize(("command", "difference"), [
    *(("verify", each) for each in DIFFERENCES),
    *((each, "all lines of the evidence alike") for each in sorted(COMMANDS.keys() - {"verify"})),
])  # fmt: skip
def test_a_difference_is_refused_in_one_sentence(command, difference, whole, tmp_path, command_on):
    folder = shutil.copytree(whole, tmp_path / "run")
    change, said = DIFFERENCES[difference]
    change(folder)
    before = {path.name: sha256(path) for path in folder.iterdir()}
    status, text = command_on(command, folder)
    assert said in text
    assert status == (10 if command == "fleet" else 1)  # in which such a host does not count
    assert not list(tmp_path.glob("new*"))
    assert {path.name: sha256(path) for path in folder.iterdir()} == before


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"sign"}))
def test_of_a_run_that_was_killed_it_is_said_what_is_missing(command, whole, tmp_path, command_on):
    folder = shutil.copytree(whole, tmp_path / "run")
    for name in ("summary.json", "report.html"):
        (folder / name).unlink()
    _, text = command_on(command, folder)
    assert ("stands alone" if command == "verify" else COMMANDS[command][0]) in text
    assert "missing, as after a run that was killed: summary.json, report.html" in text


def test_evidence_of_another_state_of_the_code_is_held_against_what_it_recorded(whole, tmp_path, gpufleet):
    folder = of_another_state(shutil.copytree(whole, tmp_path / "run"))
    status, text = gpufleet("verify", folder)
    assert (status, "commit 1f1f1f1f1f1f, not by this state" in text) == (0, True), text
    replaced("report.html", "fleet", "fleed")(folder)
    assert gpufleet("verify", folder)[0] == 1
