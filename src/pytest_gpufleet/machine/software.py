"""Versions of torch and its libraries, and the variables of the environment that can change a result."""

import os
import re
from collections.abc import Iterator
from typing import Any

from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.redaction import variable


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


STEERING = re.compile(
    r"(NCCL|CUDA|TORCH|PYTORCH|GLOO|NVIDIA|NVSHMEM|CUBLAS|CUDNN|OMP|MKL|UCX|TORCHINDUCTOR|TRITON)_\w+"
    r"|LD_PRELOAD|LD_AUDIT"
)
# What images carry for the container runtime: long, and without effect on a process inside.
NOISE = re.compile(r"NVIDIA_(REQUIRE|PRODUCT|DRIVER_CAP)\w+")


def steering() -> dict[str, str]:
    """The environment, and what stands in the files from which NCCL takes variables that are not in it (NCCL's manual,
    "Environment Variables")."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    return {**_assignments("/etc/nccl.conf"), **_assignments(own), **os.environ}


def _assignments(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            parts = [line.partition("=") for line in file]
    except OSError:
        return {}
    # NCCL takes what stands on both sides of "=" as it is: it looks for no variable "NCCL_ALGO " (misc/param.cc).
    return {name: value.rstrip("\r\n") for name, _, value in parts if name.startswith("NCCL_")}


def of_this_process() -> dict[str, str]:
    """The variables that steer drivers and libraries and stand in the environment of this process."""
    return {name: value for name, value in os.environ.items() if STEERING.fullmatch(name)}


def put_back(before: dict[str, str]) -> None:
    """Make them again what `of_this_process` gave."""
    for name in of_this_process().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def relevant() -> dict[str, str]:
    """The variables by which users and images steer drivers and libraries, sorted by name.

    A value is hidden where the name promises a secret, and so is the part of any other that looks like one: reports go
    from hand to hand.
    """
    return {
        name: variable(name, value)
        for name, value in sorted(steering().items())
        if STEERING.fullmatch(name) and not NOISE.fullmatch(name)
    }


ENVIRONMENT = HostFact("environment", dict[str, str], relevant)
