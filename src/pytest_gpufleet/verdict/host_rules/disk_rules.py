"""What counts as healthy of drives: what they say of themselves, and what comes back from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE

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


def sick_drives(drives: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """By what drives say of themselves. Many unsafe shutdowns, or a few per cent of wear, are no sickness."""
    return [
        Fault(code, (THIS_NODE,), f"{drive['device']}{f' ({model})' if (model := drive['model']) else ''}: {what}")
        for drive in drives
        if "silent" not in drive
        for code, what in _sickness(drive)
    ]


def _sickness(drive: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    warning, used = drive["critical_warning"] or 0, drive["used"] or 0
    if worn := used >= USED_UP:
        yield "drive_worn", f"{used} % of the writes that it was made for are used"
        warning &= ~WORN  # which is what some makers mean by it: smartmontools issue 537
    for bit, what in WARNINGS.items():
        if warning & bit:
            yield "drive_failing", what
    if warning & HOT:
        yield "drive_too_hot", f"{drive['celsius']} °C are outside its own limits"
    if drive["passed"] is False and not warning and not worn:
        yield "drive_failing", "its own test of its health (SMART) failed"
    yield from _errors(drive)


def _errors(drive: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of SSDs the blocks that were replaced are left out: makers count other things there."""
    kinds = {"media_errors": "errors of its medium", "pending": "sectors that it cannot read now",
             "uncorrectable": "sectors that it could not correct"}  # fmt: skip
    if drive["rotating"]:
        kinds["reallocated"] = "sectors that it had to replace"
    for kind, words in kinds.items():
        if count := drive[kind]:
            yield "drive_errors", f"{count:,} {words}"
