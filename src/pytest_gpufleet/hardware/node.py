"""One node of a fleet: its GPUs and the host around them."""

from __future__ import annotations

from datetime import datetime, timezone

from pytest_gpufleet.hardware import host
from pytest_gpufleet.hardware.nvml import Source, read_all
from pytest_gpufleet.model.facts import COUNTERS, SLOW_COUNTERS
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.machine import Machine


def take(source: Source, topology: GpuTopology) -> Machine:
    """Everything about the GPUs of a run and their host."""
    counted = read_all(source, (*COUNTERS, *SLOW_COUNTERS))
    gpus = tuple(Gpu(gpu.index, {**gpu.facts, **now}) for gpu, now in zip(topology.gpus, counted, strict=True))
    return Machine(gpus, host.read(), datetime.now(timezone.utc).isoformat(timespec="seconds"))
