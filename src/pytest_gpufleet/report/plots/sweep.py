"""What each way to train makes of a GPU: by method, by batch and by accumulated gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.metric import METHODS, Condition
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.training_tables import SWEEP, Row, rows_of
from pytest_gpufleet.report.plots import canvas

HEIGHT = 1.5
MOST_TICKS = 6
CAPTION = "Training throughput of each GPU by method, batch and accumulated gradients"
RATE = "images/s a GPU"
# A panel for each of what differs, and the name of its axis.
AXES = {"method": "method", "batch": "batch of each GPU", "accumulated": "batches a step"}

Panel = dict[Condition, Row]


def sweep(findings: Sequence[Finding], say: Say = english) -> list[tuple[str, str]]:
    """(caption, SVG) of images/s a GPU, with a line for each number of GPUs: lines that lie apart are communication.
    Nothing where nothing was trained in two ways that differ by one thing."""
    rows = [row for row in rows_of(findings, SWEEP) if any(map(canvas.drawable, row.rates.values()))]
    panels = {axis: panel for axis in AXES if len(panel := _panel_of(rows, axis)) > 1}
    if not panels:
        return []
    counts = sorted({count for panel in panels.values() for row in panel.values() for count in row.rates})
    names = {count: "1 GPU" if count == 1 else f"{count} GPUs" for count in counts}
    said = canvas.in_language(say, RATE, *AXES.values())
    said |= {name: say("1 GPU" if count == 1 else "{gpus} GPUs", gpus=count) for count, name in names.items()}
    top = max(canvas.drawable(rate / count) or 0.0 for row in rows for count, rate in row.rates.items())
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(panels), len(AXES), HEIGHT, legend=True)
        for each, (axis, panel) in zip(axes, panels.items(), strict=True):
            _draw(each, panel, counts)
            canvas.labels(each, x=AXES[axis], y=RATE if each is axes[0] else "")
            each.set_ylim(0, max(top, 1e-9) * 1.1)
            canvas.numbered(each.yaxis)
            each.tick_params(labelsize=7.5)
        lines = [Line2D([], [], label=name, **_look(number)) for number, name in enumerate(names.values())]
        canvas.legend(figure, lines)
        texts = "; ".join(f"{say(AXES[axis])}: {_in_words(axis, panel, say)}" for axis, panel in panels.items())
        return [(CAPTION, canvas.svg(figure, f"{say(CAPTION)}. {texts}", said))]


def _panel_of(rows: Sequence[Row], axis: str) -> Panel:
    """The most ways that differ by one condition alone, by its values."""
    panels: dict[tuple[object, ...], Panel] = {}
    for row in rows:
        if axis in row.way:
            others = sorted((key, value) for key, value in row.way.items() if key != axis)
            panels.setdefault(tuple(others), {})[row.way[axis]] = row
    return max(panels.values(), key=len, default={})


def _look(number: int) -> Mapping[str, Any]:
    colour, marker = (each[number % len(each)] for each in (canvas.COLOURS, canvas.MARKERS))
    return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}


def _draw(axes: Any, panel: Panel, counts: Sequence[int]) -> None:
    for number, count in enumerate(counts):
        points = [(at, row.rates[count] / count) for at, row in enumerate(panel.values()) if count in row.rates]
        known = [(at, rate) for at, rate in points if canvas.drawable(rate) is not None]
        line = {"linestyle": ""} if any(isinstance(value, str) for value in panel) else {}
        axes.plot([at for at, _ in known], [rate for _, rate in known], **_look(number), **line)
    step = math.ceil(len(panel) / MOST_TICKS)
    names = [wording.clean(_named(value)) for value in panel]
    axes.set_xticks(range(0, len(panel), step), names[::step])
    axes.set_xlim(-0.4, len(panel) - 0.6)


def _named(value: Condition) -> str:
    """What stands at the axis: "DDP", "1,024"."""
    return METHODS.get(value, value) if isinstance(value, str) else wording.number(value)


def _in_words(axis: str, panel: Panel, say: Say) -> str:
    told = []
    for value, row in panel.items():
        count = max(row.rates)
        told.append(f"{wording.words({axis: value}, say)[0]} {wording.number(row.rates[count] / count)}")
    return ", ".join(told)
