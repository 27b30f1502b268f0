"""The search for who is to blame, on ranks that are made slow or wrong on purpose."""

import re
import time
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.probes.search import collective
from pytest_gpufleet.probes.search.collective import of_their_kind, slow_pairs, slow_rank

USUAL, LONG = 0.02, 0.15  # seconds; what a busy machine adds is small beside the one and beside their difference


def plant(rank, late=None, links=None, link=None, end=None):
    me, all_reduce, batch_isend_irecv = rank.index, dist.all_reduce, dist.batch_isend_irecv

    def slow_all_reduce(tensor, *args, **kwargs):
        time.sleep(LONG if me == late else USUAL)
        work = all_reduce(tensor, *args, **kwargs)
        after = LONG if me == end else USUAL
        if work is None and tensor.numel() > 1000:  # not those that only line ranks up
            time.sleep(after)
        return work and SimpleNamespace(wait=lambda: (time.sleep(after), work.wait()))

    def slow_batch(ops):
        time.sleep(LONG if me == links or {me, ops[0].peer} == link else USUAL)
        return batch_isend_irecv(ops)

    dist.all_reduce, dist.batch_isend_irecv = slow_all_reduce, slow_batch


def fail(rank):
    def batch(ops):
        raise RuntimeError("no route")

    dist.batch_isend_irecv = batch


def find(group):
    return collective.who_is_slow(group, GpuTopology(), "all_reduce", 1 << 16)


def cpu(index):
    return Place(0, "cpu", index)


@pytest.mark.parametrize(("planted", "code", "subject", "words"), [
    ({"late": 2}, "straggler", cpu(2), r".*ms late to every all_reduce"),
    ({"links": 2}, "links_slow", cpu(2), r"every pair with it takes .* us, all others "),
    ({"link": {1, 3}}, "link_slow", Pair(cpu(1), cpu(3)), ""),
    ({"end": 1}, "slows_collectives", cpu(1), r".*without any other "),
], ids=["late", "links", "link", "end"])  # fmt: skip
def test_a_single_one(four_ranks, planted, code, subject, words):
    four_ranks.run(plant, **planted)
    (found,) = find(four_ranks)
    assert (found.name, found.subjects) == (code, (subject,))
    assert re.match(words, found.what)


def test_no_single_one_where_all_are_slow(four_ranks, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    four_ranks.run(plant)
    found = find(four_ranks)
    assert {(each.name, each.subjects) for each in found} == {("cause_unclear", ())}
    pairs, others, variables = (each.what for each in found)
    assert pairs.startswith("no single GPU: each of the 6 pairs takes ")
    assert others.startswith("without any one rank all_reduce reaches ")
    assert variables == "variables that steer NCCL are set: NCCL_ALGO=Ring"


def test_no_single_one_of_two(four_ranks):
    four_ranks.run(plant, links=1)
    found, *_ = find(four_ranks.subset([0, 1]))
    assert found.what.startswith("with two ranks it can be either: their link takes ")


def test_a_search_that_fails(four_ranks):
    four_ranks.run(plant)  # beside which no rank is late on a busy machine
    four_ranks.run(fail)
    found, *_ = find(four_ranks.subset(range(3)))
    assert found.what.startswith("the search for the cause failed: RankFailure")
    assert "RuntimeError: no route" in found.what
    assert four_ranks.run(lambda rank: rank.index) == [0, 1, 2, 3]  # the next check has its ranks


# ---------------------------------------------------------------- by figures
def rates(n, slow=(), fast=380.0, low=12.0):
    return {pair: low if pair in slow or set(pair) & set(slow) else fast for pair in combinations(range(n), 2)}


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_rank_is_slow_only_if_all_its_pairs_are(n):
    assert [slow_rank(rates(n, slow=[rank])) for rank in range(n)] == [*range(n)]
    assert [slow_rank(rates(n, slow=slow)) for slow in ((), [(0, 1)], range(n))] == [None] * 3


@pytest.mark.parametrize(("low", "named"), [(0.94, 2), (0.96, None)])
def test_a_rank_is_named_from_five_per_cent_on(low, named):
    """One of 18 NVLinks less is 5.6 %."""
    assert slow_rank(rates(8, slow=[2], low=low * 380.0)) == named
    assert slow_pairs(rates(8, slow=[(2, 5)], low=low * 380.0)) == ([(2, 5)] if named else [])


# Which GPUs of a machine with 8 V100 have two NVLinks, one, or none between them.
CUBE_MESH = {
    "NV2": [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)],
    "NV1": [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)],
}
SOCKETS = {"NODE": [pair for half in (range(4), range(4, 8)) for pair in combinations(half, 2)]}


@pytest.mark.parametrize(("n", "links", "usual", "share"), [
    (8, CUBE_MESH, {"NV2": 44.0, "NV1": 22.0, "SYS": 9.0}, 0.5),
    (8, SOCKETS, {"NODE": 25.0, "SYS": 18.0}, 0.6),
    (4, {"NV": [(0, 1), (2, 3)]}, {"NV": 100.0, "SYS": 20.0}, 0.5),
], ids=["cube mesh", "two sockets", "bridges"])  # fmt: skip
def test_pairs_are_held_against_those_of_their_kind(n, links, usual, share):
    kind = {pair: next((name for name in links if pair in links[name]), "SYS") for pair in combinations(range(n), 2)}
    healthy = {pair: usual[kind[pair]] for pair in kind}
    assert slow_rank(of_their_kind(healthy, kind)) is None
    assert slow_pairs(of_their_kind(healthy, kind)) == []
    for rank in range(n):
        slowed = {pair: rate * share if rank in pair else rate for pair, rate in healthy.items()}
        assert slow_rank(of_their_kind(slowed, kind)) == rank


def test_slow_pairs_are_found_and_nobody_is_named_by_less_than_the_others_differ():
    assert slow_pairs(rates(8, slow=[(2, 5)])) == [(2, 5)]
    assert slow_pairs(rates(8, slow=[(2, 5), (1, 7)])) == [(1, 7), (2, 5)]
    assert slow_pairs({**rates(4), (0, 1): 12.0, (0, 2): 290.0, (1, 2): 330.0}) == [(0, 1)]  # others may vary a little
    assert slow_pairs(rates(8)) == slow_pairs(rates(2)) == []
    differing = {pair: rate + 10 * pair[0] for pair, rate in rates(4, slow=[3], low=350.0).items()}
    assert slow_rank({**differing, (0, 1): 400.0}) is None
    assert slow_rank({**differing, (0, 3): 250.0, (1, 3): 250.0, (2, 3): 250.0, (0, 1): 400.0}) == 3
