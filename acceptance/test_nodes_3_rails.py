"""Each rail of each node carries what its network adapter can: the way from a GPU to its like on other nodes."""

from __future__ import annotations

import pytest

from pytest_gpufleet import Judge, Measurement, MiB, Size, World
from pytest_gpufleet.probes import between_nodes
from pytest_gpufleet.probes.search.nodes import who_slows_rails

pytestmark = [
    pytest.mark.chapter(
        "Between nodes: rails", "Does each GPU reach its like on other nodes at the rate of its adapter?"
    ),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
]

# At 50 GB/s 256 MiB take 5 ms; on the way over sockets, at 4 GB/s, 67.
MESSAGE = Size(256 * MiB, rehearsal=64 * 1024)
SEED = 16  # by which nodes meet: the same nodes meet in every run


@pytest.mark.figures("rail_bandwidth", peers="which are all rails of all nodes with such GPUs")
@pytest.mark.parametrize("at_once", ["one", "all"])
def test_rail_bandwidth(nccl_group: World, judge: Judge, at_once: between_nodes.RailsAtOnce) -> None:
    """Rail bandwidth of each node

    GPUs of the same index on two nodes send to each other both ways through the adapter next to each; a rail counts
    with the best of its partners. Each must reach 85 % of the port rate, or of `--fleet-network`. One rail of a node
    low: check adapter, cable, transceiver and switch port (`ibstat`, `mlxlink`, `nvidia-smi topo -m`) and GPUDirect
    RDMA; all rails of a node: NCCL_* variables, IOMMU and ACS. Low only while all rails are busy: adapters share a PCIe
    switch or an uplink. Nodes of one NVLink domain do without it here (NCCL_MNNVL_ENABLE=0).
    """
    nbytes = MESSAGE.on(nccl_group)
    rails: list[between_nodes.Rails] = []

    def measured() -> Measurement:
        rails.append(between_nodes.rail_bandwidth(nccl_group, at_once, nbytes, SEED))
        return rails[-1].measurement

    with between_nodes.without_nvlink(nccl_group):
        judge(measured, on_miss=lambda: who_slows_rails(nccl_group, rails[-1], nbytes))
