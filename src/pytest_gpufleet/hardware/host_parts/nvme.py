"""The NVMe drives of the host, as the kernel describes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import sysfs

SECTOR = 512  # what a block device's `size` counts in, whatever the drive's own sectors are (block/genhd.c)
# nvme0n1, and nvme0c0n1 where the kernel sees a drive over several ways: drivers/nvme/host/core.c
NAMESPACE = re.compile(r"nvme\d+(c\d+)?n\d+")


def read(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Of each drive its `name` ("nvme0"), `model`, `serial`, `firmware`, `state` ("live"), `transport` ("pcie", or by
    which network it is reached), `address` on the PCI bus, `bytes` (all its namespaces together, None if it has none),
    `namespaces` (bytes by name), and `lanes` and `speed` (GT/s) of its PCIe link, None where the system does not tell.
    An empty list where there is none."""
    return [_drive(drive) for drive in sorted((root / "sys/class/nvme").glob("nvme*"), key=_instance)]


def _instance(drive: Path) -> int:
    return int(re.sub(r"\D", "", drive.name) or 0)


def _drive(drive: Path) -> dict[str, Any]:
    spaces = {
        each.name: sysfs.number(each / "size") for each in sorted(drive.iterdir()) if NAMESPACE.fullmatch(each.name)
    }
    sizes = {name: int(size) * SECTOR for name, size in spaces.items() if size is not None}
    return {
        "name": drive.name,
        "model": sysfs.text(drive / "model"),
        "serial": sysfs.text(drive / "serial"),
        "firmware": sysfs.text(drive / "firmware_rev"),
        "state": sysfs.text(drive / "state"),
        "transport": sysfs.text(drive / "transport"),
        "address": sysfs.text(drive / "address"),
        "bytes": sum(sizes.values()) if sizes else None,
        "namespaces": sizes,
        "lanes": sysfs.number(drive / "device/current_link_width"),
        "speed": sysfs.number(drive / "device/current_link_speed"),
    }
