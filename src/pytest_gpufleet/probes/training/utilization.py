"""How busy a GPU is while it trains."""

from __future__ import annotations

from pytest_gpufleet.hardware import nvml
from pytest_gpufleet.hardware.nvml import Nvml
from pytest_gpufleet.model.gpu import Unavailable
from pytest_gpufleet.probes.training.lap import Lap
from pytest_gpufleet.world.rank import Rank

READING = "utilization_percent"


def utilization(rank: Rank, just_done: Lap) -> float | None:
    """The share of the time in which the GPU ran anything, as NVML has it right after a lap: of its last sample period,
    a sixth of a second to a second (nvml.h, nvmlUtilization_t). None where NVML does not tell.

    Of a CPU rank the share of a core that it used in the lap.
    """
    if rank.gpu is None:
        return min(1.0, just_done.processor_seconds / just_done.seconds)
    with nvml.session() as driver:
        gpu = Nvml(driver, [driver.nvmlDeviceGetHandleByUUID(rank.gpu.uuid)])
        percent = nvml.read(gpu, 0, [READING])[READING]
    return None if isinstance(percent, Unavailable) else float(percent) / 100
