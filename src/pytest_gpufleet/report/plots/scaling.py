"""How training grows with the number of GPUs, and how its methods compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.lines import Line2D

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.metric import MEASURED_UNDER
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.plots import canvas

COLUMNS = 3
HEIGHT = 1.5
CAPTION = "Training throughput against the number of GPUs"
SHARE, SUMMED = "measured, and share of the ideal", "what each GPU does alone, added up"
IDEAL = "ideal: nothing lost"
LEGEND = (SHARE, SUMMED, IDEAL)
THROUGHPUT, ALONE = "train_throughput", "solo_train_throughput"
# What a panel is named by: all that training depends on but the number of GPUs, and the batch of each.
NAMED_BY = set(MEASURED_UNDER[THROUGHPUT]) - {"ranks", "batch"}

Points = dict[int, tuple[float, Finding]]


def scaling(findings: Sequence[Finding], say: Say = english) -> list[tuple[str, str]]:
    """(caption, SVG) of training throughput against the number of GPUs: a panel for each recipe, with the line on which
    no GPU would lose anything and the efficiency of each point. Nothing where there is nothing to hold a point against.
    """
    panels: dict[str, Points] = {}
    said = canvas.in_language(say, "ranks", *LEGEND)
    alone: dict[str, list[float]] = {}  # by panel: whichever check measured it first
    for finding in findings:
        measurement = finding.measurement
        if measurement.metric == ALONE:
            alone.setdefault(_name(finding), list(measurement.values.values()))
        ranks, value = measurement.conditions.get("ranks"), canvas.drawable(measurement.values.get(WORLD))
        if measurement.metric == THROUGHPUT and isinstance(ranks, int) and value is not None:
            panels.setdefault(name := _name(finding), {})[ranks] = (value, finding)
            said[name] = _name(finding, say)
    ideals = {name: _ideal(points, alone.get(name, ())) for name, points in panels.items()}
    panels = canvas.first({name: points for name, points in panels.items() if len(ideals[name]) > max(points) > 1})
    if not panels:
        return []
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(panels), COLUMNS, HEIGHT, legend=True, gap=0.75)
        for number, (each, (name, points)) in enumerate(zip(axes, panels.items(), strict=True)):
            _panel(each, points, ideals[name])
            canvas.title(each, name)
            if number % COLUMNS == 0:
                canvas.labels(each, y="images/s")
            if number + COLUMNS >= len(panels):
                canvas.labels(each, x="ranks")
        canvas.legend(figure, _legend(panels, any(1 not in points for points in panels.values())))
        texts = [f"{said[name]}: {', '.join(_in_words(points))}" for name, points in panels.items()]
        return [(CAPTION, canvas.svg(figure, f"{say(CAPTION)}. {'; '.join(texts)}", said))]


def _ideal(points: Points, alone: Iterable[float]) -> list[float]:
    """Images/s of no GPU, one, two ... that lose nothing: what each does alone, added up. Before 0.3 they were held
    against so many times the first GPU, which trained with all others idle: there is a point for it then."""
    if 1 in points:
        return [points[1][0] * count for count in range(max(points) + 1)]
    return list(accumulate(alone, initial=0.0))


def _panel(axes: Any, points: Points, ideal: Sequence[float]) -> None:
    ranks = sorted(points)
    most = ideal[ranks[-1]]
    axes.plot(range(ranks[-1] + 1), ideal[: ranks[-1] + 1], color=canvas.INK, linewidth=0.9, linestyle=":")
    axes.plot(ranks, [points[each][0] for each in ranks], color=canvas.COLOURS[0], marker="o", markersize=4)
    for each in ranks:
        value, finding = points[each]
        canvas.mark(axes, each, value, finding, 0.03 * ranks[-1])
        if each > 1:
            share = value / ideal[each] if ideal[each] else math.nan
            text = f"{wording.number(value)}\n{wording.percent(share)}"
            axes.annotate(text, (each, value), (-3, 2), textcoords="offset points", ha="right", va="bottom", fontsize=7)
    axes.set_xlim(0, ranks[-1] * 1.08)
    axes.set_ylim(0, max(most, *(value for value, _ in points.values()), 1e-9) * 1.25)
    axes.set_xticks(ranks)
    axes.locator_params(axis="y", nbins=5)
    canvas.numbered(axes.yaxis)
    axes.tick_params(labelsize=7.5)


def _legend(panels: dict[str, Points], summed: bool) -> list[Any]:
    ideal = SUMMED if summed else IDEAL
    handles = [
        Line2D([], [], color=canvas.COLOURS[0], marker="o", markersize=4, label=SHARE),
        Line2D([], [], color=canvas.INK, linewidth=0.9, linestyle=":", label=ideal),
    ]
    if any(finding.limit for points in panels.values() for _, finding in points.values()):
        handles.append(canvas.limit_handle())
    return handles


def _in_words(points: Points) -> list[str]:
    return [f"{wording.number(points[ranks][0])} images/s on {ranks}" for ranks in sorted(points)]


def _name(finding: Finding, say: Say = english) -> str:
    conditions = finding.measurement.conditions
    return say(", ").join(wording.words({key: value for key, value in conditions.items() if key in NAMED_BY}, say))
