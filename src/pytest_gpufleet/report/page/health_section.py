"""The health of each GPU when the run began, as its driver told it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.gpu import Gpu, Unavailable
from pytest_gpufleet.report import wording


def _ecc_mode(modes: list[int]) -> str:
    now, after_boot = ("on" if mode else "off" for mode in modes)
    return now if now == after_boot else f"{now}, {after_boot} after the next boot"


def _remapped_rows(rows: list[int]) -> str:
    corrected, uncorrected, pending, failed = rows
    notes = [note for note, is_so in (("one pending", pending), ("one failed", failed)) if is_so]
    return ", ".join([f"{corrected} / {uncorrected}", *notes])


def _nvlink_errors(counters: dict[str, list[int | None]]) -> str:
    """The sum over all links by kind."""
    told = {kind: sum(filter(None, links)) for kind, links in counters.items() if any(n is not None for n in links)}
    return (
        ", ".join(
            f"{kind.replace('_', ' ').replace('crc', 'CRC')} {wording.number(count, 12)}"
            for kind, count in told.items()
        )
        or "none"
    )


def _nvlink_fec(links: list[list[int | None]]) -> str:
    """The sum over all links, up to the last kind of block that came."""
    sums = [sum(filter(None, counts)) for counts in zip(*links, strict=True)][1:]
    last = max((index for index, count in enumerate(sums) if count), default=-1)
    return ", ".join(wording.number(count, 12) for count in sums[: last + 1]) or "none"


def _by_place(counts: dict[str, int]) -> str:
    return ", ".join(f"{place.upper()} {wording.number(count, 12)}" for place, count in counts.items())


def _spare_rows(banks: dict[str, int]) -> str:
    return " / ".join(str(banks[name]) for name in ("max", "high", "partial", "low", "none"))


def _temperature_limits(limits: dict[str, int | None]) -> str:
    return " / ".join(str(limits.get(name) or "—") for name in ("gpu_max", "slowdown", "shutdown", "memory_max"))


# Heading, the facts that stand under it, and how each of them is put.
Column = tuple[str, tuple[str, ...], Callable[[Any], str]]
COLUMNS: tuple[Column, ...] = (
    ("ECC", ("ecc_mode",), _ecc_mode),
    (
        "Uncorrectable memory errors: volatile / aggregate",
        ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"),
        str,
    ),
    ("Corrected memory errors: volatile", ("ecc_corrected_volatile",), str),
    ("Corrected memory errors by place", ("ecc_corrected",), _by_place),
    ("Rows remapped: corrected / uncorrectable", ("remapped_rows",), _remapped_rows),
    ("PCIe replays", ("pcie_replays",), str),
    ("Banks of memory by spare rows: all / many / some / few / none", ("spare_rows",), _spare_rows),
    ("NVLink errors", ("nvlink_errors",), _nvlink_errors),
    ("NVLink 5: blocks with 1, 2, ... errors corrected on the way", ("nvlink_fec",), _nvlink_fec),
    ("Temperature limits, °C: GPU / slowdown / shutdown / memory", ("temperature_limits_c",), _temperature_limits),
)


def heads(gpus: Sequence[Gpu]) -> list[str]:
    """The heads of the table, without the columns of which no GPU here has anything."""
    return [heading for heading, _, _ in _columns(gpus)]


def health(gpus: Sequence[Gpu]) -> list[tuple[str, list[str]]]:
    """The rows of the table: the GPU, and the rest. None for a GPU whose health nobody recorded."""
    columns = _columns(gpus)
    return [
        (wording.place(gpu.place), [_cell(gpu.facts, names, form) for _, names, form in columns])
        for gpu in gpus
        if any(name in gpu.facts for _, names, _ in columns for name in names)
    ]


def _columns(gpus: Sequence[Gpu]) -> list[Column]:
    return [column for column in COLUMNS if any(_applies(gpu.facts.get(name)) for gpu in gpus for name in column[1])]


def _applies(value: Any) -> bool:
    return value is not None and (not isinstance(value, Unavailable) or value.applicable)


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
