"""By which way network adapters may reach the memory of GPUs: GPUDirect RDMA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import sysfs

# Modules by which an adapter's driver asks NVIDIA's for memory: the driver's own, the one before it, and that of EFA.
MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")


def read(root: Path = Path("/")) -> dict[str, Any]:
    """`peer_module`: the one of MODULES that is loaded, None if none is. `open_modules`: whether NVIDIA's driver is the
    open one, which alone gives memory away as a DMA-BUF; None where no driver is loaded."""
    version = sysfs.text(root / "proc/driver/nvidia/version")
    return {
        "peer_module": next((name for name in MODULES if (root / "sys/module" / name).exists()), None),
        "open_modules": None if version is None else "Open Kernel Module" in version.splitlines()[0],
    }
