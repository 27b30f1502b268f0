"""What ranks of several nodes find in their environment: that of their own node, and how they reach each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

RAYLET = "raylet"  # the process of Ray on each node, from which all of its workers come
# What Ray gives its workers (seen in 2.60): OMP_NUM_THREADS=1 slows all that a rank computes on its CPU, and the rest
# is of the worker alone.
GIVEN_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "SPT_NOENV")


def without_ray(environment: Mapping[str, str], before_ray: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that Ray has started, without what is Ray's. `before_ray`: what somebody had set on
    this node before Ray came to it, which stays."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RAY_") and (name not in GIVEN_BY_RAY or name in before_ray)
    }


def before_ray() -> dict[str, str] | None:
    """The environment of the raylet that this process comes from; None if it comes from none, or may not see it."""
    pid = os.getppid()
    try:
        while pid > 1:
            if Path(f"/proc/{pid}/comm").read_text().strip() == RAYLET:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        pass
    return None


def of_network(interface: str, local_index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """On which interface a rank talks to those of other nodes: the one of its node, unless somebody has chosen others.

    NCCL takes a name for the begin of names, but for "=". Gloo knows one interface: where there are several to choose
    from, the ranks of a node take turns, as the GPUs of a node have a rail each.
    """
    if not interface:
        return {}
    names = (environment.get("GLOO_SOCKET_IFNAME") or interface).split(",")
    return {
        "NCCL_SOCKET_IFNAME": environment.get("NCCL_SOCKET_IFNAME") or f"={interface}",
        "GLOO_SOCKET_IFNAME": names[local_index % len(names)],
    }
