"""Evidence that somebody else changes while the run goes on, and evidence that is damaged or made to do harm."""

import os
import shutil
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.model.events import CheckStarted, NodeLost, RunHeader, Verdict
from pytest_gpufleet.report import page as report_page
from pytest_gpufleet.run.folder import Evidence
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.judgement import read
from tests import runs
from tests.edited_evidence import insert


def rewritten(change):
    def attack(path):
        text = change(path.read_bytes())
        with path.open("r+b") as file:
            file.write(text)
            file.truncate()

    return attack


append_a_line = rewritten(lambda text: text + b'{"event": "progress"}\n')
CHANGED = "was changed by something else while the run went on: it is not what the run wrote"
GONE = "the evidence of this run is not at "
# What somebody does to the file, and what is told.
ATTACKS = {
    "copytruncate": (lambda path: (shutil.copy(path, f"{path}.1"), os.truncate(path, 0)), CHANGED),
    "a line deleted": (rewritten(lambda text: b"".join(text.splitlines(keepends=True)[::2])), CHANGED),
    "a line appended": (append_a_line, CHANGED),
    # Neither its size nor its place tells.
    "a letter changed": (rewritten(lambda text: text.replace(b"test_b", b"test_X")), CHANGED),
    "saved in an editor": (lambda path: Path(shutil.copy(path, path.with_name("copy"))).replace(path), CHANGED),
    "folder renamed": (lambda path: path.parent.rename(path.parent.with_name("kept")), GONE),
    "folder removed": (lambda path: shutil.rmtree(path.parent), GONE),
    "a file in its place": (lambda path: (shutil.rmtree(path.parent), path.parent.write_text("not a folder")), GONE),
}


@pytest.fixture
def evidence(tmp_path):
    (tmp_path / "run").mkdir()
    evidence = Evidence(tmp_path / "run" / "evidence.jsonl")
    evidence.add(RunHeader(host="node7"))
    for name in ("test_a", "test_b"):
        evidence.add(CheckStarted(check=name))
    return evidence


@pytest.mark.parametrize("goes_on", [True, False], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("what", ATTACKS)
def test_what_is_done_to_evidence_while_the_run_goes_on_is_told(evidence, what, goes_on):
    attack, told = ATTACKS[what]
    attack(evidence.path)
    for name in ("test_c", "test_d") if goes_on else ():
        evidence.add(CheckStarted(check=name))
    evidence.compare()
    (reason,) = evidence.record.spoiled
    assert told in reason
    evidence.add(Verdict(verdict="INCOMPLETE", reasons=evidence.record.spoiled))
    assert evidence.seal() == ""  # it was told before the verdict


def test_what_is_done_after_the_verdict_is_told_too(evidence):
    evidence.compare()
    evidence.add(Verdict(verdict="ACCEPTED", reasons=[]))
    append_a_line(evidence.path)
    assert CHANGED in evidence.seal()
    assert evidence.sha256 != sha256(evidence.path)


def test_who_goes_into_another_folder_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evidence = Evidence(Path("evidence.jsonl"))
    monkeypatch.chdir("/")
    evidence.add(CheckStarted(check="test_a"))
    evidence.compare()
    assert evidence.seal() == ""
    assert evidence.record.spoiled == []
    assert evidence.sha256 == sha256(tmp_path / "evidence.jsonl")


def test_no_half_of_a_line_is_left_where_the_disk_is_full(evidence, monkeypatch):
    whole = evidence.path.read_bytes()
    with monkeypatch.context() as full:
        full.setattr(os, "fdatasync", lambda _: os.write(-1, b""))  # after the line was written
        evidence.add(CheckStarted(check="test_c"))
    assert evidence.path.read_bytes() == whole
    evidence.add(CheckStarted(check="test_d"))  # there is room again
    evidence.compare()
    assert evidence.seal() == ""
    record = read(evidence.path)
    assert record.started == ["test_a", "test_b", "test_d"]
    assert record.spoiled == [f"the evidence could not be written to {evidence.path}: Bad file descriptor"]


def instead(name, make):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def appended(text):
    return lambda folder: (folder / "evidence.jsonl").open("a").write(text)


def long_line(path):
    with path.open("wb") as file:
        file.truncate(1 << 30)  # takes no room on the disk


SAMPLE = '{"event": "telemetry", "sample": {"time": 1.0, "gpus": [{"power_watts": %s}]}}'
FINISHED = '{"event": "check_finished", "check": {"id": "a.py::b", "outcome": "%s", "seconds": %s}}'
TOPOLOGY = '{"event": "topology", "nodes": [{"gpus": [%s], "links": [["X"]], "problems": []}]}'
RESUMED = '{"event": "run", "host": "x", "resumed": [%s]}'
# What is done to the folder of a run, and what every command says.
HOSTILE = {
    "deep": (insert('{"event": "machine", "machine": ' + "[" * 100_000 + "]" * 100_000 + "}"), "line 2: not JSON"),
    "huge whole number": (insert(FINISHED % ("passed", "1" + "0" * 400)), "$.check.seconds"),
    "unknown outcome": (insert(FINISHED % ("crashed", 1)), "'crashed' - at `$.check.outcome`"),
    "resumed without a time": (insert(RESUMED % '{"run": "a", "failed": []}'), "field `utc` - at `$.resumed[0]`"),
    "telemetry in words": (insert(SAMPLE % '"much"'), "got `str` - at `$.sample.gpus[0][...]`"),
    "telemetry is no number": (insert(SAMPLE % "NaN"), "$.sample.gpus[0][...]"),
    "no table of links": (insert(TOPOLOGY % ""), "the links of 0 GPUs are no table"),
    "a GPU whose name is a number": (insert(TOPOLOGY % '{"index": 0, "facts": {"name": 5}}'), "$[0].name"),
    "another run": (insert(RESUMED % ""), "it is the second event run of one run"),
    "no run at first": (
        instead("evidence.jsonl", lambda path: path.write_text('{"event": "omen"}\n{"event": "run", "host": "x"}\n')),
        "report.html was not made of this evidence.jsonl",
    ),
    "FIFO": (instead("evidence.jsonl", os.mkfifo), "it is not a regular file"),
    "endless": (instead("evidence.jsonl", lambda path: path.symlink_to("/dev/zero")), "it is a link"),
    "folder": (instead("evidence.jsonl", os.mkdir), "it is not a regular file"),
    "one line of a GiB": (instead("evidence.jsonl", long_line), "line 1: it is longer than 64 MiB"),
    "no event": (insert("[1, 2]"), "line 2: not an event of a run (it has no event)"),
    "an event after the verdict": (
        appended('{"event": "verdict", "verdict": "ACCEPTED", "reasons": []}\n'), "it stands after the verdict"),
    "garbage after the verdict": (appended("{"), "not JSON"),
}  # fmt: skip
# What is in the place of a file beside the evidence, as in an archive from somebody else.
BESIDE = {
    "a deep summary": ("summary.json", lambda path: path.write_text("[" * 100_000)),
    "a FIFO": ("summary.json", os.mkfifo),
    "an endless summary": ("summary.json", lambda path: path.symlink_to("/dev/zero")),
    "a long summary": ("summary.json", lambda path: (path.touch(), os.truncate(path, 300 << 20))),
    "a page that is a link": ("report.html", lambda path: path.symlink_to("../victim")),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.record(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


@pytest.mark.parametrize("what", HOSTILE)
def test_damaged_evidence_gets_one_sentence(folder, capsys, what):
    change, told = HOSTILE[what]
    (folder / "summary.json").unlink()
    change(folder)
    before = sorted(folder.iterdir())
    for command in ("verify", "report", "judge"):
        assert cli.main([command, str(folder)]) == 1
        printed = capsys.readouterr()
        lines = (printed.out + printed.err).splitlines()
        assert told in lines[0]
        assert len(lines) == 1 or command == "verify"
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("what", BESIDE)
def test_what_is_in_the_place_of_a_file_gets_one_sentence(folder, capsys, what):
    (victim := folder.with_name("victim")).write_text("secret")
    name, make = BESIDE[what]
    instead(name, make)(folder)
    for command in ("verify", "report"):
        assert cli.main([command, str(folder)]) == 1
        assert name in capsys.readouterr().err
    assert victim.read_text() == "secret"


def test_what_no_reader_foresaw_gets_one_sentence_and_leaves_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr(report_page, "page", lambda *_: {}["unforeseen"])
    for name in ("summary.json", "report.html"):
        (folder / name).unlink()
    assert cli.main(["report", str(folder)]) == 1
    assert capsys.readouterr().err.endswith("which no run wrote so: KeyError('unforeseen')\n")
    assert [path.name for path in folder.iterdir()] == ["evidence.jsonl"]


def test_a_line_that_could_not_be_read_again_is_not_written(evidence):
    with pytest.raises(ValueError, match="longer than 64 MiB"):
        evidence.add(NodeLost(node=0, why="x" * (65 << 20)))
    evidence.compare()
    assert evidence.seal() == ""
    assert evidence.record.spoiled == []
    assert read(evidence.path).started == ["test_a", "test_b"]
