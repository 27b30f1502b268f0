"""What each way to train makes of a GPU: by recipe, by method, by batch and by accumulated gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from pytest_gpufleet.model.conditions import METHODS, Condition
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import say
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.figures import TITLES, Way, is_swept, ways_of
from pytest_gpufleet.report.plots import canvas

HEIGHT, COLUMNS = 1.5, 2
MOST_TICKS = 6
CAPTION = "Training throughput of each GPU by recipe, method, batch and accumulated gradients"
RATE = "images/s a GPU"
# A panel for each of what differs, and the name of its axis. Recipes have batches of their own.
AXES = {"recipe": "recipe", "method": "method", "batch": "batch of each GPU", "accumulated": "batches a step"}
APART: Mapping[str, tuple[str, ...]] = {"recipe": ("recipe", "batch")}

Panel = dict[Condition, Way]


def training_plot(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) of images/s a GPU, with a line for each number of GPUs, and the efficiency on most of them: lines
    that lie apart are communication. Of the sweep nothing where no two ways differ by one thing alone."""
    every = [row for kind in TITLES for row in ways_of(findings, kind)]
    rows = [row for row in every if not row.fed and "nodes" not in row.way and _drawable(row)]
    panels = {axis: panel for axis in AXES if (panel := _panel_of(rows, axis))}
    if not panels:
        return []
    counts = sorted({count for panel in panels.values() for row in panel.values() for count in row.rates})
    names = {count: "1 GPU" if count == 1 else f"{count} GPUs" for count in counts}
    said = canvas.translated(RATE, *AXES.values())
    said |= {name: say("1 GPU" if count == 1 else "{gpus} GPUs", gpus=count) for count, name in names.items()}
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(panels), COLUMNS, HEIGHT, legend=True)
        for each, (axis, panel) in zip(axes, panels.items(), strict=True):
            _draw(each, panel, counts)
            canvas.title(each, AXES[axis])
        lines = [Line2D([], [], label=name, **canvas.look(number)) for number, name in enumerate(names.values())]
        canvas.legend(figure, lines)
        for each in axes[::COLUMNS]:
            canvas.labels(each, y=RATE)
        texts = "; ".join(f"{say(AXES[axis])}: {_in_words(axis, panel)}" for axis, panel in panels.items())
        return [(CAPTION, canvas.svg(figure, f"{say(CAPTION)}. {texts}", said))]


def _drawable(row: Way) -> dict[int, float]:
    """Images/s a GPU by the number of GPUs, as far as they can be drawn."""
    each = {count: rate / count for count, rate in row.rates.items()}
    return {count: rate for count, rate in each.items() if canvas.drawable(rate) is not None}


def _panel_of(rows: Sequence[Way], axis: str) -> Panel:
    """The most ways that differ by one condition alone, by its values; of recipes one is enough, of others two are."""
    panels: dict[tuple[object, ...], Panel] = {}
    for row in rows:
        if axis in row.way and is_swept(row.way) == (axis != "recipe"):
            others = sorted((key, value) for key, value in row.way.items() if key not in APART.get(axis, (axis,)))
            panels.setdefault(tuple(others), {})[row.way[axis]] = row
    most = max(panels.values(), key=len, default={})
    return most if len(most) > (axis != "recipe") else {}


def _draw(axes: Any, panel: Panel, counts: Sequence[int]) -> None:
    line = {"linestyle": ""} if any(isinstance(value, str) for value in panel) else {}
    rates = [_drawable(row) for row in panel.values()]
    for number, count in enumerate(counts):
        points = [(at, each[count]) for at, each in enumerate(rates) if count in each]
        axes.plot([at for at, _ in points], [rate for _, rate in points], **canvas.look(number), **line)
    for at, (row, each) in enumerate(zip(panel.values(), rates, strict=True)):
        if row.efficiencies and (most := max(row.efficiencies)) in each:
            text, where = wording.percent(row.efficiencies[most]), (at, each[most])
            axes.annotate(text, where, (0, -11), textcoords="offset points", ha="center", fontsize=7)
    step = math.ceil(len(panel) / MOST_TICKS)
    axes.set_xticks(range(0, len(panel), step), [wording.clean(_named(value)) for value in panel][::step])
    axes.set_xlim(-0.5, len(panel) - 0.5)
    axes.set_ylim(0, max(1e-9, *(rate for each in rates for rate in each.values())) * 1.1)
    canvas.numbered(axes.yaxis)
    axes.tick_params(labelsize=7.5)


def _named(value: Condition) -> str:
    """What stands at the axis: "DDP", "1,024"."""
    return METHODS.get(value, value) if isinstance(value, str) else wording.number(value)


def _in_words(axis: str, panel: Panel) -> str:
    parts = []
    for value, row in panel.items():
        count = max(row.rates)
        parts.append(f"{wording.words({axis: value})[0]} {wording.number(row.rates[count] / count)}")
    return ", ".join(parts)
