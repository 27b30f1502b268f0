"""Ranks of this node: by their numbers among all outside, by their places here inside."""

import pickle

import pytest

from pytest_gpufleet.nodes.messages import RankAnswered, RankDied
from pytest_gpufleet.nodes.ranks_here import RanksHere
from pytest_gpufleet.world.engines.protocol import Answer, Death, Trace
from tests.world.fake_engine import specs


class StandIn:
    """An engine that notes what it is told, and to which `coming` happens."""

    def __init__(self):
        self.started, self.submitted, self.coming = [], [], []
        self.broken = None

    def get_ready(self, prepare):
        if self.broken:
            raise self.broken

    def start(self, specs):
        if self.broken:
            raise self.broken
        self.started.append([spec.index for spec in specs])

    def submit(self, ranks, parcel):
        if self.broken:
            raise self.broken
        self.submitted.append((list(ranks), parcel))

    def wait(self, timeout):
        coming, self.coming = self.coming, []
        return coming

    def examine(self, ranks):
        return {rank: Trace(phase=f"place {rank}") for rank in ranks}

    def kill(self, timeout):
        return {1: "(stopped by a signal)"}


@pytest.fixture
def engine():
    return StandIn()


@pytest.fixture
def ranks(engine):
    ranks = RanksHere(engine)
    ranks.start(pickle.dumps(specs(2, 3)[2:]))
    return ranks


def test_what_goes_in_and_comes_out(engine, ranks):
    ranks.submit((4, 0, 2), b"parcel")
    assert (engine.started, engine.submitted) == ([[2, 3, 4]], [([2, 0], b"parcel")])
    engine.coming = [Answer(0, b"a"), Death(2, "by SIGSEGV")]
    assert ranks.news() == [RankAnswered(2, b"a"), RankDied(4, "by SIGSEGV")]
    assert {rank: trace.phase for rank, trace in ranks.examine((1, 3, 4)).items()} == {3: "place 1", 4: "place 2"}
    assert ranks.kill(1.0) == {3: "(stopped by a signal)"}
    assert (ranks.examine((3,)), ranks.news()) == ({}, [])


def test_ranks_that_cannot_be_started_have_died(engine):
    ranks, engine.broken = RanksHere(engine), OSError(28, "No space left on device")
    ranks.get_ready()
    ranks.start(pickle.dumps(specs(1, 2)[1:]))
    assert [died.rank for died in ranks.news()] == [1, 2]
    assert ranks.news() == []


def test_ranks_that_nothing_can_be_sent_to_have_died(engine, ranks):
    engine.broken = OSError(28, "No space left on device")
    ranks.submit((2, 4), b"large")
    assert [(died.rank, "No space left" in died.reason) for died in ranks.news()] == [(2, True), (4, True)]
