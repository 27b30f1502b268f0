"""How the report puts figures, conditions and places into words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from pytest_gpufleet.probes.reading import WORLD, Condition, Metric
from pytest_gpufleet.verdict.finding import Finding, Limit

SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
PLACES = {WORLD: "all ranks together", "node": "the whole node"}
SYMBOLS = {
    "met": "✓",
    "missed": "✗",
    "not judged": "○",
    "passed": "✓",
    "failed": "✗",
    "skipped": "○",
    "not applicable": "·",
    "for information": "·",
}
SIGNS = {"min": "≥", "max": "≤"}

# Colour codes first, as whole sequences; then every control character that is not white space, and the
# halves of surrogate pairs, which no UTF-8 file can hold.
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` without what could upset a terminal or a file: broken machines write anything."""
    return _UNPRINTABLE.sub("", text.replace("\r\n", "\n"))


def number(value: float, digits: int = 4) -> str:
    """`value` with thousands separators and at most `digits` significant digits: "48,170", "0.0123"."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else f"{value}"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(nbytes: float) -> str:
    """`nbytes` in binary units: "64 MiB"."""
    power = 0
    while abs(nbytes) >= 1024 and power < len(SIZES) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{number(nbytes)} {SIZES[power]}"


def percent(fraction: float, digits: int = 3) -> str:
    return f"{number(100 * fraction, digits)} %"


def quantity(value: float, unit: str, digits: int = 4) -> str:
    """A value and its unit: "366.9 GB/s"; a ratio in per cent, bytes in binary units."""
    match unit:
        case "ratio":
            return percent(value, digits)
        case "B" | "bytes":
            return size(value)
        case "":
            return number(value, digits)
        case _:
            return f"{number(value, digits)} {unit}"


def beside(value: float, limit: Limit) -> tuple[str, str]:
    """A value and the limit it is held against, with as many digits as it takes to tell them apart.

    "329.4, limit 329.4, missed" would make a reader doubt the report.
    """
    for digits in range(4, 10):
        texts = quantity(value, limit.unit, digits), quantity(limit.value, limit.unit, digits)
        if texts[0] != texts[1] or value == limit.value:
            break
    return texts[0], f"{SIGNS[limit.sense]} {texts[1]}"


def _named(name: str) -> Callable[[Condition], str]:
    return lambda value: f"{name} {_plain(value)}"


def _counted(noun: str) -> Callable[[Condition], str]:
    return lambda value: f"{value} {noun}" if value == 1 else f"{value} {noun}s"


def _plain(value: Condition) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else number(value, 6)


def _bytes(value: Condition) -> str:
    return _plain(value) if isinstance(value, bool | str) else size(value)


# In the order in which a reader wants to hear them; a condition that is not here follows under its own name.
CONDITIONS: dict[str, Callable[[Condition], str]] = {
    "collective": _plain,
    "model": _plain,
    "recipe": _plain,
    "bytes": _bytes,
    "dtype": _plain,
    "ranks": _counted("rank"),
    "batch": _named("batch"),
    "image": lambda value: f"{_plain(value)} pixels",
    "nvls": _named("NVLS"),
}


def words(conditions: Mapping[str, Condition]) -> list[str]:
    """Each condition in plain words: ["all_reduce", "8 GiB", "float32", "8 ranks", "NVLS off"]."""
    order = [key for key in CONDITIONS if key in conditions]
    order += [key for key in conditions if key not in CONDITIONS]
    return [CONDITIONS.get(key, _named(key.replace("_", " ")))(conditions[key]) for key in order]


def metric(finding: Finding) -> Metric:
    return finding.measurement.definition


def place(name: str) -> str:
    """A place as people say it: "GPU 3", "GPU 0 to GPU 5", "all ranks together"."""
    return PLACES.get(name) or " to ".join(re.sub(r"^gpu(\d+)$", r"GPU \1", part) for part in name.split("-"))


def worst(finding: Finding) -> tuple[str, float] | None:
    """The place a reader should look at first, and its value; None where nothing was measured."""
    values = finding.measurement.values
    blamed = finding.missed or tuple(finding.slower_than_peers or ())
    missed = {name: values[name] for name in blamed if name in values}
    candidates = (missed or values).items()
    sign = 1 if metric(finding).better == "higher" else -1
    # NaN compares as neither better nor worse, and is worse than any figure.
    return min(candidates, key=lambda item: -math.inf if math.isnan(item[1]) else sign * item[1], default=None)
