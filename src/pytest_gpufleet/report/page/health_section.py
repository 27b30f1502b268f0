"""The health of each GPU when the run began, as its driver told it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.report import wording


def _ecc_mode(modes: list[int]) -> str:
    now, after_boot = ("on" if mode else "off" for mode in modes)
    return now if now == after_boot else f"{now}, {after_boot} after the next boot"


def _remapped_rows(rows: list[int]) -> str:
    corrected, uncorrected, pending, failed = rows
    notes = [note for note, is_so in (("one pending", pending), ("one failed", failed)) if is_so]
    return ", ".join([f"{corrected} / {uncorrected}", *notes])


def _nvlink_errors(counters: dict[str, list[int]]) -> str:
    return " / ".join(wording.number(sum(links), 12) for links in counters.values()) or "none"


def _temperature_limits(limits: dict[str, int | None]) -> str:
    return " / ".join(str(limits.get(name) or "—") for name in ("gpu_max", "slowdown", "shutdown", "memory_max"))


# Heading, the facts that stand under it, and how each of them is put.
COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[Any], str]], ...] = (
    ("ECC", ("ecc_mode",), _ecc_mode),
    (
        "Uncorrectable memory errors: volatile / aggregate",
        ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"),
        str,
    ),
    ("Corrected memory errors: volatile", ("ecc_corrected_volatile",), str),
    ("Rows remapped: corrected / uncorrectable", ("remapped_rows",), _remapped_rows),
    ("PCIe replays", ("pcie_replays",), str),
    ("NVLink: replays / recoveries / CRC flit / CRC data", ("nvlink_errors",), _nvlink_errors),
    ("Temperature limits, °C: GPU / slowdown / shutdown / memory", ("temperature_limits_c",), _temperature_limits),
)


def health(gpus: Iterable[Gpu]) -> list[tuple[str, list[str]]]:
    """The rows of the table whose heads are those of COLUMNS: the GPU, and the rest. None for a GPU whose health nobody
    recorded."""
    return [
        (wording.place(gpu.place), [_cell(gpu.facts, names, form) for _, names, form in COLUMNS])
        for gpu in gpus
        if any(name in gpu.facts for _, names, _ in COLUMNS for name in names)
    ]


def _cell(facts: Mapping[str, Any], names: tuple[str, ...], form: Callable[[Any], str]) -> str:
    return " / ".join(_in_words(facts.get(name), form) for name in names)


def _in_words(value: Any, form: Callable[[Any], str]) -> str:
    match value:
        case None:
            return "not recorded"
        case Unavailable(applicable=applicable):
            return "not readable" if applicable else "not supported"
        case _:
            return form(value)
