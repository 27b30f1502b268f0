"""judge, report and compare over several folders: for people, as JSON, and as CSV."""

import csv
import json
from pathlib import Path

import jsonschema
import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.run import summary
from tests import runs

RECORDED = Path(__file__).parents[1] / "recorded"
ACCEPTED, REJECTED = RECORDED / "h200x4-a", RECORDED / "h200x4-neighbour"


@pytest.fixture
def ran(capsys):
    """ran(*arguments): the exit status, what stands on standard output, and on standard error."""

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_each_folder_is_judged_as_it_is_alone_and_the_worst_status_counts(ran, tmp_path):
    alone = [ran("judge", folder) for folder in (ACCEPTED, REJECTED)]
    status, both, _ = ran("judge", ACCEPTED, REJECTED)
    assert status == 10  # INCOMPLETE by the limits of today
    assert both == f"{ACCEPTED}:\n{alone[0][1]}{REJECTED}:\n{alone[1][1]}"
    status, text, _ = ran("judge", "--json", ACCEPTED, REJECTED)
    document = json.loads(text)
    assert document["exit_status"] == status
    assert [run["folder"] for run in document["runs"]] == [str(ACCEPTED), str(REJECTED)]
    for run, (status, *_) in zip(document["runs"], alone, strict=True):
        jsonschema.validate(run["summary"], json.loads(summary.schema()))
        assert run["summary"]["exit_status"] == run["exit_status"] == status
    rejected = runs.record(tmp_path / "rejected", failed={runs.ALONE: "other"})
    assert ran("judge", rejected, ACCEPTED)[0] == ran("judge", ACCEPTED, rejected)[0] == 1


def test_a_folder_that_cannot_be_used_does_not_stop_the_others(ran, tmp_path):
    status, text, error = ran("judge", tmp_path, ACCEPTED)
    assert (status, error.startswith(f"gpufleet: {tmp_path}")) == (1, True)
    assert text.endswith(ran("judge", ACCEPTED)[1])
    document = json.loads(ran("judge", "--json", tmp_path, ACCEPTED)[1])
    assert [("error" in run, "summary" in run) for run in document["runs"]] == [(True, False), (False, True)]


def test_each_folder_gets_its_own_report(ran, tmp_path):
    folders = [runs.record(tmp_path / name, name) for name in ("node7", "node8")]
    status, text, _ = ran("report", "--json", *folders)
    document = json.loads(text)
    assert (status, document["exit_status"]) == (0, 0)
    for folder, run in zip(folders, document["runs"], strict=True):
        files = [folder / "report.html", folder / "summary.json"]
        assert run["files"] == list(map(str, files))
        assert all(path.is_file() for path in files)
        assert run["verdict"] == json.loads(files[1].read_text())["verdict"]
    assert ran("report", folders[0], tmp_path / "nothing", folders[1])[0] == 1
    for command in ("judge", "report"):
        status, _, error = ran(command, *folders, "-o", tmp_path / "page.html")
        assert (status, "2 folders were given" in error) == (1, True)
    assert not (tmp_path / "page.html").exists()


# ---------------------------------------------------------------- compare
def with_fingerprint(folder, output):
    """A recorded run, with what its first GPU computed."""
    *events, verdict = (ACCEPTED / "evidence.jsonl").read_text().splitlines()
    part = {"inputs": "d" * 64, "output": output * 64}
    taken = {"place": "gpu0", "kind": "NVIDIA H200", "software": {"torch": "2.9.0"}, "parts": {"product": part}}
    event = {"event": "fingerprint", "check": "acceptance/test_3_fingerprint.py::test_it", "fingerprints": [taken]}
    folder.mkdir()
    (folder / "evidence.jsonl").write_text("\n".join([*events, json.dumps(event), verdict]) + "\n")
    return folder


def test_a_machine_that_computes_other_bits_is_named(ran, tmp_path):
    a, b, c = (with_fingerprint(tmp_path / name, output) for name, output in (("a", "1"), ("b", "2"), ("c", "1")))
    status, text, _ = ran("compare", a, b, c, "--json")
    (found,) = json.loads(text)["fingerprints"]
    assert (status, found["usual"], found["others"]) == (1, "1" * 12, {"2" * 12: ["b"]})
    assert "Computes other bits than most with the same GPUs and libraries: b." in ran("compare", a, b, c)[1]
    status, text, _ = ran("compare", a, b, "--json")
    (found,) = json.loads(text)["fingerprints"]
    assert (status, found["usual"], set(found["others"])) == (1, None, {"1" * 12, "2" * 12})
    status, text, _ = ran("compare", a, c, "--json")
    assert (status, json.loads(text)["fingerprints"]) == (0, [])


@pytest.mark.parametrize(
    ("host", "shown"),
    [('=HYPERLINK("http://x")', '\'=HYPERLINK("http://x")'), ("@b; -1;=1+1\t+1", "'@b;' -1;'=1+1\t'+1")],
)
def test_no_word_of_evidence_is_a_formula_and_no_figure_is_nan(ran, tmp_path, host, shown):
    folder = runs.record(tmp_path / "a", host, {"busbw world": float("nan")})
    ran("export", folder, "--to", "csv", "-o", tmp_path / "out")
    tables = {path.stem: list(csv.reader(path.open(newline=""))) for path in (tmp_path / "out").iterdir()}
    assert ["host", shown] in tables["run"]
    assert len(tables["figures"]) > 1
    assert not {"nan", "inf"} & {cell for row in tables["figures"] for cell in row}
