"""Collectives are as fast as on a healthy machine of this model."""

from __future__ import annotations

from functools import partial

import pytest

from pytest_gpufleet import (
    GiB,
    GpuTopology,
    Judge,
    KiB,
    MiB,
    Size,
    World,
    bus_bandwidth,
    measure,
    measure_all,
    not_applicable,
)
from pytest_gpufleet.probes.collectives import speed
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.search.collective import who_is_slow

pytestmark = [
    pytest.mark.chapter("Collectives", "Do all GPUs together exchange data as fast as they should?"),
    pytest.mark.level("standard"),
    pytest.mark.host_alone,  # without NVLink the data go through host memory and PCIe
    pytest.mark.needs(ranks=2),
]


def sizes(*on_gpus: int) -> list[Size[int]]:
    return [Size(nbytes, rehearsal=nbytes // KiB) for nbytes in on_gpus]


SMALL = {"standard": [8, 1 * KiB, 32 * KiB], "burnin": [8 << i for i in range(13)]}  # up to 32 KiB
JUDGED = sizes(64 * MiB, 1 * GiB, 8 * GiB)
UP_TO_16_GIB = sizes(*(64 * KiB << i for i in range(19)))
CURVE = {
    "standard": sizes(1 * MiB, 4 * MiB, 16 * MiB, 256 * MiB),
    "burnin": [size for size in UP_TO_16_GIB if size not in JUDGED],
}


@pytest.mark.figures("collective_latency")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_latency(nccl_group: World, judge: Judge, gpu_topology: GpuTopology, fleet_level: str, collective: str) -> None:
    """Latency of small collectives

    Measured from a CUDA graph, as with `nccl-tests -G`, so the host has no part in it. Training with many small tensors
    waits for it. Several times the usual value: traffic goes through host memory and not over NVLink (`nvidia-smi topo
    -m`, NCCL_* variables), or the clocks of a GPU are low.
    """
    judge(
        partial(measure_all, nccl_group, speed.sweep, speed.collective_latency, collective, SMALL[fleet_level]),
        required=False,
        on_miss=lambda: who_is_slow(nccl_group, gpu_topology, collective, SMALL[fleet_level][0]),
    )


@pytest.mark.figures("launch_time")
def test_launch_time(nccl_group: World, judge: Judge) -> None:
    """Launch time of collectives on the host

    Training launches thousands of small operations a second, and all GPUs wait for the one whose host is slow. Slow for
    one GPU: another program uses its cores, or its CPU affinity is wrong (`taskset -p`, `numactl --show`, the cpuset of
    the container). Slow for all GPUs: set the CPU governor to performance and switch off deep C-states (`cpupower
    frequency-info`, `cpupower idle-info`).
    """
    judge(partial(measure, nccl_group, speed.launch_time), required=False)


@pytest.mark.figures("busbw")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bandwidth_curve(nccl_group: World, judge: Judge, fleet_level: str, collective: str) -> None:
    """Bus bandwidth of collectives by size

    For the curves in the report: on a healthy machine they rise without a dip. Where a curve bends, NCCL changes its
    algorithm or protocol. Judged only against limits of your own.
    """
    fit = speed.fitting(nccl_group, collective, CURVE[fleet_level])
    both_ways = fleet_level == "burnin" and COLLECTIVES[collective].in_place == "also"
    curve = partial(measure_all, nccl_group, speed.sweep, bus_bandwidth, collective, fit)
    judge(*(partial(curve, in_place=way) for way in ([False, True] if both_ways else [None])), required=False)


@pytest.mark.figures("busbw", required=("busbw",), of="from 1 GiB on, for all collectives but gather and scatter")
@pytest.mark.parametrize("size", JUDGED, ids=lambda size: f"{size.gpus // MiB}MiB")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_bandwidth(
    nccl_group: World, judge: Judge, gpu_topology: GpuTopology, collective: str, size: Size[int]
) -> None:
    """Bus bandwidth of collectives over all GPUs

    Measured as nccl-tests does. If it is too low, the suite searches for the GPU or the link that slows the others, and
    the first line says what it found. Low for every collective: traffic does not use NVLink (`nvidia-smi topo -m`, the
    fabric manager, NCCL_* variables in the report), or a GPU has lost links. Low for large sizes only: a link runs at
    reduced speed; NCCL_DEBUG=INFO shows the path.
    """
    fit = speed.fitting(nccl_group, collective, [size])
    if not fit:
        not_applicable(f"buffers for {size.gpus // MiB:,} MiB do not fit into the memory of this GPU model")
    judge(
        partial(measure, nccl_group, bus_bandwidth, collective, *fit),
        # Nobody publishes figures for gather and scatter; below 1 GiB the links alone do not say what is fast enough.
        required=collective not in ("gather", "scatter") and size.gpus >= GiB,
        on_miss=lambda: who_is_slow(nccl_group, gpu_topology, collective, *fit),
    )
