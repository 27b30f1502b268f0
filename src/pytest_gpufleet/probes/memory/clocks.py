"""How fast the clocks of a GPU run while its memory is busy."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import torch

from pytest_gpufleet.hardware import nvml
from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.world.rank import Rank

COPIES = 50
COPIED_BYTES = 512 * MiB
SECONDS = 1.0
SM, MEMORY = 1, 2  # nvml.h: nvmlClockType_t


def clocks_under_load(rank: Rank) -> dict[str, int] | None:
    """The highest clocks of this GPU, `sm` and `memory` in MHz, that NVML showed while its memory was copied, and the
    clock event `reasons` of that moment; None where NVML does not tell.

    Copies leave the power that products do not: a GPU whose clocks nobody holds runs them at their maximum. Once both
    were seen there, nothing more can show; else it goes on for SECONDS.
    """
    assert rank.gpu is not None
    a = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=rank.device)
    b = torch.empty_like(a)
    with nvml.session() as pynvml, suppress(pynvml.NVMLError_NotSupported):
        handle = pynvml.nvmlDeviceGetHandleByUUID(rank.gpu.uuid)
        highest = {"sm": 0, "memory": 0, "reasons": 0}
        most = {"sm": _most(pynvml, handle, SM), "memory": _most(pynvml, handle, MEMORY)}
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and any(highest[name] < clock for name, clock in most.items()):
            for _ in range(COPIES):
                b.copy_(a)
            sm = int(pynvml.nvmlDeviceGetClockInfo(handle, SM))
            if sm > highest["sm"]:
                highest |= {"sm": sm, "reasons": int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))}
            highest["memory"] = max(highest["memory"], int(pynvml.nvmlDeviceGetClockInfo(handle, MEMORY)))
            torch.cuda.synchronize(rank.device)
        return highest
    return None


def _most(pynvml: Any, handle: Any, clock: int) -> float:
    """MHz; infinite where NVML does not tell."""
    try:
        return float(pynvml.nvmlDeviceGetMaxClockInfo(handle, clock))
    except pynvml.NVMLError_NotSupported:
        return math.inf
