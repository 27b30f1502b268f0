"""The GPUs of several nodes as those of one run: how places are called, and which are held against which."""

from dataclasses import replace

import pytest

from pytest_gpufleet.model.place import WORLD, ClusterTopology, GpuTopology, Pair, Place, gpu, joined, on_node, read
from tests import clusters, runs

THREE = clusters.topology("gf1", "gf2", "gf3")


@pytest.mark.parametrize(("place", "beginning"), [
    ("gpu3", "gf1 GPU 3 NVIDIA X9000, serial gf1-S3"),
    ("node2/gpu0", "gf3 GPU 0 NVIDIA X9000, serial gf3-S0"),
    ("node", "gf1"),
    ("node1", "gf2"),
    ("node1/rail2", "gf2 rail 2"),
    ("node1/cpu1", "gf2 CPU rank 1"),
    ("node1-node2", "gf2 and gf3"),
    ("world", "world"),
    ("node7", "node 7"),
])  # fmt: skip
def test_places_are_called_by_the_host(place, beginning):
    assert THREE.identity(read(place)).startswith(beginning)


def test_a_rail_is_called_by_the_network_adapter_next_to_its_gpu():
    alone = runs.topology("gf2")
    gpus = [replace(gpu, facts={**gpu.facts, "network_adapters": [f"mlx5_{gpu.index}"]}) for gpu in alone.gpus]
    both = joined({0: runs.topology("gf1"), 1: replace(alone, gpus=tuple(gpus))}, {0: "gf1", 1: "gf2"})
    assert both.identity(read("node1/rail2")) == "gf2 rail 2 (mlx5_2 next to GPU 2)"
    assert both.identity(read("node1/rail9")) == "gf2 rail 9"


def test_a_node_describes_itself_as_if_it_were_alone_and_is_numbered_and_called_by_the_run():
    assert [gpu.place for gpu in THREE.gpus][3:6] == [gpu(3), gpu(0, node=1), gpu(1, node=1)]
    alone = runs.topology("gf1")
    assert joined({0: alone}, {0: "gf1"}) is alone
    assert on_node(WORLD, 2) == Place(2, "node")
    assert on_node(Pair(gpu(0), gpu(3)), 2) == Pair(gpu(0, node=2), gpu(3, node=2))


def test_what_nodes_have_in_common_is_told_as_such_and_one_that_was_never_heard_takes_nothing_from_it():
    newer = replace(runs.topology("gf2"), driver="590.1", fabric="pcie")
    both = joined({0: runs.topology("gf1"), 1: newer}, {0: "gf1", 1: "gf2"})
    assert (THREE.driver, THREE.fabric) == ("580.159.04", "nvswitch")
    assert (both.driver, both.fabric, both.nccl) == ("580.159.04 and 590.1", "mixed", "2.28.9")
    missing = GpuTopology(absent="its agent was never heard")
    rest = joined({0: runs.topology("gf1"), 1: missing}, {0: "gf1", 1: "gf2"})
    assert (rest.driver, rest.fabric, rest.absent, len(rest.gpus)) == ("580.159.04", "nvswitch", "", 4)


def peers(topology, *places):
    return len({topology.kind(read(place)) for place in places}) == 1


def test_only_like_places_are_peers():
    other = joined(
        {0: runs.topology("gf1"), 1: runs.topology("gf2"), 2: runs.topology("gf3", runs.H200)},
        dict(enumerate(("gf1", "gf2", "gf3"))),
    )
    assert isinstance(other, ClusterTopology)
    assert peers(other, "gpu0", "node1/gpu3")
    assert peers(other, "node", "node1")
    assert peers(other, "rail0", "node1/rail3")
    assert peers(other, "gpu0-gpu1", "node1/gpu2-node1/gpu3")
    assert peers(THREE, "node-node1", "node1-node2")
    unlike = (
        ("gpu0", "node2/gpu0"), ("node", "node2"), ("rail0", "node2/rail0"), ("gpu0", "rail0"), ("node", "rail0"),
        ("gpu0-gpu1", "gpu0-node1/gpu1"), ("node-node1", "node1-node2"),
    )  # fmt: skip
    assert [two for two in unlike if peers(other, *two)] == []
