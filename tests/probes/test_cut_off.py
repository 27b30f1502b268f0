"""Who cannot work with whom: found from pairs that agents try, or by halving nodes that hang together."""

import math
import random
from itertools import chain, combinations

import pytest

from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.probes.search import nodes as search
from pytest_gpufleet.probes.search.nodes import MOST_PAIRS, hanging, who_hangs, who_is_cut_off
from pytest_gpufleet.world.failure import RankFailure, RankReport
from tests.probes.test_node_culprit import Fabric

HOSTS = {node: f"gf{node}" for node in range(600)}


def node(number):
    return Place(number, "node")


class Network(Fabric):
    """`cut`: nodes that reach nobody; `pairs`: those that do not reach each other; `rack`: nodes that reach but each
    other. As `world` of one rank a node it hangs with these. `raising`: of what hangs, one rank raises instead."""

    gpus, hosts = (), HOSTS

    def __init__(self, n, cut=(), pairs=(), rack=(), raising=False):
        racks = [rack, {*range(n)} - {*rack}]
        super().__init__(n, dict.fromkeys(cut, 0.0), dict.fromkeys(pairs, 0.0), racks, between=0.0 if rack else 1.0)
        self.raising, self.said = raising, []
        self.places = [Place(number, "cpu", 0) for number in range(n)]

    def works(self, group):
        return len(group) < 2 or self.reaches(group) > 0

    def reached(self, pairs):
        self.calls += 1
        return {pair: "" if self.works(pair) else f"{pair} time out" for pair in pairs}

    def hangs(self, group):
        self.calls += 1
        return not self.works(group)

    def each(self, groups, function, nbytes, timeout):
        assert nbytes.on(self) == MiB
        assert len({*chain(*groups)}) == sum(map(len, groups))
        self.calls += 1
        bad = {rank for group in groups if not self.works(group) for rank in group}
        if bad:
            states = {rank: "running" if rank in bad else "returned" for group in groups for rank in group}
            if self.raising:  # the grace for the others was too short
                states = {**dict.fromkeys(states, "running"), min(bad): "raised"}
            reports = tuple(RankReport(rank, "", state, "") for rank, state in states.items())
            raise RankFailure("exception" if self.raising else "hang", "it", reports)


CASES = [
    ((), (), (), [], set()),
    ((2,), (), (), [("node_cut_off", (node(2),))], {2}),
    ((0,), (), (), [("node_cut_off", (node(0),))], {0}),  # where ranks meet
    ((), ((0, 3),), (), [("nodes_cut_off", (Pair(node(0), node(3)),))], {3}),
]


@pytest.mark.parametrize("n", [0, 1])
def test_a_node_alone_is_cut_off_from_nobody(n):
    """As where the others were lost while a check between them ran."""
    assert who_is_cut_off(range(n), HOSTS, Network(n).reached) == ((), {})


@pytest.mark.parametrize("n", [4, 5, 16, 500])
@pytest.mark.parametrize(("cut", "pairs", "rack", "faults", "left_out"), CASES)
def test_who_is_cut_off_is_named_and_the_others_go_on(n, cut, pairs, rack, faults, left_out):
    network = Network(n, cut, pairs, rack)
    found = who_is_cut_off(range(n), HOSTS, network.reached)
    assert [(fault.name, fault.subjects) for fault in found.faults] == faults
    assert {*found.left_out} == left_out
    assert all("time out" in fault.what for fault in found.faults)
    assert network.calls <= 1 + 3 * len(faults)


@pytest.mark.parametrize(("n", "rack"), [(4, (2, 3)), (16, (4, 5, 6)), (64, tuple(range(8, 24)))])
def test_nodes_behind_another_switch_are_not_blamed(n, rack):
    found = who_is_cut_off(range(n), HOSTS, Network(n, rack=rack).reached)
    (fault,) = found.faults
    assert (fault.name, fault.subjects, {*found.left_out}) == ("network_cut", (), {*rack})


@pytest.mark.parametrize(
    ("n", "cut", "pair"), [(2, (), (0, 1)), (2, (1,), (0, 1)), (3, (), (1, 2))], ids=["two", "either", "three"]
)
def test_of_too_few_nodes_the_pair_is_named(n, cut, pair):
    found = who_is_cut_off(range(n), HOSTS, Network(n, cut, (pair,)).reached)
    assert [(fault.name, fault.subjects) for fault in found.faults] == [("nodes_cut_off", (Pair(*map(node, pair)),))]
    assert {*found.left_out} == {pair[1]}


def test_up_to_sixteen_nodes_every_pair_is_tried():
    for pair in combinations(range(16), 2):
        (fault,) = who_is_cut_off(range(16), HOSTS, Network(16, pairs=(pair,)).reached).faults
        assert fault.subjects == (Pair(*map(node, pair)),)


@pytest.mark.parametrize("n", [3, 5, 8, 17, 500])
def test_halves_find_the_node_or_the_two_that_hang(n):
    chosen = random.Random(n)
    for pair in [(0, 1), (0, n - 1), (n - 2, n - 1), *(tuple(sorted(chosen.sample(range(n), 2))) for _ in range(20))]:
        network = Network(n, pairs=(pair,))
        assert tuple(sorted(hanging(tuple(range(n)), network.hangs))) == pair
        assert network.calls <= 1 + 2 * math.ceil(math.log2(n))
        assert pair[0] in hanging(tuple(range(n)), Network(n, cut=(pair[0],)).hangs)
    assert hanging(tuple(range(n)), Network(n).hangs) == ()


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize("n", [4, 6, 16, 500])
@pytest.mark.parametrize(("cut", "pairs", "rack", "faults", "left_out"), CASES)
def test_a_hang_names_who_hangs_again_and_says_before_how_long_it_may_take(
    n, cut, pairs, rack, faults, left_out, raising
):
    network = Network(n, cut, pairs, rack, raising)
    found = who_hangs(network, network.said.append)
    assert [(fault.name, fault.subjects) for fault in found.faults] == faults
    assert {*found.left_out} == left_out
    (said,) = network.said
    assert " min, " in said
    most = int(said.partition("at most ")[2].split()[0])
    assert most <= MOST_PAIRS + 1 + 2 * math.ceil(math.log2(n))
    assert network.calls <= most * (1 + raising)  # what was interrupted is tried again, which takes no time


def stuck(rank, nbytes):
    """Where both of two nodes work together, they wait for ever."""
    import threading

    import torch
    import torch.distributed as dist

    nodes = [torch.zeros(1) for _ in range(rank.size)]
    dist.all_gather(nodes, torch.tensor([float(rank.node)]), group=rank.group)
    if {1.0, 2.0} <= {each.item() for each in nodes}:
        threading.Event().wait()


def test_ranks_that_hang_with_each_other_are_found_and_all_others_work_on(three_nodes, monkeypatch):
    monkeypatch.setattr(search, "_meet", stuck)
    monkeypatch.setattr(search, "HANG_SECONDS", 5.0)
    found = who_hangs(three_nodes, print)
    assert [(fault.name, fault.subjects) for fault in found.faults] == [("nodes_cut_off", (Pair(node(1), node(2)),))]
    assert {*found.left_out} == {2}
    assert three_nodes.run(lambda rank: rank.node) == [0, 0, 1, 1, 2, 2]
