"""The variables that can change a result, and nothing else of the environment."""

from __future__ import annotations

import os
import re

from pytest_gpufleet.redaction import variable

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
    return {name.strip(): value.strip() for name, _, value in parts if name.strip().startswith("NCCL_")}


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
