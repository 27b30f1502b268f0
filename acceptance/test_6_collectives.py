"""Collectives are as fast as on a healthy machine of this model."""

import pytest

from pytest_gpufleet import GiB, KiB, MiB, bus_bandwidth, measure, measure_all, not_applicable
from pytest_gpufleet.probes.collectives.speed import buffer_bytes, latency, sweep
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.search import slow_collective

pytestmark = pytest.mark.level("standard")

SMALL = {"standard": [8, 1 * KiB, 32 * KiB], "burnin": [8 << i for i in range(13)]}  # up to 32 KiB
JUDGED = [64 * MiB, 1 * GiB, 8 * GiB]
UP_TO_16_GIB = [64 * KiB << i for i in range(19)]
CURVE = {
    "standard": [1 * MiB, 4 * MiB, 16 * MiB, 256 * MiB],
    "burnin": [nbytes for nbytes in UP_TO_16_GIB if nbytes not in JUDGED],
}
REHEARSAL_SCALE = 1024


@pytest.fixture(autouse=True)
def several(nccl_group):
    if nccl_group.size == 1:
        not_applicable("one rank has nobody to talk to")


def possible(group, collective, sizes):
    """Those of the sizes whose buffers fit into every GPU; in a rehearsal all of them, made small."""
    if not group.gpus:
        return [nbytes // REHEARSAL_SCALE for nbytes in sizes]
    memory = min(gpu.memory_bytes for gpu in group.gpus)
    return [nbytes for nbytes in sizes if buffer_bytes(collective, nbytes, group.size) <= 0.8 * memory]


@pytest.mark.figures("collective_latency")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_latency(nccl_group, judge, gpu_topology, fleet_level, collective):
    """How long a collective of a few bytes takes

    The time from one launch to the next, as nccl-tests measures it; the first thing to suffer when the host is busy,
    slow or saving power. Training with many small tensors waits for it. High on a healthy host: another process uses
    the processors, or the ranks may use too few of them.
    """
    measurements = measure_all(nccl_group, sweep, latency, collective, SMALL[fleet_level])
    judge(
        *measurements,
        required=False,
        on_miss=lambda: slow_collective.find(nccl_group, gpu_topology, collective, SMALL[fleet_level][0]),
    )


@pytest.mark.figures("busbw")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bandwidth_curve(nccl_group, judge, fleet_level, collective):
    """How the bus bandwidth of a collective grows with the size

    For the curves in the report: on a healthy machine they rise without a dip. Where one bends, NCCL changes its
    algorithm or protocol. These figures are judged only where somebody wrote down a limit for them.
    """
    sizes = possible(nccl_group, collective, CURVE[fleet_level])
    both_ways = fleet_level == "burnin" and COLLECTIVES[collective].in_place == "also"
    measurements = [
        measurement
        for in_place in ([False, True] if both_ways else [None])
        for measurement in measure_all(nccl_group, sweep, bus_bandwidth, collective, sizes, in_place=in_place)
    ]
    judge(*measurements, required=False)


@pytest.mark.figures("busbw")
@pytest.mark.parametrize("nbytes", JUDGED, ids=lambda nbytes: f"{nbytes // MiB}MiB")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_bandwidth(nccl_group, judge, gpu_topology, collective, nbytes):
    """Bus bandwidth of a collective over all GPUs

    Measured as nccl-tests does, so the figures can be compared: 20 operations or more in a row, median of three. If it
    is too low, the suite looks for the GPU or the link that slows the others, and the first line says what it found.
    Low for every collective: traffic does not go over NVLink (`nvidia-smi topo -m`, the fabric manager on machines with
    an NVSwitch, NCCL_* variables left in the environment: the report lists them), or one GPU has lost links. Low for
    large sizes only: a link runs at reduced speed. NCCL_DEBUG=INFO shows which way NCCL takes.
    """
    sizes = possible(nccl_group, collective, [nbytes])
    if not sizes:
        not_applicable(f"buffers for {nbytes // MiB:,} MiB do not fit into the memory of this GPU model")
    measurement = measure(nccl_group, bus_bandwidth, collective, *sizes)
    # Nobody publishes figures for gather and scatter.
    required = collective not in ("gather", "scatter")
    judge(
        measurement,
        required=required,
        on_miss=lambda: slow_collective.find(nccl_group, gpu_topology, collective, *sizes),
    )
