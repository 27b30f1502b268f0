"""The errors of host memory that the kernel counts (EDAC): Documentation/ABI/testing/sysfs-devices-edac."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import tools
from pytest_gpufleet.hardware.tools import Untold


def read(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Of each memory controller its `controller` ("mc0"), the name of its `driver`, `corrected` and `uncorrected`
    errors in `seconds` (since they were last set to 0), and of each of its `modules` the `label` that the firmware or
    the administrator gave it, its `location` ("channel 3 slot 0"), `corrected` and `uncorrected`. None for a count that
    the driver does not keep. Untold where no driver counts."""
    controllers = sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
    if not controllers:
        raise Untold(
            "no EDAC driver counts the errors of host memory: load the one for these processors (i10nm_edac, "
            "amd64_edac); a virtual machine has none"
        )
    return [_controller(each) for each in controllers]


def _controller(folder: Path) -> dict[str, Any]:
    return {
        "controller": folder.name,
        "driver": tools.text(folder / "mc_name"),
        "corrected": tools.whole(folder / "ce_count"),
        "uncorrected": tools.whole(folder / "ue_count"),
        "seconds": tools.whole(folder / "seconds_since_reset"),
        "modules": [_module(each) for each in sorted(folder.glob("dimm[0-9]*"), key=lambda path: int(path.name[4:]))],
    }


def _module(folder: Path) -> dict[str, Any]:
    return {
        "label": tools.text(folder / "dimm_label") or folder.name,
        "location": tools.text(folder / "dimm_location"),
        "corrected": tools.whole(folder / "dimm_ce_count"),
        "uncorrected": tools.whole(folder / "dimm_ue_count"),
    }
