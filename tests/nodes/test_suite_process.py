"""How far a run is by its evidence, whoever writes into it; and the files of a run."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from pytest_gpufleet.nodes import agent
from pytest_gpufleet.nodes.agent import SuiteProcess
from pytest_gpufleet.nodes.messages import CheckEnded, RunSuite, SuiteEnded
from tests.forked import Started

# In the place of pytest: it ends when somebody has opened the FIFO and closed it again. The test writes its evidence.
STAND_IN = """
import sys
open("end").read()
print("the end", sys.argv[1:])
sys.exit(3)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Started)  # to find another pytest than ours
    (tmp_path / "pytest.py").write_text(STAND_IN)
    (tmp_path / "node").mkdir()
    os.mkfifo(tmp_path / "end")
    return SuiteProcess(RunSuite(("-x",), str(tmp_path)), tmp_path / "node", {})


@pytest.fixture
def evidence(suite, tmp_path):
    assert [*suite.news()] == []  # it has no folder yet
    (reports,) = (path for path in (tmp_path / "node").iterdir() if path.is_dir())
    (reports / "host-1").mkdir()
    (reports / "host-1" / "evidence.jsonl").touch()
    return reports / "host-1" / "evidence.jsonl"


def line(event, **content):
    return json.dumps({"event": event, **content}).encode()


def write(evidence, *parts):
    with evidence.open("ab") as file:
        file.writelines(parts)


def end(suite, tmp_path):
    (tmp_path / "end").write_text("")
    told = []
    while not suite.over:
        told += suite.news()
    return told


def finished(check, outcome="passed"):
    return line("check_finished", check={"id": check, "outcome": outcome, "seconds": 1.5, "title": "more"})


def test_each_check_that_ends_is_said_once_and_the_end_with_the_verdict(suite, evidence, tmp_path):
    write(evidence, line("check_started", check="a"), b"\n", finished("a")[:10])
    assert [*suite.news()] == []
    assert suite.check == "a"
    write(evidence, finished("a")[10:], b"\n")
    assert [*suite.news()] == [CheckEnded("a", "passed", 1.5)]
    assert [*suite.news()] == []
    write(evidence, finished("b", "failed"), b"\n", line("verdict", verdict="REJECTED", reasons=["b"]), b"\n")
    *news, ended = end(suite, tmp_path)
    assert news == [CheckEnded("b", "failed", 1.5)]
    assert isinstance(ended, SuiteEnded)
    assert (ended.exit_status, ended.run, ended.files) == (3, "host-1", {"evidence.jsonl": evidence.stat().st_size})
    assert (ended.verdict, ended.reasons) == ("REJECTED", ("b",))
    assert ended.output.startswith("the end ['-x', '--fleet-dir=")
    assert [*suite.news()] == []


def test_evidence_that_was_removed_and_written_again_goes_on(suite, evidence, tmp_path):
    first, second = finished("a"), finished("b")
    write(evidence, first, b"\n")
    assert [*suite.news()] == [CheckEnded("a", "passed", 1.5)]
    evidence.unlink()
    assert [*suite.news()] == []
    write(evidence, first, b"\n", second, b"\n")
    assert [*suite.news()] == [CheckEnded("b", "passed", 1.5)]
    (ended,) = end(suite, tmp_path)
    assert ended.verdict is None


@pytest.mark.parametrize("damage", [
    b"no JSON", b"[]", b"{}", b"\xff", b"", line("telemetry", sample=7), line("check_finished", check={"id": "a"}),
    finished("a", "divine"), line("verdict", verdict="FINE"),
])  # fmt: skip
def test_what_somebody_else_wrote_is_no_news(suite, evidence, tmp_path, damage):
    write(evidence, damage, b"\n", finished("b"), b"\n")
    assert [*suite.news()] == [CheckEnded("b", "passed", 1.5)]
    end(suite, tmp_path)


def test_evidence_that_is_a_link_is_not_followed(suite, evidence, tmp_path):
    (tmp_path / "secret").write_bytes(finished("secret") + b"\n")
    evidence.unlink()
    evidence.symlink_to(tmp_path / "secret")
    assert [*suite.news()] == []
    end(suite, tmp_path)


def test_regular_files_with_their_sizes_in_parts_and_none_that_gets_another_name_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "evidence.jsonl").write_bytes(b"0123456789")
    (tmp_path / "inner" / "page.html").write_bytes(b"<p>")
    (tmp_path / "link").symlink_to(tmp_path / "evidence.jsonl")
    os.mkfifo(tmp_path / "fifo")
    assert agent.sizes(tmp_path) == {"evidence.jsonl": 10, "inner/page.html": 3}
    monkeypatch.setattr(os, "walk", lambda top: [(str(tmp_path), [], ["report.html.tmp", "evidence.jsonl"])])
    assert agent.sizes(tmp_path) == {"evidence.jsonl": 10}
    parts = [agent.part(tmp_path, "evidence.jsonl", offset, 4) for offset in (0, 4, 8, 12)]
    assert parts == [b"0123", b"4567", b"89", b""]
    assert agent.part(tmp_path, "inner/page.html", 0, 100) == b"<p>"
    for name in ("link", "fifo", "inner", "none"):
        with pytest.raises((OSError, ValueError)):
            agent.part(tmp_path, name, 0, 100)


@pytest.mark.parametrize(("said", "free"), [(b"", 2 << 20), (b"", 0), (b"[Errno 28] No space left on device", 2 << 20)])
def test_a_full_disk_is_described_as_that(suite, tmp_path, monkeypatch, said, free):
    monkeypatch.setattr(agent.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert ("the disk is full" in agent.full_disk(tmp_path, said)) is (bool(said) or free == 0)
    (ended,) = end(suite, tmp_path)
    assert bool(ended.trouble) is (free == 0)
