"""The memory of the host: its modules by the firmware (DMI, SMBIOS), and the errors that the kernel counts (EDAC)."""

from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, Unreadable

# The System Management BIOS Reference Specification (DMTF DSP0134), 7.18, "Memory Device (Type 17)": where its values
# stand, little-endian. Texts are numbers of the strings behind the values, from 1; 0: there is none.
SIZE, EXTENDED_SIZE = slice(0x0C, 0x0E), slice(0x1C, 0x20)
SPEED, CONFIGURED_SPEED = slice(0x15, 0x17), slice(0x20, 0x22)
TYPE = 0x12
TEXTS = {"locator": 0x10, "bank": 0x11, "manufacturer": 0x17, "serial": 0x18, "part": 0x1A}
EMPTY, UNKNOWN, EXTENDED, KIB = 0, 0xFFFF, 0x7FFF, 0x8000
MIB = 1 << 20
# 7.18.2, those that servers have.
TYPES = {0x18: "DDR3", 0x1A: "DDR4", 0x20: "HBM", 0x21: "HBM2", 0x22: "DDR5", 0x23: "LPDDR5", 0x24: "HBM3"}


def modules(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Of each slot for a memory module its `locator` ("DIMM_A1"), `bank`, `bytes` (0: empty, None: the firmware does
    not know), `type` ("DDR5"), `speed` and `configured_speed` (MT/s, None: unknown), `manufacturer`, `serial` and
    `part`. Unreadable for all but root, Absent where the firmware lists no slots."""
    entries = sorted((root / "sys/firmware/dmi/entries").glob("17-*/raw"), key=_instance)
    if not entries:
        raise Absent("the firmware of this machine lists no memory modules, or not to this container (DMI type 17)")
    try:
        return [_module(entry.read_bytes()) for entry in entries]
    except PermissionError:
        raise Unreadable("only root may read what the firmware says of memory modules", AS_ROOT) from None


def _instance(entry: Path) -> int:
    return int(entry.parent.name.partition("-")[2])


def _module(raw: bytes) -> dict[str, Any]:
    length = raw[1]
    values = raw[:length]
    texts = raw[length:].split(b"\0")

    def text(offset: int) -> str | None:
        number = values[offset] if offset < length else 0
        said = texts[number - 1].decode(errors="replace").strip() if 0 < number <= len(texts) else ""
        return said or None

    return {
        **{key: text(offset) for key, offset in TEXTS.items()},
        "bytes": _bytes(values),
        "type": TYPES.get(values[TYPE]) if length > TYPE else None,
        "speed": _number(values[SPEED]) or None,
        "configured_speed": _number(values[CONFIGURED_SPEED]) or None,
    }


def _bytes(values: bytes) -> int | None:
    size = _number(values[SIZE])
    if size == UNKNOWN:
        return None
    if size == EXTENDED:
        return _number(values[EXTENDED_SIZE]) * MIB
    return (size & ~KIB) << 10 if size & KIB else size * MIB


def _number(part: bytes) -> int:
    return int.from_bytes(part, "little")


def errors(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Of each memory controller its `controller` ("mc0"), the name of its `driver`, `corrected` and `uncorrected`
    errors in `seconds` (since they were last set to 0), and of each of its `modules` the `label` that the firmware or
    the administrator gave it, its `location` ("channel 3 slot 0"), `corrected` and `uncorrected`. None for a count that
    the driver does not keep. Absent where no driver counts."""
    controllers = sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
    if not controllers:
        raise Absent(
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
        "modules": [_counted(each) for each in sorted(folder.glob("dimm[0-9]*"), key=lambda path: int(path.name[4:]))],
    }


def _counted(folder: Path) -> dict[str, Any]:
    return {
        "label": tools.text(folder / "dimm_label") or folder.name,
        "location": tools.text(folder / "dimm_location"),
        "corrected": tools.whole(folder / "dimm_ce_count"),
        "uncorrected": tools.whole(folder / "dimm_ue_count"),
    }


MEMORY_MODULES = HostFact("memory_modules", list[dict[str, Any]], modules, subject="memory")
MEMORY_ERRORS = HostFact("memory_errors", list[dict[str, Any]], errors, subject="memory")
