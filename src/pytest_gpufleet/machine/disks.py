"""The drives of the host: what the kernel shows, what they say of their health (smartctl), and what is wrong."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, HostFact, RunTool, Unreadable, output
from pytest_gpufleet.model.fault import Fault, node_fault

SECTOR = 512  # what a block device's `size` counts in, whatever the drive's own sectors are (block/genhd.c)
# nvme0n1, and nvme0c0n1 where the kernel sees a drive over several ways: drivers/nvme/host/core.c
NAMESPACE = re.compile(r"nvme\d+(c\d+)?n\d+")


@dataclass(frozen=True)
class Drive:
    """`name`: "nvme0". `transport`: "pcie", or by which network it is reached. `bytes`: of all its namespaces."""

    name: str
    model: str | None = None
    serial: str | None = None
    firmware: str | None = None
    transport: str | None = None
    address: str | None = None
    bytes: int | None = None


def read_nvme(root: Path = Path("/")) -> tuple[Drive, ...]:
    drives, names = list[Drive](), ("model", "serial", "transport", "address")
    folders = (root / "sys/class/nvme").glob("nvme*")
    for drive in sorted(folders, key=lambda each: int(re.sub(r"\D", "", each.name) or 0)):
        spaces = (tools.whole(each / "size") for each in drive.iterdir() if NAMESPACE.fullmatch(each.name))
        sizes = [size * SECTOR for size in spaces if size is not None]
        about = tools.texts(drive, firmware="firmware_rev", **{name: name for name in names})
        drives.append(Drive(drive.name, **about, bytes=sum(sizes) if sizes else None))
    return tuple(drives)


@dataclass(frozen=True)
class DriveHealth:
    """What a drive ("nvme0", "sda", "bus/0 -d megaraid,8") says of itself. `used`: % of the writes it was made for.
    `silent`: why not."""

    device: str
    model: str | None = None
    passed: bool | None = None
    rotating: bool = False
    celsius: float | None = None
    critical_warning: int | None = None
    used: float | None = None
    media_errors: int | None = None
    reallocated: int | None = None
    pending: int | None = None
    uncorrectable: int | None = None
    silent: str = ""


# smartctl(8): its status is a mask, of which the first two bits say that it could not ask the drive.
ANY_STATUS, NOT_ASKED = tuple(range(256)), 0b11
VOLUME = "-d megaraid,N"  # what it proposes for a volume of a RAID controller, which has no health of its own
DENIED = re.compile("permission denied|operation not permitted", re.IGNORECASE)
# ACS-4 and the attributes that all makers have under these numbers (smartctl's drivedb.h, DEFAULT).
ATTRIBUTES = {5: "reallocated", 197: "pending", 198: "uncorrectable"}


def read_health(root: Path = Path("/"), run: RunTool = output) -> tuple[DriveHealth, ...]:
    """Of each NVMe drive in this machine, and of each SATA and SAS drive that is not removable, also behind a RAID
    controller. Not of disks on USB, which BMCs make up."""
    names = [each.name for each in read_nvme(root) if each.transport == "pcie"]
    fixed = (each for each in sorted((root / "sys/block").glob("sd*")) if tools.text(each / "removable") == "0")
    disks = [each.name for each in fixed if "/usb" not in str(each.resolve())]
    if not (names := [*names, *disks]):
        raise Absent("this system shows no drive of its own")
    behind = _behind_raid(run) if disks else []
    try:
        found = tools.asked([*names, *behind], partial(_asked, run), lambda name, why: DriveHealth(name, silent=why))
        return tuple(each for each in found if not (behind and VOLUME in each.silent))
    except Unreadable as why:
        if tools.in_container(root) and not any((root / "dev" / name).exists() for name in names):
            raise tools.hides_host() from None
        raise Unreadable(f"no drive could be asked: {why.why}", why.remedy) from None


def _behind_raid(run: RunTool) -> list[str]:
    with suppress(Unreadable, ValueError, KeyError):
        found = json.loads(run("smartctl", "--scan", "--json=c"))["devices"]
        raid = (each for each in found if each["type"].startswith("megaraid"))
        return [f"{each['name'].removeprefix('/dev/')} -d {each['type']}" for each in raid]
    return []


def _asked(run: RunTool, name: str) -> DriveHealth:
    text = run("smartctl", "--json=c", "-a", *f"/dev/{name}".split(), statuses=ANY_STATUS)
    try:
        printed = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise Unreadable("smartctl printed no JSON: it is older than its option for it") from None
    about = printed.get("smartctl", {})
    if about.get("exit_status", 0) & NOT_ASKED:
        why = "; ".join(str(each.get("string")) for each in about.get("messages", ())) or "it does not say why"
        raise Unreadable(f"smartctl could not ask {name} ({why})", AS_ROOT if DENIED.search(why) else "")
    table = printed.get("ata_smart_attributes", {}).get("table", ())
    log = printed.get("nvme_smart_health_information_log", {})
    return DriveHealth(
        name,
        model=printed.get("model_name"),
        passed=printed.get("smart_status", {}).get("passed"),
        rotating=bool(printed.get("rotation_rate")),
        celsius=printed.get("temperature", {}).get("current"),
        critical_warning=log.get("critical_warning"),
        used=log.get("percentage_used"),
        media_errors=log.get("media_errors"),
        **{ATTRIBUTES[row["id"]]: row.get("raw", {}).get("value") for row in table if row.get("id") in ATTRIBUTES},
    )


NVME = HostFact("nvme", tuple[Drive, ...], read_nvme)
DISK_HEALTH = HostFact("disk_health", tuple[DriveHealth, ...], read_health, subject="disks", on_request=True)

# NVM Express Base Specification, SMART / Health Information, Critical Warning. Bit 1 is for its temperature.
HOT = 1 << 1
WORN = 1 << 2
WARNINGS = {
    1 << 0: "its spare blocks are below its own threshold",
    WORN: "its reliability is degraded",
    1 << 3: "it can only be read",
    1 << 4: "the backup of its volatile memory failed",
    1 << 5: "its persistent memory region is unreliable",
}
USED_UP = 100  # % of the writes that the maker expects it to last for, as the same log counts them


def failing_drives(drives: Iterable[DriveHealth]) -> list[Fault]:
    """By what drives say of themselves. Many unsafe shutdowns, or a few per cent of wear, are no fault."""
    named = ((each, f"{each.device} ({each.model})" if each.model else each.device) for each in drives)
    return [node_fault(code, f"{name}: {what}") for each, name in named for code, what in _wrong_with(each)]


def _wrong_with(drive: DriveHealth) -> Iterator[tuple[str, str]]:
    warning, used = drive.critical_warning or 0, drive.used or 0
    if worn := used >= USED_UP:
        yield "drive_worn", f"{used:g} % of the writes that it was made for are used"
        warning &= ~WORN  # which is what some makers mean by it: smartmontools issue 537
    for bit, what in WARNINGS.items():
        if warning & bit:
            yield "drive_failing", what
    if warning & HOT:
        yield "drive_too_hot", f"{drive.celsius or 0:g} °C are outside its own limits"
    if drive.passed is False and not warning and not worn:
        yield "drive_failing", "its own test of its health (SMART) failed"
    # Of SSDs the blocks that were replaced are left out: makers count other things there.
    for count, what in (
        (drive.media_errors, "errors of its medium"),
        (drive.pending, "sectors that it cannot read now"),
        (drive.uncorrectable, "sectors that it could not correct"),
        (drive.reallocated if drive.rotating else 0, "sectors that it had to replace"),
    ):
        if count:
            yield "drive_errors", f"{count:,} {what}"
