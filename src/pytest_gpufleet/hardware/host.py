"""What the host around the GPUs is like: limits, memory, processor, network ports."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware.environment import relevant


def _shared_memory() -> int:
    state = os.statvfs("/dev/shm")
    return state.f_blocks * state.f_frsize


def _limit(which: int, hard: bool = False) -> int | str:
    limit = resource.getrlimit(which)[hard]
    return "unlimited" if limit == resource.RLIM_INFINITY else limit


def _text(path: str) -> str:
    return Path(path).read_text().strip()


def _fabric_manager() -> bool:
    """Whether nvidia-fabricmanager runs; the kernel cuts names of processes to 15 characters."""
    return any(_comm(process).startswith("nv-fabricmanage") for process in Path("/proc").glob("[0-9]*"))


def _comm(process: Path) -> str:
    try:
        return (process / "comm").read_text()
    except OSError:
        return ""


def _network_ports() -> list[dict[str, str]]:
    """InfiniBand and RoCE ports with their state and rate."""
    return [
        {"port": f"{port.parts[-3]}/{port.name}", "state": _text(f"{port}/state"), "rate": _text(f"{port}/rate")}
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    ]


def _memory_limit() -> int | str:
    limit = _text("/sys/fs/cgroup/memory.max")
    return "unlimited" if limit == "max" else int(limit)


FACTS: dict[str, Callable[[], Any]] = {
    "name": socket.gethostname,
    "kernel": platform.release,
    "system": lambda: platform.freedesktop_os_release()["PRETTY_NAME"],
    "processors": lambda: os.cpu_count(),
    "processors_allowed": lambda: len(os.sched_getaffinity(0)),
    "processor_set": lambda: sorted(os.sched_getaffinity(0)),
    "memory_bytes": lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    "container_memory_limit": _memory_limit,
    "numa_nodes": lambda: len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
    "cpu_governor": lambda: _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    "shared_memory_bytes": _shared_memory,
    "locked_memory_limit": lambda: _limit(resource.RLIMIT_MEMLOCK),
    "open_files_limit": lambda: _limit(resource.RLIMIT_NOFILE),
    "open_files_hard_limit": lambda: _limit(resource.RLIMIT_NOFILE, hard=True),
    "fabric_manager": _fabric_manager,
    "network_ports": _network_ports,
    "environment": relevant,
}


def read() -> dict[str, Any]:
    """Every fact of the host; None where this system does not tell."""
    facts: dict[str, Any] = {}
    for name, fact in FACTS.items():
        try:
            facts[name] = fact()
        except (OSError, ValueError, KeyError):
            facts[name] = None
    return facts
