"""What the firmware says of the machine (DMI, SMBIOS): who made it, its BIOS, and its memory modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import tools
from pytest_gpufleet.hardware.tools import Untold

# Anybody may read these (drivers/firmware/dmi-id.c). Serial numbers are for root alone, and host.serial reads the one
# that tells machines apart.
IDS = {
    "vendor": "sys_vendor", "product": "product_name", "board_vendor": "board_vendor", "board": "board_name",
    "bios_vendor": "bios_vendor", "bios_version": "bios_version", "bios_date": "bios_date",
}  # fmt: skip

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


def read(root: Path = Path("/")) -> dict[str, str | None]:
    """`vendor` and `product` of the machine, `board_vendor` and `board`, `bios_vendor`, `bios_version` and `bios_date`.
    Untold where the system has no such firmware, as in many containers."""
    told = {key: tools.text(root / "sys/class/dmi/id" / name) for key, name in IDS.items()}
    if not any(told.values()):
        raise Untold("this system does not tell what its firmware says of the machine (/sys/class/dmi/id)")
    return told


def memory_modules(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Of each slot for a memory module its `locator` ("DIMM_A1"), `bank`, `bytes` (0: empty, None: the firmware does
    not know), `type` ("DDR5"), `speed` and `configured_speed` (MT/s, None: unknown), `manufacturer`, `serial` and
    `part`. Untold where nobody but root may read that, or the firmware lists no slots."""
    entries = sorted((root / "sys/firmware/dmi/entries").glob("17-*/raw"), key=_instance)
    if not entries:
        raise Untold("the firmware of this machine lists no memory modules, or not to this container (DMI type 17)")
    try:
        return [_module(entry.read_bytes()) for entry in entries]
    except PermissionError:
        raise Untold("only root may read what the firmware says of memory modules: run as root") from None


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
