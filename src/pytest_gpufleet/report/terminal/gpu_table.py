"""The table of all GPUs, as it is now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytest_gpufleet.model.facts import clock_events
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.sample import Sample
from pytest_gpufleet.report import wording

HISTORY = 60  # samples in a sparkline
ABSENT = "n/a"
SPARKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
# Many a serial console knows ASCII only.
ASCII = str.maketrans(
    {**dict(zip(SPARKS, "_.-:=+*#", strict=True)), **dict.fromkeys(EIGHTHS[1:], "#"), "░": ".", "°": " ", "·": ","}
)
BAR = 5  # characters
# How clock-event reasons are shown, by their most alarming one; a power cap is what full load looks like.
ALARMING = ("hw", "sw thermal")
CALM = {"none": "dim", "gpu idle": "dim", "sw power cap": "yellow"}


@dataclass(frozen=True)
class View:
    """What the cells of one GPU are made of: its readings now and before, and how wide the cell is."""

    gpu: Gpu
    now: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    width: int


Cell = tuple[str, str]  # the text and its style


@dataclass(frozen=True)
class Column:
    """`priority`: what has a higher number is left out first where the terminal is narrow."""

    title: str  # two lines
    width: int
    priority: int
    cell: Callable[[View], Cell]


def _shown(value: Any) -> str:
    return ABSENT if value is None else f"{value:.0f}"


def _bar(fraction: float) -> str:
    full, eighths = divmod(round(min(max(fraction, 0.0), 1.0) * BAR * 8), 8)
    return ("█" * full + EIGHTHS[eighths].strip()).ljust(BAR)


def _utilization(view: View) -> Cell:
    percent = view.now.get("utilization_percent")
    return f"{_bar((percent or 0) / 100)} {_shown(percent):>3}", "green"


def _memory(view: View) -> Cell:
    used, total = view.now.get("memory_used_bytes"), view.gpu.memory_bytes
    bar = _bar(used / total if used and total else 0)
    return f"{bar} {_of(None if used is None else used / 2**30, total / 2**30):>7}", "cyan"


def _temperatures(view: View) -> Cell:
    names = ("temperature_c", "memory_temperature_c")
    return "/".join(_shown(view.now.get(name)) for name in names), ""


def _power(view: View) -> Cell:
    return _of(view.now.get("power_watts"), view.gpu.power_limit_watts), ""


def _of(value: float | None, most: float | None) -> str:
    return ABSENT if value is None else f"{value:.0f}" + (f"/{most:.0f}" if most else "")


def _reasons(view: View) -> Cell:
    if not any(value is not None for value in view.now.values()):
        return "does not answer", "bold red"
    mask = view.now.get("clock_event_reasons")
    if mask is None:
        return ABSENT, "dim"
    words = clock_events(mask) or ["none"]
    return ", ".join(words), "bold red" if words[0].startswith(ALARMING) else CALM.get(words[0], "")


def _sparkline(view: View) -> Cell:
    """Power from nothing to its limit."""
    values = [reading.get("power_watts") for reading in view.history][-min(view.width, HISTORY) :]
    top = view.gpu.power_limit_watts or max((value for value in values if value is not None), default=0) or 1
    sparks = [
        " " if value is None else SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] for value in values
    ]
    return "".join(sparks).rjust(view.width), "magenta"


# In the order in which they are shown. The last one takes the room that is left.
COLUMNS = (
    Column("\nGPU", 3, 0, lambda view: (str(view.gpu.index), "bold")),
    Column("\nModel", 16, 8, lambda view: (view.gpu.name.removeprefix("NVIDIA "), "")),
    Column("Load\n%", BAR + 4, 1, _utilization),
    Column("Memory\nGiB", BAR + 8, 4, _memory),
    Column("Temp °C\nGPU/mem", 7, 2, _temperatures),
    Column("Power W\nof max", 7, 3, _power),
    Column("SM\nMHz", 5, 5, lambda view: (_shown(view.now.get("sm_clock_mhz")), "")),
    Column("Clock event\nreasons", 19, 6, _reasons),
    Column("Power\nhistory", 10, 7, _sparkline),
)


def table(
    sample: Sample,
    history: Sequence[Sample],
    topology: GpuTopology,
    running: str = "",
    width: int = 80,
    ascii_only: bool = False,
) -> RenderableType:
    """All GPUs as they are in `sample`, in lines of at most `width` columns; as many lines for each sample.

    `history` are the samples so far with this one at its end; `running` is the check that a run is at. Columns are
    left out by their priority where `width` is too small for all.
    """

    def text(content: str, style: str = "") -> Text:
        content = wording.clean(content)
        if ascii_only:
            return Text(content.translate(ASCII), style, no_wrap=True, overflow="crop")
        return Text(content, style, no_wrap=True, overflow="ellipsis")

    columns, spare = _fitting(width)
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    widths = {
        column: column.width + (min(spare, HISTORY - column.width) if column.cell is _sparkline else 0)
        for column in columns
    }
    for column in columns:
        grid.add_column(text(column.title), width=widths[column], no_wrap=True)
    for index, gpu in enumerate(topology.gpus):
        before = [one.gpus[index] for one in history if index < len(one.gpus)]
        now = sample.gpus[index] if index < len(sample.gpus) else {}
        grid.add_row(*(text(*column.cell(View(gpu, now, before, wide))) for column, wide in widths.items()))
    models = Counter(gpu.name for gpu in topology.gpus)
    title = ", ".join(f"{count} x {name}" for name, count in models.items())
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    below = f"running: {running}" if running else "no run is on"
    return Group(
        text(f"{clock} · {title} · driver {topology.driver or ABSENT}", "bold"),
        grid,
        text(below, "" if running else "dim"),
    )


def _fitting(width: int) -> tuple[list[Column], int]:
    """The columns that fit, in their order, and the columns of the terminal that are left over."""
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.priority):
        taken = sum(one.width + 1 for one in (*chosen, column)) - 1
        if chosen and taken > width:
            break
        chosen.append(column)
    taken = sum(column.width + 1 for column in chosen) - 1
    return [column for column in COLUMNS if column in chosen], max(0, width - taken)
