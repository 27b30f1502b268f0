"""How fast the clocks of a GPU run while its memory is busy."""

from __future__ import annotations

import time

import torch

from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.world.rank import Rank

COPIES = 50
COPIED_BYTES = 512 * MiB
SECONDS = 1.0
SM, MEMORY = 1, 2  # nvml.h: nvmlClockType_t


def clocks_under_load(rank: Rank) -> dict[str, int] | None:
    """The highest clocks of this GPU, `sm` and `memory` in MHz, that NVML showed while its memory was copied, and the
    clock event `reasons` of that moment; None where NVML does not tell.

    Copies leave the power that products do not: a GPU whose clocks nobody holds runs them at their maximum.
    """
    import pynvml

    assert rank.gpu is not None
    a = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=rank.device)
    b = torch.empty_like(a)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(rank.gpu.uuid)
        highest = {"sm": 0, "memory": 0, "reasons": 0}
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            for _ in range(COPIES):
                b.copy_(a)
            sm = int(pynvml.nvmlDeviceGetClockInfo(handle, SM))
            if sm > highest["sm"]:
                highest |= {"sm": sm, "reasons": int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))}
            highest["memory"] = max(highest["memory"], int(pynvml.nvmlDeviceGetClockInfo(handle, MEMORY)))
            torch.cuda.synchronize(rank.device)
        return highest
    except pynvml.NVMLError_NotSupported:
        return None
    finally:
        pynvml.nvmlShutdown()
