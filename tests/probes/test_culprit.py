"""The search for who is to blame, on ranks that are made slow or wrong on purpose."""

import math
import re
import time
from itertools import combinations, permutations
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pytest_gpufleet.model.place import GpuTopology, Pair, Place, gpu
from pytest_gpufleet.probes.search import collective
from pytest_gpufleet.probes.search.collective import SLOW, SLOW_COPIES, who_slows_pairs

USUAL, LONG = 0.02, 0.15  # seconds; what a busy machine adds is small beside the one and beside their difference


def plant(rank, late=None, links=None, link=None, end=None, slow_root=False, fails=False):
    me, all_reduce, batch_isend_irecv, gather = rank.index, dist.all_reduce, dist.batch_isend_irecv, dist.gather

    def slow_all_reduce(tensor, *args, **kwargs):
        time.sleep(LONG if me == late else USUAL)
        work = all_reduce(tensor, *args, **kwargs)
        after = LONG if me == end else USUAL
        if work is None and tensor.numel() > 1000:  # not those that only line ranks up
            time.sleep(after)
        return work and SimpleNamespace(wait=lambda: (time.sleep(after), work.wait()))

    def slow_batch(ops):
        if fails:
            raise RuntimeError("no route")
        time.sleep(LONG if me == links or {me, ops[0].peer} == link else USUAL)
        return batch_isend_irecv(ops)

    def slow_gather(*args, group, **kwargs):
        time.sleep(LONG if slow_root and dist.get_rank(group) == 0 else 0)
        return gather(*args, group=group, **kwargs)

    dist.all_reduce, dist.batch_isend_irecv, dist.gather = slow_all_reduce, slow_batch, slow_gather


def find(group):
    return collective.who_is_slow(group, GpuTopology(), "all_reduce", 1 << 16)


def cpu(index):
    return Place(0, "cpu", index)


@pytest.mark.parametrize(("planted", "code", "subject", "words"), [
    ({"late": 2}, "straggler", cpu(2), r".*ms late to every all_reduce"),
    ({"links": 2}, "links_slow", cpu(2), r"3 of the 3 measurements .* slow \(.* us, all others .* us\)"),
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
    assert pairs.startswith("no single GPU: all pairs are about equally slow (")
    assert others.startswith("without any one rank all_reduce reaches ")
    assert variables == "variables that steer NCCL are set: NCCL_ALGO=Ring"


def test_no_root_for_what_it_launches_more(four_ranks):
    four_ranks.run(plant, slow_root=True)  # all are slow, beside which no rank is late on a busy machine
    assert {each.subjects for each in collective.who_is_slow(four_ranks, GpuTopology(), "gather", 1 << 16)} == {()}


def test_no_single_one_of_two(four_ranks):
    four_ranks.run(plant, links=1)
    found, *_ = find(four_ranks.subset([0, 1]))
    assert found.what.startswith("with two ranks it can be either: their link has ")


def test_a_search_that_fails(four_ranks):
    four_ranks.run(plant, fails=True)
    found, *_ = find(four_ranks.subset(range(3)))
    assert found.what.startswith("the search for the cause failed: RankFailure")
    assert "RuntimeError: no route" in found.what
    assert four_ranks.run(lambda rank: rank.index) == [0, 1, 2, 3]  # the next check has its ranks


# ---------------------------------------------------------------- by figures
def rates(pairs, slow, usual=390.0):
    """Of pairs of GPUs; `slow`: those of a GPU, or of a pair."""
    return {Pair(gpu(a), gpu(b)): slow.get((a, b), slow.get(a, slow.get(b, usual))) for a, b in pairs}


def named(fault):
    return " ".join(map(str, fault.subjects))


COPIES, SWAPS = SLOW_COPIES, SLOW["gpu"]
OF_14, EQUALLY = "of the 14 measurements of pairs with it are slow", "no single GPU: all pairs are about equally slow"


@pytest.mark.parametrize(("slow", "share", "who", "words"), [
    ({5: 12.0}, COPIES, "gpu5", f"14 {OF_14}"),
    ({(a, 5): 370.0 for a in range(8)}, COPIES, "gpu5", f"7 {OF_14}"),  # to be read
    ({(1, 3): 300.0}, COPIES, "gpu1-gpu3", "only the way between these two is"),
    ({5: 386.1}, COPIES, "gpu5", f"14 {OF_14} (386.1 GB/s, all others 390 GB/s)"),
    ({5: 389.5}, COPIES, "", EQUALLY),
    ({5: math.nan}, COPIES, "gpu5", f"14 {OF_14}"),
    ({(0, 1): 12.0, (2, 3): 12.0}, COPIES, "", "gpu0-gpu1, gpu2-gpu3 are slow and have none in common"),
    (dict.fromkeys(range(8), 12.0), COPIES, "", EQUALLY),
    ({5: 0.94 * 390}, SWAPS, "gpu5", f"14 {OF_14}"),  # one of 18 NVLinks less is 5.6 %
    ({5: 0.96 * 390}, SWAPS, "", EQUALLY),
    ({(1, 3): 12.0, (1, 4): 290.0, (2, 3): 330.0}, SWAPS, "gpu1-gpu3", "only"),  # the others may vary a little
    ({(a, b): 350 + 10 * (a + b) for a in range(8) for b in range(8)}, SWAPS, "", EQUALLY),  # by less than they differ
    ({a: 350.0 + 10 * a for a in range(7)} | {(a, 7): 250.0 for a in range(7)}, SWAPS, "gpu7", f"7 {OF_14}"),
    ({a: 260.0 + 20 * a for a in range(7)} | {(a, 7): 120.0 + 12 * a for a in range(7)}, SWAPS, "gpu7", f"7 {OF_14}"),
])  # fmt: skip
def test_the_gpu_that_slow_pairs_have_in_common_is_named(slow, share, who, words):
    fault = who_slows_pairs([rates(permutations(range(8), 2), slow)], share)
    assert named(fault) == who
    assert words in fault.what


@pytest.mark.parametrize("n", [3, 4, 8])
def test_of_few_gpus_too_it_is_the_one_or_the_pair(n):
    def found(slow):
        return named(who_slows_pairs([rates(combinations(range(n), 2), slow)], SWAPS))

    assert [found({slow: 12.0}) for slow in range(n)] == [f"gpu{slow}" for slow in range(n)]
    assert found({(0, 1): 12.0}) == "gpu0-gpu1"


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
    others = [pair for pair in combinations(range(n), 2) if not any(pair in each for each in links.values())]

    def found(bad):
        kinds = [(each, usual[link]) for link, each in {**links, "SYS": others}.items()]
        return named(who_slows_pairs([rates(each, {bad: rate * share}, rate) for each, rate in kinds], SWAPS))

    assert [found(bad) for bad in range(n)] == [f"gpu{bad}" for bad in range(n)]
    assert found(None) == ""
