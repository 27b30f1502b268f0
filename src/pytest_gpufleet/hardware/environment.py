"""The environment variables that can change a result, and nothing else of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

ALLOWED = re.compile(
    r"(NCCL|CUDA|TORCH|PYTORCH|GLOO|NVIDIA|NVSHMEM|CUBLAS|CUDNN|OMP|MKL|UCX|TORCHINDUCTOR|TRITON)_\w+|LD_PRELOAD"
)
# What images carry for the container runtime: long, and without effect on a process inside.
NOISE = re.compile(r"NVIDIA_(REQUIRE|PRODUCT|DRIVER_CAP)\w+")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)


def relevant(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables by which users and images steer drivers and libraries, sorted by name."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if ALLOWED.fullmatch(name) and not (SECRET.search(name) or NOISE.fullmatch(name))
    }
