"""Collectives are as fast as on a healthy machine of this model."""

import pytest

from pytest_gpufleet import GiB, MiB, bus_bandwidth, measure, not_applicable
from pytest_gpufleet.probes.collectives import COLLECTIVES, buffer_bytes

JUDGED = [64 * MiB, 1 * GiB, 8 * GiB]
CURVE = [1 * MiB, 4 * MiB, 16 * MiB]
REHEARSAL_SCALE = 1024


@pytest.mark.level("standard")
@pytest.mark.parametrize("nbytes", CURVE + JUDGED, ids=lambda nbytes: f"{nbytes // MiB}MiB")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_bandwidth(nccl_group, judge, collective, nbytes):
    """Bus bandwidth of a collective over all GPUs

    Measured as nccl-tests does, so the figures can be compared: 20 operations in a row, median of three. Low for every
    collective: traffic does not go over NVLink (`nvidia-smi topo -m`, the fabric manager on machines with an NVSwitch,
    NCCL_* variables left in the environment: the report lists them), or one GPU has lost links. Low for large sizes
    only: a link runs at reduced speed. NCCL_DEBUG=INFO shows which way NCCL takes.
    """
    if nccl_group.size == 1:
        not_applicable("one rank has nobody to talk to")
    memory = min((gpu.memory_bytes for gpu in nccl_group.gpus), default=None)
    if memory is None:
        nbytes //= REHEARSAL_SCALE
    elif buffer_bytes(collective, nbytes, nccl_group.size) > 0.8 * memory:
        not_applicable(f"buffers for {nbytes // MiB:,} MiB do not fit into the memory of this GPU model")
    judge(measure(nccl_group, bus_bandwidth, collective, nbytes), required=nbytes in JUDGED)
