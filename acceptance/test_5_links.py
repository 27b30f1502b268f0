"""Links carry data unharmed and as fast as on a healthy machine: between host and GPU, and between every two GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import pytest

from pytest_gpufleet import (
    GpuTopology,
    Judge,
    LiveMachine,
    Measurement,
    MiB,
    Size,
    World,
    expect_none,
    not_applicable,
)
from pytest_gpufleet.machine import memory
from pytest_gpufleet.probes.links import copies
from pytest_gpufleet.probes.links.copying import Copied
from pytest_gpufleet.probes.memory import host_memory_bandwidth
from pytest_gpufleet.probes.search.collective import who_slows_pairs

pytestmark = pytest.mark.chapter("Links", "Are the links between the GPUs, and to the host, as fast as they should be?")
between_gpus = pytest.mark.needs(ranks=2)

AtOnce = Literal["one", "all"]
HostCopies = Callable[..., Sequence[Measurement]]

DIRECTIONS: tuple[copies.HostDirection, ...] = (*copies.ONE_WAY, "both")
ONE_DIRECTION = "for one direction at a time"
BUFFER = Size(512 * MiB, rehearsal=MiB)
# Half of nvbandwidth's, which takes as long to pin as to copy; at 55 GB/s a copy of it lasts 5 ms, its launch 0.005.
HOST_BUFFER = Size(256 * MiB, rehearsal=MiB)
# An array of STREAM is four times the last cache: of the processors in GPU servers that has up to 4 MiB a core.
ARRAY = Size(16 * MiB, rehearsal=MiB)
TRIAD_SECONDS = Size(0.4, rehearsal=0.02)
SMALL_BUFFER = Size(16 * MiB, rehearsal=MiB)


@pytest.fixture(scope="module")
def host_copies(world: World) -> HostCopies:
    """host_copies("one", direction): what crosses the link of each GPU while the others rest; with "all" while all
    copy. Every direction is measured once, whichever check asks first, and anew by host_copies(..., again=True)."""

    @cache
    def first(at_once: AtOnce) -> dict[copies.HostDirection, Copied]:
        return copies.host_bandwidth(world, DIRECTIONS, at_once, HOST_BUFFER.on(world))

    def copied(at_once: AtOnce, direction: copies.HostDirection, again: bool = False) -> Sequence[Measurement]:
        if again:
            return figures(copies.host_bandwidth(world, [direction], at_once, HOST_BUFFER.on(world), True)[direction])
        return figures(first(at_once)[direction])

    return copied


def figures(copied: Copied) -> Sequence[Measurement]:
    """Its measurements; but first its data, since nobody asks how fast a link is that corrupts it."""
    expect_none(copied.faults)
    return copied.measurements


@between_gpus
def test_data_crosses_every_pair_unharmed(world: World, gpu_topology: GpuTopology) -> None:
    """Copies between GPUs are exact

    Each GPU reads the memory of every other one while all copy. A wrong word means that a link, a switch or a GPU
    corrupts data silently. Check the NVLink errors of the two named GPUs (`nvidia-smi nvlink -e`) and XIDs in the
    kernel log; over PCIe check IOMMU and ACS first.
    """
    expect_none(copies.wrong_data(world, gpu_topology, SMALL_BUFFER.on(world)))


@pytest.mark.level("standard")
@pytest.mark.host_alone
@pytest.mark.figures("host_bandwidth", required=("host_bandwidth",), of=ONE_DIRECTION, peers=ONE_DIRECTION)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_host_bandwidth_of_each_gpu(judge: Judge, host_copies: HostCopies, direction: copies.HostDirection) -> None:
    """Host-GPU bandwidth, one GPU at a time

    Data loading and checkpoints take this path; with both directions busy each is measured by itself. Low for one GPU:
    lower PCIe generation or fewer lanes (`nvidia-smi -q -d PCIE` under load), a bad slot or riser, or another user of
    the link. Low for half of them: a CPU socket or its memory. Low for all: BIOS settings, or the IOMMU of a virtual
    machine.
    """
    measured = partial(host_copies, "one", direction)
    judge(*measured(), required=direction in copies.ONE_WAY, again=partial(measured, again=True))


@between_gpus
@pytest.mark.level("standard")
@pytest.mark.host_alone
@pytest.mark.figures("host_bandwidth", peers="at the same NUMA node, where the machine shows which these are")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_host_bandwidth_of_all_gpus(judge: Judge, host_copies: HostCopies, direction: copies.HostDirection) -> None:
    """Host-GPU bandwidth, all GPUs at once

    GPUs that share a PCIe switch, a socket or host memory get less than alone, and how much less depends on the
    machine. So GPUs are compared with those at the same NUMA node. One that is slower has a bad slot or riser, or is
    behind a switch that others do not share. Compare machines of one kind: `gpufleet compare`.
    """
    measured = partial(host_copies, "all", direction)
    judge(*measured(), required=False, again=partial(measured, again=True))


@pytest.mark.level("standard")
@pytest.mark.host_alone
@pytest.mark.figures("host_memory_bandwidth")
def test_host_memory_bandwidth(world: World, judge: Judge, machine: LiveMachine) -> None:
    """Host memory bandwidth of each NUMA node

    All data that GPUs get from the host come out of this memory. A NUMA node slower than the others lacks a memory
    module or has one in the wrong slot (`dmidecode -t memory`, `edac-util`). If root can read the modules, all nodes
    together must reach two fifths of their rated bandwidth. Bandwidth between CPUs, from each node to the memory of one
    on another socket, is shown: two sockets slower than those of like machines have lost a link. It needs whole NUMA
    nodes, which a container may not have; other programs on the host lower the measurement.
    """
    found: list[Measurement] = []

    def measured() -> Sequence[Measurement]:
        found[:] = host_memory_bandwidth(world, ARRAY.on(world), TRIAD_SECONDS.on(world))
        return found

    judge(measured, required=False)
    if machine.gpus:  # a rehearsal moves next to nothing
        expect_none(memory.slower_than_modules([*found[0].values.values()], machine.host))


@between_gpus
@pytest.mark.level("standard")
@pytest.mark.host_alone
@pytest.mark.figures("pair_bandwidth", required=("pair_bandwidth",), of="when a GPU reads")
@pytest.mark.parametrize("direction", ["read", "write", "both"])
def test_pair_bandwidth(world: World, judge: Judge, gpu_topology: GpuTopology, direction: copies.PairDirection) -> None:
    """Bandwidth between GPUs, for every pair

    Every collective runs at the pace of its slowest link, and a link can be slow in one direction only. If the slow
    pairs have one GPU in common, it has lost NVLinks or runs them slowly (`nvidia-smi nvlink -s`): reseat or replace
    it. All pairs slow: traffic does not use NVLink; check `nvidia-smi topo -m`, `nvidia-smi topo -p2p r` and, with
    NVSwitches, the fabric manager.
    """
    found: list[Measurement] = []

    def measured() -> Sequence[Measurement]:
        found[:] = figures(copies.pair_bandwidth(world, gpu_topology, direction, BUFFER.on(world)))
        return found

    judge(
        measured,
        required=direction == "read",  # the one direction for which figures are published
        on_miss=lambda: who_slows_pairs([each.values for each in found]),
    )


@between_gpus
@pytest.mark.level("standard")
@pytest.mark.host_alone
@pytest.mark.figures("ring_bandwidth")
def test_ring_bandwidth(world: World, judge: Judge, gpu_topology: GpuTopology) -> None:
    """Bandwidth from each GPU to the next, all at once

    Without an NVSwitch collectives move data this way. Hops share PCIe switches, the link between sockets and host
    memory; the slowest one is the theoretical limit of collectives. Slow while each pair by itself is fast: look for
    what these hops share, at the BIOS (NUMA nodes per socket, IOMMU), and at ACS.
    """
    if gpu_topology.fabric == "nvswitch":
        not_applicable("behind an NVSwitch no two hops share a link")
    judge(lambda: figures(copies.ring_bandwidth(world, gpu_topology, BUFFER.on(world))), required=False)


@between_gpus
@pytest.mark.level("standard")
@pytest.mark.host_alone
@pytest.mark.figures("pair_latency")
def test_pair_latency(world: World, judge: Judge, gpu_topology: GpuTopology) -> None:
    """Latency between GPUs, for every pair

    Time of a copy of 16 bytes. For information, not judged. A pair with many times the latency of others with the same
    kind of link takes a wrong path.
    """
    judge(lambda: figures(copies.pair_latency(world, gpu_topology)), required=False)
