"""The search for who is to blame, on ranks that are made slow or wrong on purpose."""

import re
from itertools import combinations

import pytest

from pytest_gpufleet.probes.search.slow_collective import of_their_kind, slow_pairs, slow_rank

# Faults are planted in torch.distributed on the ranks, where they last until the world is a fresh one.
SEARCHES = """
import time

import pytest
import torch.distributed as dist

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.probes.search import slow_collective

pytestmark = pytest.mark.fresh_world

USUAL, LONG = 0.02, 0.15  # seconds; what a busy machine adds is small beside the one and beside their difference

class Slow:
    def __init__(self, work, seconds):
        self.work, self.seconds = work, seconds

    def wait(self):
        time.sleep(self.seconds)
        self.work.wait()

def plant(rank, late=None, links=None, link=None, end=None):
    me, all_reduce, batch_isend_irecv = rank.index, dist.all_reduce, dist.batch_isend_irecv

    def slow_all_reduce(*args, **kwargs):
        time.sleep(LONG if me == late else USUAL)
        work = all_reduce(*args, **kwargs)
        return work and Slow(work, LONG if me == end else USUAL)

    def slow_batch(ops):
        time.sleep(LONG if me == links or {me, ops[0].peer} == link else USUAL)
        return batch_isend_irecv(ops)

    dist.all_reduce, dist.batch_isend_irecv = slow_all_reduce, slow_batch

def fail(rank):
    def batch(ops):
        raise RuntimeError("no route")

    dist.batch_isend_irecv = batch

def find(group):
    found = slow_collective.who_is_slow(group, GpuTopology(), "all_reduce", 1 << 16)
    print(*found, sep="\\n")
    return found

def cpu(index):
    return Place(0, "cpu", index)

def test_a_rank_that_comes_late(nccl_group):
    nccl_group.run(plant, late=2)
    (found,) = find(nccl_group)
    assert (found.code, found.subjects) == ("rank_comes_late", (cpu(2),))
    assert "ms late to every all_reduce" in found.what

def test_a_rank_with_slow_links(nccl_group):
    nccl_group.run(plant, links=2)
    (found,) = find(nccl_group)
    assert (found.code, found.subjects) == ("links_slow", (cpu(2),))
    assert found.what.startswith("every pair with it takes ") and " us, all others " in found.what

def test_a_slow_link(nccl_group):
    nccl_group.run(plant, link={1, 3})
    (found,) = find(nccl_group)
    assert (found.code, found.subjects) == ("link_slow", (Pair(cpu(1), cpu(3)),))

def test_a_rank_that_slows_nothing_but_the_collective(nccl_group):
    nccl_group.run(plant, end=1)
    (found,) = find(nccl_group)
    assert (found.code, found.subjects) == ("slows_collectives", (cpu(1),))
    assert "without any other rank " in found.what

def test_no_single_one_where_all_are_slow(nccl_group):
    nccl_group.run(plant)
    found = find(nccl_group)
    assert {(each.code, each.subjects) for each in found} == {("cause_unclear", ())}
    pairs, others, variables = (each.what for each in found)
    assert pairs.startswith("no single GPU: each of the 6 pairs takes ")
    assert others.startswith("without any one rank all_reduce reaches ")
    assert "among ranks 0 to 1 " in others and "among ranks 2 to 3 " in others
    assert variables == "variables that steer NCCL are set: NCCL_ALGO=Ring"

@pytest.mark.world_size(2)
def test_no_single_one_of_two(nccl_group):
    nccl_group.run(plant, links=1)
    found, *_ = find(nccl_group)
    assert found.what.startswith("with two ranks nobody can tell which one it is: their link takes ")

@pytest.mark.world_size(3)
def test_a_search_that_fails(nccl_group):
    nccl_group.run(fail)
    found, *_ = find(nccl_group)
    assert found.what.startswith("the search for the cause failed: RankFailure")
    assert "RuntimeError: no route" in found.what
    assert nccl_group.run(lambda rank: rank.index) == [0, 1, 2]  # the next check has its ranks
"""


@pytest.fixture(scope="module")
def searches(fleet_here):
    return fleet_here(SEARCHES, "-rP", ranks=4, NCCL_ALGO="Ring")


@pytest.mark.parametrize("search", re.findall(r"^def (test_\w+)", SEARCHES, re.MULTILINE))
def test_search_finds(searches, search):
    assert searches.outcomes[search] == "passed", searches.text


def rates(n, slow=(), fast=380.0, low=12.0):
    return {pair: low if pair in slow or set(pair) & set(slow) else fast for pair in combinations(range(n), 2)}


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_rank_is_slow_only_if_all_its_pairs_are(n):
    for rank in range(n):
        assert slow_rank(rates(n, slow=[rank])) == rank
    assert slow_rank(rates(n)) is None
    assert slow_rank(rates(n, slow=[(0, 1)])) is None
    assert slow_rank(rates(n, slow=range(n))) is None


def test_links_of_two_kinds_make_no_culprit():
    # Two NVLink bridges in a machine with two sockets: pairs 0-1 and 2-3 are fast, the others cross the sockets.
    mixed = {pair: 100.0 if pair in [(0, 1), (2, 3)] else 20.0 for pair in combinations(range(4), 2)}
    assert slow_rank(mixed) is None
    assert slow_pairs(mixed) == []
    # GPU 3 has lost its bridge and half its lanes.
    assert slow_rank({**mixed, (2, 3): 10.0, (0, 3): 10.0, (1, 3): 10.0}) == 3


# Which GPUs of a machine with 8 V100 have two NVLinks, one, or none between them.
CUBE_MESH = {
    "NV2": [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)],
    "NV1": [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)],
}
SOCKETS = {"NODE": [pair for half in (range(4), range(4, 8)) for pair in combinations(half, 2)]}
BRIDGES = {"NV": [(0, 1), (2, 3)]}


@pytest.mark.parametrize(
    ("n", "links", "usual", "share"),
    [
        (8, CUBE_MESH, {"NV2": 44.0, "NV1": 22.0, "SYS": 9.0}, 0.5),
        (8, SOCKETS, {"NODE": 25.0, "SYS": 18.0}, 0.6),
        (4, BRIDGES, {"NV": 100.0, "SYS": 20.0}, 0.5),
    ],
    ids=["cube mesh", "two sockets", "bridges"],
)
def test_pairs_are_held_against_those_of_their_kind(n, links, usual, share):
    kind = {pair: next((name for name in links if pair in links[name]), "SYS") for pair in combinations(range(n), 2)}
    healthy = {pair: usual[kind[pair]] for pair in kind}
    assert slow_rank(of_their_kind(healthy, kind)) is None
    assert slow_pairs(of_their_kind(healthy, kind)) == []
    for rank in range(n):
        slowed = {pair: rate * share if rank in pair else rate for pair, rate in healthy.items()}
        assert slow_rank(of_their_kind(slowed, kind)) == rank


def test_slow_pairs_are_found():
    assert slow_pairs(rates(8, slow=[(2, 5)])) == [(2, 5)]
    assert slow_pairs(rates(8, slow=[(2, 5), (1, 7)])) == [(1, 7), (2, 5)]
    assert slow_pairs({**rates(4), (0, 1): 12.0, (0, 2): 290.0, (1, 2): 330.0}) == [(0, 1)]  # others may vary a little
    assert slow_pairs(rates(8)) == slow_pairs(rates(2)) == []
