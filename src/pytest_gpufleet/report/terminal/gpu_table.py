"""The table of all GPUs, as it is now, in characters that every console has."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytest_gpufleet.model.gpu import Gpu, GpuTopology, clock_events
from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.report import wording

AROUND = 4  # lines: above the rows of GPUs two of heads and one of the machine, below them one of the run
ABSENT = "n/a"
# How clock-event reasons are shown, by their most alarming one; a power cap is what full load looks like.
ALARMING = ("hw", "sw thermal")
CALM = {"none": "dim", "gpu idle": "dim", "sw power cap": "yellow"}

Readings = Mapping[str, Any]  # of one GPU, by the names of READINGS
Cell = tuple[str, str]  # the text and its style


def _of(value: float | None, most: float | None = None) -> str:
    return ABSENT if value is None else f"{value:.0f}" + (f"/{most:.0f}" if most else "")


def _memory(gpu: Gpu, now: Readings) -> Cell:
    used = now.get("memory_used_bytes")
    return _of(None if used is None else used / 2**30, gpu.memory_bytes / 2**30), "cyan"


def _reasons(gpu: Gpu, now: Readings) -> Cell:
    if not any(value is not None for value in now.values()):
        return "does not answer", "bold red"
    mask = now.get("clock_event_reasons")
    if mask is None:
        return ABSENT, "dim"
    words = clock_events(mask) or ["none"]
    return ", ".join(words), "bold red" if words[0].startswith(ALARMING) else CALM.get(words[0], "")


# In the order in which they are shown, with the heads in two lines.
COLUMNS: dict[str, Callable[[Gpu, Readings], Cell]] = {
    "\nGPU": lambda gpu, now: (str(gpu.index), "bold"),
    "Load\n%": lambda gpu, now: (_of(now.get("utilization_percent")), "green"),
    "Memory\nGiB": _memory,
    "Temp C\nGPU": lambda gpu, now: (_of(now.get("temperature_c")), ""),
    "Temp C\nmem": lambda gpu, now: (_of(now.get("memory_temperature_c")), ""),
    "Power W\nof max": lambda gpu, now: (_of(now.get("power_watts"), gpu.power_limit_watts), "magenta"),
    "SM\nMHz": lambda gpu, now: (_of(now.get("sm_clock_mhz")), ""),
    "Clock event\nreasons": _reasons,
}


def table(sample: Sample, topology: GpuTopology, running: str = "") -> RenderableType:
    """All GPUs as they are in `sample`, in as many lines for each sample, whatever the width. `running` is the check
    that a run is at."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in COLUMNS:
        grid.add_column(title, no_wrap=True, overflow="crop")
    for index, gpu in enumerate(topology.gpus):
        now = sample.gpus[index] if index < len(sample.gpus) else {}
        grid.add_row(*(_text(*cell(gpu, now)) for cell in COLUMNS.values()))
    models = Counter(gpu.name for gpu in topology.gpus)
    title = ", ".join(f"{count} x {name}" for name, count in models.items())
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    return Group(
        _text(f"{clock}, {title}, driver {topology.driver or ABSENT}", "bold"),
        grid,
        _text(f"running: {running}" if running else "no run is on", "" if running else "dim"),
    )


def _text(content: str, style: str = "") -> Text:
    return Text(wording.clean(content), style, no_wrap=True, overflow="crop")
