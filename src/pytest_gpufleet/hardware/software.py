"""Versions of torch and of what it was built with, and whether a driver can run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def software() -> dict[str, Any]:
    """As arguments of GpuTopology."""
    import torch
    import torch.distributed

    nccl: Any = torch.cuda.nccl
    # Not torch.backends.cudnn.version(), which since pytorch/pytorch#169409 asks every GPU whether this cuDNN knows it:
    # for that it starts CUDA, in a process that is to touch no GPU, and it fails where one is too old.
    bindings: Any = torch._C
    backend: Any = torch.backends.cudnn
    cudnn = bindings._cudnn if backend.is_available() else None
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_text(cudnn.getVersionInt()) if cudnn else None,
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
        "torch": str(torch.__version__),  # which is a TorchVersion
    }


def _cudnn_text(version: int) -> str:
    """91900 is 9.19.0; before version 9, 8907 was 8.9.7."""
    scale = 10000 if version >= 90000 else 1000
    return f"{version // scale}.{version % scale // 100}.{version % 100}"


def driver_problems(driver: str | None, cuda_driver: str | None, cuda: str | None) -> Iterator[str]:
    """Minor versions of CUDA are compatible within a major one, so only an older major is too old."""
    if cuda is None:
        yield "the installed torch is a CPU build: install one with CUDA"
    elif cuda_driver and int(cuda_driver.split(".")[0]) < int(cuda.split(".")[0]):
        yield f"driver {driver} supports CUDA {cuda_driver}, but torch was built for CUDA {cuda}: update the driver"
