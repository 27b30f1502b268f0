"""The processors of the host: their model, and how many cores they have together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import sysfs

FIRST = 4096  # bytes of /proc/cpuinfo: more than the kernel writes of one processor


def read(root: Path = Path("/")) -> dict[str, Any]:
    """`model` ("Intel(R) Xeon(R) Platinum 8480C", None where /proc/cpuinfo does not tell, as on Arm) and `cores` (on
    line, of all sockets together), None where the system does not tell."""
    cores = {sysfs.text(each) for each in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings")}
    return {"model": _model(root / "proc/cpuinfo"), "cores": len(cores - {None}) or None}


def _model(path: Path) -> str | None:
    try:
        with path.open(errors="replace") as file:
            told = re.search(r"^model name\s*:\s*(.*\S)", file.read(FIRST), re.MULTILINE)
    except OSError:
        return None
    return re.sub(r"\s+", " ", told[1]) if told else None
