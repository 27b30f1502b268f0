"""The links between GPU and host."""

from __future__ import annotations

import torch

from pytest_gpufleet.probes.reading import MiB
from pytest_gpufleet.world.rank import Rank

COPIES = 20


def pcie_generation_under_load(rank: Rank) -> tuple[int, int]:
    """The generation at which this GPU's PCIe link runs while copies are under way, and the highest it can."""
    import pynvml

    assert rank.gpu is not None
    here = torch.empty(64 * MiB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=rank.device, pin_memory=False)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(rank.gpu.uuid)
        for _ in range(COPIES):
            there.copy_(here, non_blocking=True)
        now = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
        torch.cuda.synchronize()
        return int(now), int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    finally:
        pynvml.nvmlShutdown()
