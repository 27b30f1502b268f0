"""The runs of nodes as their controller has them: what it keeps of them, and what it is told that is none."""

import json
from types import SimpleNamespace

import pytest

from pytest_gpufleet.nodes.cluster import Lost, Trouble
from pytest_gpufleet.nodes.messages import SuiteEnded
from pytest_gpufleet.run import node_runs
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.node_runs import NodeRun, NodeRuns
from pytest_gpufleet.safe_files import sha256

BEGIN = json.dumps({"t": "2026-11-22T00:00:00+00:00", "event": "run", "host": "gf1"}).encode()


@pytest.fixture
def node(tmp_path):
    """Its number -> its run, of which nothing is known yet."""

    def made(number=0):
        folder = RunFolder(tmp_path / str(number))
        folder.path.mkdir()
        return NodeRun(number, f"gf{number}", folder)

    return made


@pytest.mark.parametrize(
    "line", [b"{", b"[" * 100_000, b"[" * 70 + b"]" * 70, b"\xff", b"7", b'{"event": "check_started"}']
)
def test_what_is_no_event_of_a_run_is_damage_and_kept(node, line):
    run = node()
    run.hear([BEGIN, line])
    run.hear([b"more"])
    assert (bool(run.damage), run.at_work, run.record.run.host) == (True, False, "gf1")
    assert run.folder.evidence.read_bytes() == b"\n".join([BEGIN, line, b"more", b""])


def test_a_run_goes_on_whose_evidence_cannot_be_kept(node):
    run = node()
    run.folder.path.rmdir()
    run.hear([BEGIN])
    assert (run.damage, run.record.run.host) == ("", "gf1")


def test_a_node_that_was_lost_before_it_had_told_what_it_is_is_not_unlike_the_others(node):
    runs = NodeRuns(None)
    runs.all = {0: node()}
    runs.all[0].hear([BEGIN])
    assert runs.of_hosts() == {}
    told = {"t": "2026-11-22T00:00:01+00:00", "event": "machine", "nodes": [{"taken": "", "host": {"kernel": "6.8.0"}}]}
    runs.all[0].hear([json.dumps(told).encode()])
    assert [run.host for run in runs.of_hosts().values()] == ["gf0"]


WHOLE = {"evidence.jsonl": b"e" * (node_runs.PART_BYTES + 1), "report.html": b"r"}


def ended(run):
    run.ended = SuiteEnded(0, "", "a-run", {name: len(content) for name, content in WHOLE.items()})
    return run


def brought(runs, ask_one, at_work=list, interruption=None, wait=1.0):
    """The SHA-256 of each, when all was brought here that these answers give."""
    digests = node_runs.collect(
        SimpleNamespace(ask_one=ask_one),
        SimpleNamespace(all={run.node: run for run in runs}, at_work=at_work, listen=lambda timeout: None),
        interruption or SimpleNamespace(heard=False),
        wait,
    )
    return [*digests.values()]


def part(number, asked, timeout):
    return WHOLE[asked.name][asked.offset :][: asked.most]


def names_in(run):
    return {path.name for path in run.folder.path.iterdir()}


def test_of_all_nodes_is_brought_what_can_be(node):
    """The folder of the first is gone, which costs the second nothing, whose evidence comes in two parts."""
    runs = [ended(node(number)) for number in range(2)]
    runs[0].folder.path.rmdir()
    said = brought(runs, part)
    kept = runs[1].folder
    assert {path.name: path.read_bytes() for path in kept.path.iterdir()} == WHOLE
    assert said == ["", sha256(kept.evidence)]


def test_nodes_that_do_not_answer_hold_up_no_others_and_leave_no_half_of_a_file(node, monkeypatch):
    """The first was lost, and is asked last; the second is lost while it tells."""
    monkeypatch.setattr(node_runs, "AT_ONCE", 1)
    runs = [ended(node(number)) for number in range(3)]
    runs[0].lost = Lost("gf0", "nothing was heard of it for 10 s")
    asked = []

    def ask_one(number, question, timeout):
        asked.append((number, question.name))
        if number == 0 or (number == 1 and question.offset):
            raise Trouble("it is lost")
        return part(number, question, timeout)

    assert brought(runs, ask_one) == ["", "", sha256(runs[2].folder.evidence)]
    assert list(dict.fromkeys(asked)) == [
        (1, "evidence.jsonl"), (2, "evidence.jsonl"), (2, "report.html"), (0, "evidence.jsonl"),
    ]  # fmt: skip
    assert [names_in(run) for run in runs] == [set(), set(), {*WHOLE}]


def test_a_run_that_is_told_to_end_waits_for_no_other_and_fetches_in_haste(node, monkeypatch):
    """It is told so while it waits for a node, or while the evidence of the first comes."""
    monkeypatch.setattr(node_runs, "AT_ONCE", 1)
    interruption = SimpleNamespace(heard=False)
    runs = [ended(node(0)), node(1)]

    def at_work():
        interruption.heard = True
        return [runs[1]]

    assert brought(runs, part, at_work, interruption, wait=3600.0) == [sha256(runs[0].folder.evidence), ""]

    interruption.heard = False
    monkeypatch.setattr(node_runs, "HASTE_SECONDS", 0.0)
    runs = [ended(node(number)) for number in (2, 3)]

    def ask_one(number, asked, timeout):
        interruption.heard = True
        return part(number, asked, timeout)

    assert brought(runs, ask_one, interruption=interruption) == [sha256(runs[0].folder.evidence), ""]
    assert [names_in(run) for run in runs] == [{"evidence.jsonl"}, set()]
