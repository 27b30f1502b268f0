"""NCCL sends over the fastest way that this machine has, before anybody asks how fast its collectives are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pytest_gpufleet import Fault, GiB, GpuTopology, KiB, MiB, Size, World, not_applicable
from pytest_gpufleet.machine.nccl_log import NcclLog
from pytest_gpufleet.probes.collectives import speed, transport
from pytest_gpufleet.probes.collectives.table import COLLECTIVES

pytestmark = [
    pytest.mark.chapter("Transport", "Does NCCL send over NVLink, NVLS and network adapters where they are?"),
    pytest.mark.level("standard"),
]

# Those by which collectives are judged, of latency and of bandwidth.
SIZES = [Size(nbytes, rehearsal=max(8, nbytes // MiB)) for nbytes in (8, 32 * KiB, 64 * MiB, 1 * GiB, 8 * GiB)]


@pytest.mark.needs(ranks=2)
def test_nccl_uses_the_fastest_transport(
    world: World,
    nccl_group: World,
    gpu_topology: GpuTopology,
    notice: Callable[[Iterable[Fault]], None],
    record_transport: Callable[[NcclLog, int], None],
) -> None:
    """NCCL uses P2P and NVLS where GPUs have them

    Where these fail NCCL goes on through host memory or sockets, and everything works at a fraction of its speed. Its
    own log of a short run (NCCL_DEBUG=INFO) says what it did; byte counters of NVLinks and ports are read beside it.
    Look at the fabric manager, IOMMU and ACS, the container's /dev/shm and /dev/infiniband, and NCCL's log. If small
    collectives hang too, they are tried without P2P, and the pairs of GPUs that hang are named. What a variable asks
    for, like NCCL_NVLS_ENABLE=0, is a note. CPU ranks have no such log.
    """
    sizes = {name: speed.fitting(nccl_group, name, SIZES) for name in COLLECTIVES}
    seen = transport.transport(world, nccl_group, sizes)
    if not nccl_group.gpus:
        not_applicable("CPU ranks talk by Gloo, which has no transports to choose from")
    print(seen[0])
    record_transport(seen[0], nccl_group.size)
    notice(transport.expect_fastest(seen, nccl_group, gpu_topology))
