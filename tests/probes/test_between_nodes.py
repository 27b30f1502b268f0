"""Rails, pairs and groups of nodes on ranks that take themselves for several nodes, some of them made slow."""

import time
from itertools import combinations

import pytest
import torch.distributed as dist

from pytest_gpufleet import MiB
from pytest_gpufleet.model.place import Place, read
from pytest_gpufleet.probes.between_nodes import groups_of_nodes, pairs_of_nodes, rail_bandwidth, squares
from pytest_gpufleet.probes.search.nodes import who_slows_nodes, who_slows_rails

SMALL, SEED = MiB // 4, 5
USUAL, LONG = 0.02, 0.15  # seconds; what a busy machine adds is small beside the one and beside their difference


def ranks_of_all(rank):
    """Those of its world, as the world of all nodes counts them: it is the only one that a rank has."""
    (members,) = rank._groups
    return list(members)


def slowed(rank, places, link):
    """Have these ranks, or what they send to the other node of a link, take their time."""
    me = Place(rank.node, "cpu", rank.index % rank.local_size)
    swap, reduce = dist.batch_isend_irecv, dist.all_reduce
    nodes = {index: index // rank.local_size for index in range(rank.size)}

    def held_up(others):
        here = {rank.node, *(nodes[other] for other in others)}
        return me in places or (link is not None and here >= {*link})

    def slow_swap(operations):
        time.sleep(LONG if held_up([ranks_of_all(rank)[operations[0].peer]]) else USUAL)
        return swap(operations)

    def slow_reduce(tensor, *args, group=None, **kwargs):
        if tensor.numel() > 1:  # not those that only line ranks up
            time.sleep(LONG if held_up(ranks_of_all(rank)) else USUAL)
        return reduce(tensor, *args, group=group, **kwargs)

    dist.batch_isend_irecv, dist.all_reduce = slow_swap, slow_reduce


def plant(world, *places, link=None):
    world.run(slowed, [read(each) for each in places], link)


def named(faults):
    return {(fault.name, " ".join(map(str, fault.subjects))) for fault in faults}


def slowest(measurement, usual=0.5):
    best = max(measurement.values.values())
    return {str(where) for where, value in measurement.values.items() if value < usual * best}


# ---------------------------------------------------------------- rails
@pytest.mark.parametrize("at_once", ["one", "all"])
def test_each_rail_of_each_node_has_a_figure(three_nodes, at_once):
    rails = rail_bandwidth(three_nodes, at_once, SMALL, SEED)
    assert {*rails.measurement.values} == {Place(node, "rail", rail) for node in range(3) for rail in range(2)}
    assert rails.measurement.conditions == {"at_once": at_once, "bytes": SMALL}
    assert rails.measurement.details == {"seed": SEED, "rounds": 3}
    assert [sorted(pairs) for pairs in rails.pairs.values()] == 2 * [[*combinations(range(3), 2)]]
    assert all(len(samples) == 3 for samples in rails.measurement.samples.values())


RAILS = {
    "one rail": (3, "all", ["node2/cpu1"], {"node2/rail1"}, ("rail_slow", "node2/rail1")),
    "a node": (3, "one", ["node1/cpu0", "node1/cpu1"], {"node1/rail0", "node1/rail1"}, ("node_slow", "node1")),
    "one of two": (2, "one", ["node1/cpu1"], {"rail1-node1/rail1"}, ("network_between_nodes_slow", "")),
}


@pytest.mark.parametrize("case", RAILS)
def test_slow_rails_are_named(three_nodes, case):
    nodes, at_once, slow, low, fault = RAILS[case]
    some = three_nodes.subset(range(2 * nodes))
    plant(three_nodes, *slow)
    rails = rail_bandwidth(some, at_once, SMALL, SEED)
    assert (slowest(rails.measurement), named(who_slows_rails(some, rails, SMALL))) == (low, {fault})


# ---------------------------------------------------------------- pairs
def test_every_pair_of_nodes_has_a_figure_and_of_unlike_nodes_nobody_is_named(three_nodes):
    (pairs,) = pairs_of_nodes(three_nodes, SMALL, SEED)
    assert {str(where) for where in pairs.values} == {"node-node1", "node-node2", "node1-node2"}
    assert (pairs.metric, pairs.conditions["nodes"], pairs.conditions["ranks"]) == ("node_group_busbw", 2, 4)
    assert (pairs.details["seed"], pairs.details["rounds"]) == (SEED, 3)
    (fault,) = who_slows_nodes(three_nodes.subset([0, 1, 2]), [], SMALL)
    assert (fault.name, fault.subjects, "no two nodes" in fault.what) == ("network_between_nodes_slow", (), True)


@pytest.mark.parametrize("link", [None, (1, 3)], ids=["a node", "a link and none of its nodes"])
def test_who_slows_pairs_of_nodes_is_named(four_nodes, link):
    plant(four_nodes, *([] if link else ["node3/cpu0"]), link=link)
    pairs = pairs_of_nodes(four_nodes, SMALL, SEED)
    found = slowest(pairs[0]), named(who_slows_nodes(four_nodes, pairs, SMALL))
    if link:
        assert found == ({"node1-node3"}, {("node_link_slow", "node1-node3")})
    else:
        assert found == ({"node-node3", "node1-node3", "node2-node3"}, {("node_slow", "node3")})


def test_a_node_with_fewer_gpus_is_not_named_for_what_it_reaches_less(three_nodes):
    uneven = three_nodes.subset(range(5))
    plant(three_nodes, "node2/cpu0")
    pairs = pairs_of_nodes(uneven, SMALL, SEED)
    assert sorted(map(str, (where for each in pairs for where in slowest(each)))) == []
    assert named(who_slows_nodes(uneven, pairs, SMALL)) == {("network_between_nodes_slow", "")}


def test_what_was_measured_in_another_way_is_looked_for_among_pairs_and_a_search_may_fail(four_nodes, monkeypatch):
    plant(four_nodes, "cpu0")
    assert named(who_slows_nodes(four_nodes, [], SMALL)) == {("node_slow", "node")}
    monkeypatch.setattr("pytest_gpufleet.probes.search.nodes.culprits", lambda *_: 1 / 0)
    (fault,) = who_slows_nodes(four_nodes, [], SMALL)
    assert fault.what.startswith("the search for the cause failed: ZeroDivisionError")


# ---------------------------------------------------------------- groups
@pytest.mark.parametrize(
    ("n", "sizes"), [(9, [[3, 3, 3]]), (10, [[4, 4], [4]]), (16, [[4] * 4]), (500, [[23] * 21, [23]])]
)
def test_groups_are_equally_large_and_everybody_is_in_one(n, sizes):
    groups = squares(range(n))
    assert [[*map(len, each)] for each in groups] == sizes
    assert {node for each in groups for group in each for node in group} == {*range(n)}
    assert all(len({node for group in each for node in group}) == sum(map(len, each)) for each in groups)


def test_groups_say_which_nodes_they_are(four_nodes):
    (groups,) = groups_of_nodes(four_nodes, SMALL)  # of two: too few for a check, and quick
    assert {groups.details["group0"], groups.details["group1"]} == {"node 0, node 1", "node 2, node 3"}
