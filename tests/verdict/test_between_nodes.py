"""Figures between nodes, held against those of their peers and against limits that were made for such nodes."""

from itertools import combinations

import pytest

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import GpuTopology, joined
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.model.place import Pair, Place, Where, read
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.profile import for_gpu
from tests import runs

H100 = "NVIDIA H100 80GB HBM3"
PAIRS = {"collective": "all_reduce", "bytes": 8 * GiB, "dtype": "float32", "ranks": 16, "nodes": 2, "network": 400}


def cluster(count: int, model: str = H100) -> GpuTopology:
    return joined(
        {node: runs.topology(f"gf{node}", model) for node in range(count)}, {n: f"gf{n}" for n in range(count)}
    )


def judged(measurement: Measurement, nodes: int, model: str = H100) -> Finding:
    return judge(measurement, for_gpu(model), cluster(nodes, model), "a", rehearsal=False, required=False)


def rails(nodes: int, **slow: float) -> Measurement:
    values: dict[Where, float] = {Place(node, "rail", rail): 48.0 for node in range(nodes) for rail in range(4)}
    values |= {read(where.replace("_", "/")): value for where, value in slow.items()}
    return Measurement("rail_bandwidth", values, {"at_once": "all", "bytes": GiB})


def pairs(nodes: int, reached: float = 449.0, **slow: float) -> Measurement:
    each = combinations([Place(node, "node") for node in range(nodes)], 2)
    values: dict[Where, float] = {Pair(*two): reached for two in each}
    values |= {read(where.replace("_", "-")): value for where, value in slow.items()}
    return Measurement("node_group_busbw", values, PAIRS)


@pytest.mark.parametrize(
    ("slow", "told"),
    [
        ({}, []),
        ({"node2_rail1": 44.0}, []),  # 8 % less
        ({"node2_rail1": 24.0}, ["node2/rail1"]),
        ({f"node1_rail{rail}": 24.0 for rail in range(4)}, [f"node1/rail{rail}" for rail in range(4)]),
    ],
)
def test_a_rail_is_held_against_all_rails_of_all_nodes(slow: dict[str, float], told: list[str]) -> None:
    finding = judged(rails(3, **slow), 3)
    assert [str(where) for where in finding.slower_than_peers or ()] == told
    assert finding.state == ("missed" if told else "for information")


def test_the_rails_of_two_nodes_are_told_as_pairs() -> None:
    ends = [(Place(0, "rail", rail), Place(1, "rail", rail)) for rail in range(4)]
    figures = {Pair(*two): 48.0 for two in ends[:3]} | {Pair(*ends[3]): 20.0}
    finding = judged(Measurement("rail_bandwidth", figures, {"at_once": "one", "bytes": GiB}), 2)
    assert [str(where) for where in finding.slower_than_peers or ()] == ["rail3-node1/rail3"]


@pytest.mark.parametrize(
    ("nodes", "slow", "told"),
    [
        (3, {}, []),
        (3, {"node_node2": 216.0, "node1_node2": 231.0}, ["node-node2", "node1-node2"]),
        (4, {"node1_node3": 300.0}, ["node1-node3"]),
    ],
)
def test_a_pair_of_nodes_is_held_against_the_other_pairs(nodes: int, slow: dict[str, float], told: list[str]) -> None:
    """Of nodes whose GPUs no profile knows."""
    figures = Measurement("node_group_busbw", pairs(nodes, **slow).values, PAIRS)
    topology = cluster(nodes, runs.UNKNOWN)
    finding = judge(figures, None, topology, "a", rehearsal=False, required=False)
    assert [str(where) for where in finding.slower_than_peers or ()] == told
    assert finding.state == ("missed" if told else "for information")


@pytest.mark.parametrize(("reached", "state"), [(449.0, "met"), (231.0, "missed")])
def test_all_pairs_alike_are_held_against_the_published_limit(reached: float, state: str) -> None:
    """Where all are slow, peers tell nothing: 216 to 231 GB/s were seen where 450 are usual (nccl#2409)."""
    finding = judged(pairs(4, reached), 4)
    assert (finding.state, finding.limit and finding.limit.value) == (state, 440)


def test_a_lone_pair_without_a_limit_is_for_information() -> None:
    finding = judge(pairs(2), None, cluster(2, runs.UNKNOWN), "a", rehearsal=False, required=False)
    assert (finding.state, finding.slower_than_peers) == ("for information", None)


def test_pairs_of_other_gpus_are_no_peers() -> None:
    models = dict(
        enumerate([H100, H100, H100, "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"])
    )
    topology = joined({n: runs.topology(f"gf{n}", model) for n, model in models.items()}, {n: f"gf{n}" for n in models})
    fast, slow = combinations(range(3), 2), combinations(range(3, 6), 2)
    figures = {Pair(Place(a, "node"), Place(b, "node")): 449.0 for a, b in fast}
    figures |= {Pair(Place(a, "node"), Place(b, "node")): 190.0 for a, b in slow}
    finding = judge(
        Measurement("node_group_busbw", figures, PAIRS), None, topology, "a", rehearsal=False, required=False
    )
    assert finding.slower_than_peers == {}


def test_what_nodes_do_together_is_not_held_against_a_limit_of_one_machine() -> None:
    alone = {**PAIRS, "ranks": 8, "nvls": True}
    del alone["nodes"]
    slow = Measurement("busbw", {"world": 50.0}, alone)
    assert judged(slow, 2).state == "missed"
    assert judged(Measurement("busbw", {"world": 50.0}, {**alone, "nodes": 4}), 4).state == "for information"
