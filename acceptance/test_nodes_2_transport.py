"""NCCL sends between nodes by their network adapters, before anybody asks how fast the network is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pytest_gpufleet import Fault, GiB, GpuTopology, MiB, Size, World, not_applicable
from pytest_gpufleet.machine.nccl_log import NcclLog
from pytest_gpufleet.probes.collectives import transport

pytestmark = [
    pytest.mark.chapter("Between nodes: transport", "Does NCCL send by the network adapters of the nodes?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
]

# As much of all_reduce as decides for NVLS; all_to_all takes every way there is.
SIZES = {"all_reduce": Size(1 * GiB, rehearsal=64), "all_to_all": Size(64 * MiB, rehearsal=64)}


def test_nccl_uses_the_network_adapters(
    world: World,
    nccl_group: World,
    notice: Callable[[Iterable[Fault]], None],
    record_transport: Callable[[NcclLog, int], None],
) -> None:
    """NCCL uses the network adapters of all nodes

    Where nodes have active InfiniBand or RoCE ports and NCCL cannot use them, it goes on over sockets, at a tenth of
    the speed. Its own log of a short run (NCCL_DEBUG=INFO) says what it did; byte counters of ports are read beside it.
    Look at /dev/infiniband and memlock of the container, at libibverbs and NCCL_IB_HCA, and at NCCL's log. What a
    variable asks for, like NCCL_IB_DISABLE=1, is a note. CPU ranks have no such log.
    """
    seen = transport.transport(world, nccl_group, {name: [size.on(nccl_group)] for name, size in SIZES.items()})
    if not nccl_group.gpus:
        not_applicable("CPU ranks talk by Gloo, which has no transports to choose from")
    print(seen[0])
    record_transport(seen[0], nccl_group.size)
    notice(transport.expect_fastest(seen, nccl_group, GpuTopology()))
