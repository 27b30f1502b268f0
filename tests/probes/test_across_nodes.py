"""What probes of one machine do on ranks of several nodes: conditions, sizes, and who is blamed for wrong data."""

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet import MiB, Rank, Reading, measure, measure_all
from pytest_gpufleet.model.place import WORLD, Pair, Place
from pytest_gpufleet.probes import between_nodes
from pytest_gpufleet.probes.between_nodes import affordable, doubling
from pytest_gpufleet.probes.collectives.exactness import LARGE, MOST_NUMBERS, bounded, exchange
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth, sweep
from pytest_gpufleet.probes.search.collective import who_corrupts
from pytest_gpufleet.probes.training.correctness import known_average, known_input
from tests.probes.test_between_nodes import ranks_of_all

FLOATS = [torch.float32]


def one_figure(rank):
    return Reading("busbw", 1.0 + rank.index, {"ranks": rank.size}, place=WORLD)


def test_what_ranks_of_several_nodes_do_together_has_their_number(three_nodes):
    every = measure(three_nodes, one_figure)
    assert (every.conditions, every.values) == ({"ranks": 6, "nodes": 3}, {WORLD: 1.0})  # of all ranks the worst
    assert measure(three_nodes.subset(range(4)), one_figure).conditions == {"ranks": 4, "nodes": 2}
    assert measure(three_nodes.nodes[1], one_figure).conditions == {"ranks": 2}
    measured = measure(three_nodes, lambda rank: Reading("gemm", 1.0, {"precision": "fp32"}))
    assert measured.conditions == {"precision": "fp32"}
    assert {str(where) for where in measured.values} == {
        "cpu0", "cpu1", "node1/cpu0", "node1/cpu1", "node2/cpu0", "node2/cpu1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_nodes_are_doubled_up_to_all_of_them(on_ranks, nodes, sizes):
    assert [some.size for some in doubling(on_ranks(nodes, 1))] == sizes  # no process starts before it is used


def test_the_curve_has_a_figure_for_each_number_of_nodes_and_size_but_those_that_take_too_long(three_nodes):
    curve = [
        (each.conditions.get("nodes", 1), each.conditions["bytes"])
        for some in doubling(three_nodes)
        for each in measure_all(some, sweep, bus_bandwidth, "all_gather", [96, 1536])
    ]
    assert curve == [(nodes, nbytes) for nodes in (1, 2, 3) for nbytes in (96, 1536)]
    assert affordable(three_nodes, [8, MiB]) == [8, MiB]
    three_nodes.run(has_time_for, 1024, 1e-9)
    assert affordable(three_nodes, [8, MiB, 8 * MiB]) == [8]


def has_time_for(rank, trial, seconds):
    between_nodes.TRIAL, between_nodes.LONGEST_SECONDS = trial, seconds


# ---------------------------------------------------------------- wrong data
def flip(rank, spoiled):
    """Have this rank receive one wrong element in every exchange among ranks that are `spoiled`."""
    genuine = dist.all_reduce

    def wrong(tensor, *args, group, **kwargs):
        work = genuine(tensor, *args, group=group, **kwargs)
        if work is not None:
            work.wait()
        if tensor.numel() > 1000 and spoiled(ranks_of_all(rank)):
            tensor[7] += 1
        return work

    dist.all_reduce = wrong


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_node_that_corrupts_data_is_named(three_nodes, culprit):
    three_nodes.run(flip, lambda ranks: culprit in ranks)
    deliveries = three_nodes.run(exchange, "all_reduce", "sum", dtypes=FLOATS)
    fault = who_corrupts(three_nodes, deliveries, "all_reduce", "sum", dtypes=FLOATS)
    assert (fault.name, fault.subjects) == ("collective_wrong", (Place(culprit // 2, "node"),))


def test_of_two_nodes_the_network_between_them_is_named(three_nodes):
    two = three_nodes.subset(range(4))
    three_nodes.run(flip, lambda ranks: len({index // 2 for index in ranks}) > 1)
    deliveries = two.run(exchange, "all_reduce", "sum", dtypes=FLOATS)
    fault = who_corrupts(two, deliveries, "all_reduce", "sum", dtypes=FLOATS)
    assert fault.subjects == (Pair(Place(0, "node"), Place(1, "node")),)


# ---------------------------------------------------------------- thousands of ranks
@pytest.mark.parametrize("n", [2, 8, 16, 512, 4096])
def test_exact_data_of_thousands_of_ranks_fit_into_memory(n):
    count = bounded(LARGE["cuda"], n)
    assert n * count <= MOST_NUMBERS
    assert count == LARGE["cuda"] if n <= 8 else count < LARGE["cuda"]


@pytest.mark.parametrize("n", [1, 8, 24, 25, 512, 4096])
def test_known_gradients_are_exact_however_they_are_added_up(n):
    def rank(index):
        return Rank(index, n, 0, n, torch.device("cpu"), None, {}, {}, None, None)

    inputs = torch.cat([known_input(rank(index)).flatten() for index in range(n)])
    for parts in (inputs / n, inputs * torch.tensor(1 / n)):
        assert float(parts.cumsum(0)[-1]) == float(parts.flip(0).cumsum(0)[-1]) == known_average(n)
    if n > 1:
        assert float((inputs / n)[1:].sum()) != known_average(n)
