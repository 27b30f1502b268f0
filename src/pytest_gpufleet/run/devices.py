"""What a run stands on: GPUs, or CPU ranks in their place."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from pytest_gpufleet.hardware import driver_signs, facts, nvml
from pytest_gpufleet.hardware.facts import Source
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.plugin.options import REHEARSAL_RANKS, Options


@dataclass(frozen=True)
class Ground:
    """What a run stands on: GPUs, or CPU ranks and why there are no GPUs."""

    topology: GpuTopology
    rehearsal_ranks: int  # 0: a real run
    source: Source | None = None  # NVML, while the run lasts

    @property
    def why(self) -> str:
        """Why there are no GPUs."""
        return self.topology.absent

    @classmethod
    def without_gpus(cls, *why: str, ranks: int = 0) -> Ground:
        return cls(GpuTopology(problems=() if ranks else why, absent="; ".join(why), **nvml.software()), ranks)


def find(options: Options, stack: ExitStack) -> Ground:
    """What the options ask for and the machine has; NVML stays open until `stack` is closed. UsageError for --gpus all
    without any."""
    if options.rehearse:
        return Ground.without_gpus("--rehearse was given", ranks=options.rehearse)
    wanted = options.gpus if isinstance(options.gpus, int) else None
    try:
        source, topology = stack.enter_context(facts.open_source(wanted))
    except nvml.NoGpus as reason:
        if options.gpus == "all":
            raise pytest.UsageError(f"--gpus all: {reason}") from None
        if options.gpus == "auto":
            return _instead_of_gpus(reason)
        return Ground.without_gpus(str(reason))
    return Ground(topology, 0, source)


def _instead_of_gpus(reason: nvml.NoGpus) -> Ground:
    """What --gpus auto stands on without GPUs: a rehearsal only where nothing speaks for NVIDIA hardware, since a
    server whose driver is dead must not pass for a machine without GPUs."""
    seen = driver_signs.signs_of_nvidia()
    if not isinstance(reason, nvml.NoDriver):
        seen.append("an installed driver")
    if not seen:
        return Ground.without_gpus(str(reason), ranks=REHEARSAL_RANKS)
    found = f"this machine shows NVIDIA hardware ({'; '.join(seen)}), so it is no rehearsal: --rehearse makes one"
    return Ground.without_gpus(str(reason), found)
