"""Each rail of each node carries what its network adapter can: the way from a GPU to its like on other nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpufleet import Judge, LiveMachine, Measurement, MiB, Size, World, expect_none
from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.model.events import NO_NETWORK
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.probes import between_nodes
from pytest_gpufleet.probes.search.nodes import slow_rails, who_slows_rails

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


@pytest.mark.figures(
    "rail_bandwidth", required=("rail_bandwidth",), peers="which are all rails of all nodes with such GPUs"
)
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


@pytest.mark.figures(
    "rdma_bandwidth", "rdma_latency", required=("rdma_bandwidth",), peers="which are all rails of all nodes"
)
def test_rdma_bandwidth_and_latency_between_nodes(
    machine: LiveMachine, judge: Judge, rdma_write: Callable[..., Any], fleet_network: str
) -> None:
    """RDMA write bandwidth and latency of each rail between nodes

    By `ib_write_bw` and `ib_write_lat` of perftest 23.07 or newer, from host memory, without NCCL and GPUs, one rail
    after the other, both ways; it does not apply where perftest is not installed. Each rail must reach 85 % of its port
    rate, or of `--fleet-network`, with the best of its partners; latency is shown. Low here and in the NCCL check of
    rails: cable, transceiver, switch port and PFC (`mlxlink`, `ibstat`), or the PCIe link of the adapter. Low in that
    of NCCL alone: GPUDirect RDMA, ACS and NCCL_* variables.
    """
    ports = assertions.rdma_rails(machine.nodes)
    hosts = [node.machine.host for node in machine.nodes if node.machine]
    used = [port for host in hosts for port in network_ports.ports_of(host) if port.port in ports.values()]
    names = {node.number: node.name for node in machine.nodes if node.machine}
    writes = between_nodes.RdmaRails(rdma_write, names, ports, SEED)
    rate, asked = network_ports.line_rate(used), fleet_network != NO_NETWORK
    if asked and fleet_network:
        rate = int(min(rate, float(fleet_network)))
    rails: list[between_nodes.Rails] = []

    def measured() -> Measurement:
        rails.append(writes.bandwidth(rate))
        return rails[-1].measurement

    judge(measured, required=asked, on_miss=lambda: slow_rails(rails[-1], names, writes.reached))
    expect_none(writes.failed.values())
    judge(writes.latency(), required=False)
    expect_none(writes.failed.values())
