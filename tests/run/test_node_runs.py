"""The nodes' own runs as their controller has them: how far they are, what they came to, and what is brought here."""

import json
import math
from contextlib import suppress
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.events import NodeFound
from pytest_gpufleet.nodes.messages import CheckEnded, Pulse, RunSuite, SuiteEnded
from pytest_gpufleet.run import node_runs
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.node_runs import NodeRun, NodeRuns
from pytest_gpufleet.safe_files import sha256

BEGIN = json.dumps({"t": "2026-11-22T00:00:00+00:00", "event": "run", "host": "gf"}).encode()
WHOLE = {"evidence.jsonl": BEGIN + b" " * node_runs.PART_BYTES + b"\n", "report.html": b"r"}
ENDED = SuiteEnded(0, "", "a-run", {name: len(content) for name, content in WHOLE.items()}, "ACCEPTED", ("well",))
LOST = "nothing was heard of it for 10 s"
GOES_ON = SimpleNamespace(heard=False)


class Trouble(Exception):
    pass


class Answering:
    """A Cluster of nodes that have all files, but for what `ask_one` is in its place. `news`: what comes next."""

    def __init__(self):
        self.lost, self.news = {}, []
        self.pulses, self.listening = {2: Pulse(check="test_gemm")}, SimpleNamespace(seconds=0.0)

    def ask_each(self, questions, timeout, also_lost=False):
        found = {}
        for node, each in questions.items():
            with suppress(Trouble):
                found[node] = 4711 if isinstance(each, RunSuite) else self.ask_one(node, each, timeout)
        return found, {}

    def ask_one(self, node, asked, timeout):
        return WHOLE[asked.name][asked.offset :][: asked.most]

    suite_news = ()

    def take(self, news, timeout):
        news, self.news = self.news, []
        return news


@pytest.fixture
def cluster():
    return Answering()


@pytest.fixture
def runs(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(node_runs, "AT_ONCE", 1)
    made = NodeRuns(cluster, RunFolder(tmp_path))
    made.start((), [NodeFound(node, f"gf{node}") for node in range(3)], ".")
    yield made
    made.close()


def names(run):
    return {path.name for path in run.folder.path.iterdir()}


def test_a_node_is_a_line(cluster, runs):
    cluster.news = [(0, CheckEnded(str(at), outcome, 1.0)) for at, outcome in enumerate(["passed", "failed"] * 2)]
    cluster.news += [(0, ENDED), (1, CheckEnded("a", "passed", 1.0)), (1, LOST), (2, SuiteEnded(9, "ouch", "", {}))]
    assert [run.text for run in runs.listen(0)] == [
        "gf0: 2 passed, 2 failed, ACCEPTED",
        "gf1: 1 passed, lost: nothing was heard of it for 10 s",
        "gf2: its own run ended with exit status 9",
    ]
    assert [run.fit for run in runs.all.values()] == [True, False, False]


def test_what_has_ended_is_brought_while_others_go_on_and_read_once(cluster, runs):
    """The folder of the first is gone, which costs the second nothing, whose evidence comes in two parts."""
    runs.all[0].folder.path.rmdir()
    cluster.news = [(0, ENDED), (1, ENDED)]
    runs.listen(0)
    runs.settle(GOES_ON)
    assert [run.node for run in runs.read()] == [1]
    assert runs.read() == []
    kept = runs.all[1].folder
    assert {path.name: path.read_bytes() for path in kept.path.iterdir()} == WHOLE
    assert (runs.own[1].host, runs.own[1].sha256) == ("gf1", sha256(kept.evidence))
    ends = {node: run.finished(runs.own.get(node)) for node, run in runs.all.items()}
    assert {node: (end.verdict, end.run, bool(end.sha256)) for node, end in ends.items()} == {
        0: ("ACCEPTED", "a-run", False), 1: ("ACCEPTED", "a-run", True), 2: (None, "", False),
    }  # fmt: skip


def test_nodes_that_do_not_answer_hold_up_no_others_and_leave_no_half_of_a_file(cluster, runs):
    """The first was lost, and is asked last once more; the second is lost while it answers."""
    asked = []

    def ask_one(number, question, timeout):
        asked.append((number, question.name))
        if number == 0 or (number == 1 and question.offset):
            raise Trouble("it is lost")
        return Answering.ask_one(cluster, number, question, timeout)

    cluster.ask_one = ask_one
    cluster.news = [(0, LOST), (0, ENDED), (1, ENDED), (2, ENDED)]
    runs.listen(0)
    runs.settle(GOES_ON)
    del asked[:]
    runs.settle(GOES_ON, again=True)
    assert list(dict.fromkeys(asked)) == [(1, "evidence.jsonl"), (0, "evidence.jsonl")]
    assert [names(run) for run in runs.all.values()] == [set(), set(), {*WHOLE}]


def test_a_run_that_is_told_to_end_does_not_wait_long(cluster, runs, monkeypatch):
    monkeypatch.setattr(node_runs, "HASTE_SECONDS", 0.0)
    monkeypatch.setattr(node_runs, "TURN_SECONDS", 0.0)
    interruption = SimpleNamespace(heard=True)

    def ask_one(number, question, timeout):
        while timeout > 0 and runs._until == float("inf"):
            pass
        raise Trouble(f"no answer within {timeout} s")

    cluster.ask_one = ask_one
    cluster.news = [(0, ENDED)]
    runs.listen(0)
    runs.settle(interruption)
    assert (names(runs.all[0]), runs.all[0].digest) == (set(), "")


def test_evidence_that_is_none_is_not_here(cluster, runs):
    cluster.ask_one = lambda node, asked, timeout: b"{\n" * asked.most
    cluster.news = [(0, ENDED)]
    runs.listen(0)
    runs.settle(GOES_ON)
    assert runs.read() == []
    assert runs.all[0].finished(None).sha256 == ""


NOT_RUN = float("nan")


@pytest.mark.parametrize(("steps", "waited", "hung"), [
    ([[10.0], [12.0], [11.0]], 620.0, True),
    ([[10.0], [12.0], [11.0]], 600.0, False),  # not yet
    ([[1000.0]] * 3, 5000.0, False),  # five times a long check is longer
    ([[1000.0]] * 3, 6500.0, True),
    ([[10.0], [], []], 620.0, True),  # most hang there
    ([[10.0], *[[]] * 4], 9999.0, False),  # too few have passed
    ([[10.0], [NOT_RUN], [NOT_RUN]], 620.0, True),
    ([[NOT_RUN]] * 3, 9999.0, False),  # a check that takes hours, and does not apply on the others
    ([], 9999.0, False),
])  # fmt: skip
def test_who_is_at_a_step_for_much_longer_than_others_hangs(cluster, tmp_path, steps, waited, hung):
    runs = NodeRuns(cluster, RunFolder(tmp_path))
    for node, own in enumerate([[], *steps]):
        runs.all[node] = NodeRun(node, f"gf{node}", RunFolder(tmp_path), heard=0.0 if node == 0 else waited, steps=own)
    cluster.listening.seconds = waited
    assert [run.node for run in runs.hung(600.0, 100)] == [0] * hung


def test_a_check_that_does_not_apply_is_no_measure_of_its_time(cluster, runs):
    cluster.news = [(0, CheckEnded("a", "not applicable", 0.0)), (0, CheckEnded("b", "passed", 1.0)), (1, ENDED)]
    runs.listen(0)
    assert [[math.isnan(step) for step in runs.all[node].steps] for node in range(2)] == [[True, False], [False]]


def test_a_node_that_hangs_is_named_once_and_not_waited_for(cluster, runs):
    found = []
    while not found:
        cluster.news = [(node, CheckEnded("b", "passed", 1.0)) for node in (0, 1)]
        runs.listen(0)
        cluster.listening.seconds += 2.0
        found = runs.hung(60.0, 100)
    assert [(run.node, "at test_gemm for 6" in run.hung, run.at_work) for run in found] == [(2, True, False)]
    assert runs.hung(60.0, 100) == []
    assert "gf2: its own run has been at" in found[0].text


@pytest.mark.parametrize(("checks", "hung"), [(1, [2]), (2, [])])
def test_who_goes_on_where_others_ended_is_not_behind_them_unless_all_is_done(cluster, runs, checks, hung):
    """With -x most end at the first failure, and the next check of a good one takes an hour."""
    cluster.news = [(node, CheckEnded("a", "failed" if node < 2 else "passed", 1.0)) for node in range(3)]
    cluster.news += [(node, ENDED) for node in (0, 1)]
    runs.listen(0)
    cluster.listening.seconds = 2000.0
    assert [run.node for run in runs.hung(600.0, checks)] == hung
