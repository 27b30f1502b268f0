"""What drives say of their own health, by smartctl or nvme."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import Absent, NoAnswer, RunTool, Unreadable, output

SECTOR = 512  # what a block device's `size` counts in, whatever the drive's own sectors are (block/genhd.c)
# nvme0n1, and nvme0c0n1 where the kernel sees a drive over several ways: drivers/nvme/host/core.c
NAMESPACE = re.compile(r"nvme\d+(c\d+)?n\d+")


def read_nvme(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Of each drive its `name` ("nvme0"), `model`, `serial`, `firmware`, `state` ("live"), `transport` ("pcie", or by
    which network it is reached), `address` on the PCI bus, `bytes` (all its namespaces together, None if it has none),
    `namespaces` (bytes by name), and `lanes` and `speed` (GT/s) of its PCIe link, None where the system does not tell.
    An empty list where there is none."""
    return [_drive(drive) for drive in sorted((root / "sys/class/nvme").glob("nvme*"), key=_instance)]


def _instance(drive: Path) -> int:
    return int(re.sub(r"\D", "", drive.name) or 0)


def _drive(drive: Path) -> dict[str, Any]:
    spaces = {
        each.name: tools.number(each / "size") for each in sorted(drive.iterdir()) if NAMESPACE.fullmatch(each.name)
    }
    sizes = {name: int(size) * SECTOR for name, size in spaces.items() if size is not None}
    return {
        "name": drive.name,
        "model": tools.text(drive / "model"),
        "serial": tools.text(drive / "serial"),
        "firmware": tools.text(drive / "firmware_rev"),
        "state": tools.text(drive / "state"),
        "transport": tools.text(drive / "transport"),
        "address": tools.text(drive / "address"),
        "bytes": sum(sizes.values()) if sizes else None,
        "namespaces": sizes,
        "lanes": tools.number(drive / "device/current_link_width"),
        "speed": tools.number(drive / "device/current_link_speed"),
    }


# smartctl(8): its status is a mask, of which the first two bits say that it could not ask the drive.
ANY_STATUS, NOT_ASKED = tuple(range(256)), 0b11
KELVIN = 273
# ACS-4 and the attributes that all makers have under these numbers (smartctl's drivedb.h, DEFAULT).
ATA = {"reallocated": 5, "pending": 197, "uncorrectable": 198}


def read(root: Path = Path("/"), run: RunTool = output) -> list[dict[str, Any]]:
    """Of each drive that could be asked its `device` ("nvme0", "sda"), `model`, whether it calls itself healthy
    (`passed`), whether it is `rotating`, and what its kind counts: of NVMe `critical_warning` (bits), `spare` and
    `spare_threshold` in %, `used` (% of the writes that it was made for), `media_errors`, `unsafe_shutdowns`; of SATA
    `reallocated`, `pending` and `uncorrectable` sectors; of all `celsius`; of one that did not answer in time only
    `silent`, in words. Absent without a drive, Unreadable where none could be asked, with the reason of the first."""
    drives = [
        each for each in sorted((root / "sys/class/nvme").glob("nvme*")) if tools.text(each / "transport") == "pcie"
    ]
    disks = [each for each in sorted((root / "sys/block").glob("sd*")) if tools.text(each / "removable") == "0"]
    names = [each.name for each in (*drives, *disks)]
    if not names:
        raise Absent("this system shows no drive of its own")
    told, why = [], []
    for name in names:
        try:
            told.append({"device": name, **_asked(name, run)})
        except NoAnswer as reason:
            told.append({"device": name, "silent": f"{name}: {reason}"})
        except Unreadable as reason:
            why.append(str(reason))
    if not told:
        raise Unreadable(
            f"no drive could be asked: {why[0]}", "install smartmontools or nvme-cli, and run as root (sudo)"
        )
    return told


def _asked(name: str, run: RunTool) -> dict[str, Any]:
    try:
        return _by_smartctl(name, run)
    except NoAnswer:
        raise
    except Unreadable:
        if not name.startswith("nvme"):
            raise
        return _by_nvme(name, run)


def _by_smartctl(name: str, run: RunTool) -> dict[str, Any]:
    said = _json("smartctl", run("smartctl", "--json=c", "-a", f"/dev/{name}", statuses=ANY_STATUS))
    about = said.get("smartctl", {})
    if about.get("exit_status", 0) & NOT_ASKED:
        messages = [str(each.get("string")) for each in about.get("messages", ())]
        raise Unreadable(f"smartctl could not ask {name}: {'; '.join(messages) or 'it does not say why'}")
    log = said.get("nvme_smart_health_information_log", {})
    table = {
        each.get("id"): each.get("raw", {}).get("value")
        for each in said.get("ata_smart_attributes", {}).get("table", ())
    }
    return {
        "model": said.get("model_name"),
        "passed": said.get("smart_status", {}).get("passed"),
        "rotating": bool(said.get("rotation_rate")),
        "celsius": said.get("temperature", {}).get("current"),
        "critical_warning": log.get("critical_warning"),
        "spare": log.get("available_spare"),
        "spare_threshold": log.get("available_spare_threshold"),
        "used": log.get("percentage_used"),
        "media_errors": log.get("media_errors"),
        "unsafe_shutdowns": log.get("unsafe_shutdowns"),
        **{what: table.get(number) for what, number in ATA.items()},
    }


def _by_nvme(name: str, run: RunTool) -> dict[str, Any]:
    """nvme-smart-log(1): the temperature is in K, and later versions take the warnings apart."""
    said = _json("nvme", run("nvme", "smart-log", f"/dev/{name}", "-o", "json"))
    warning, kelvin = said.get("critical_warning"), said.get("temperature")
    return {
        "model": None,
        "passed": None,
        "rotating": False,
        "celsius": None if kelvin is None else kelvin - KELVIN,
        "critical_warning": warning.get("value") if isinstance(warning, Mapping) else warning,
        "spare": said.get("avail_spare"),
        "spare_threshold": said.get("spare_thresh"),
        "used": said.get("percent_used"),
        "media_errors": said.get("media_errors"),
        "unsafe_shutdowns": said.get("unsafe_shutdowns"),
        **dict.fromkeys(ATA),
    }


def _json(program: str, text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        raise Unreadable(f"{program} printed no JSON: it is older than its option for it") from None
    if not isinstance(said, dict):
        raise Unreadable(f"{program} printed something else than it is known for")
    return said


NVME = HostFact("nvme", list[dict[str, Any]], read_nvme)
DISK_HEALTH = HostFact("disk_health", list[dict[str, Any]], read, subject="disks", on_request=True)
