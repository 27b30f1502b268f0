"""What the kernel writes into the small files of /sys."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

PCI_STEP = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # a device, or a port or switch on its way
LANES = (1, 2, 4, 8, 12, 16, 32)  # of a PCIe link that is not there the register says 0, or 255


def text(path: Path) -> str | None:
    """Without the blanks around it; None if there is no such file, nobody may read it, or it is empty."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip() or None
    return None


def lanes(path: Path) -> float | None:
    """The lanes of a PCIe link; None if the system does not tell them."""
    told = number(path)
    return told if told in LANES else None


def listed(numbers: str | None) -> set[int]:
    """What the kernel writes as "0-3,8" """
    ranges = [each.partition("-") for each in (numbers or "").split(",") if each]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def whole(path: Path) -> int | None:
    """The whole number that a file begins with; None if it begins with none."""
    found = number(path)
    return None if found is None else int(found)


def number(path: Path) -> float | None:
    """The number that a file begins with: of "16" or "32.0 GT/s PCIe". None if it begins with none."""
    found = re.match(r"-?\d+(\.\d+)?", text(path) or "")
    return float(found[0]) if found else None
