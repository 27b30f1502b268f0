"""Figures against a size: bandwidth and latency against bytes or the number of nodes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import in_language, say
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.figures import for_information
from pytest_gpufleet.report.plots import canvas

# What may stand on the horizontal axis, and how many points are worth a curve.
SIZES: dict[str, tuple[int, str, Callable[[float], str]]] = {
    "bytes": (3, "message size", wording.size),
    "nodes": (2, "number of nodes", wording.number),
}
PANEL = ("collective", "operation", "recipe")  # the first of these that a figure has gives it its panel
COLUMNS = 3
HEIGHT = 1.35
LEGEND = ("measured", "published for a healthy machine")

Point = tuple[float, float, Finding]


def curves(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) for each metric that was measured for all ranks together at several sizes.

    One panel for each collective or recipe, limits as short marks, and what was published for a healthy machine as
    open circles.
    """
    drawn = []
    for key, (fewest, label, _) in SIZES.items():
        for metric in dict.fromkeys(finding.measurement.metric for finding in findings):
            some = [f for f in findings if f.measurement.metric == metric and _size(f, key) > 0 and _value(f)]
            panels = _panels(some, key, fewest)
            if panels:
                definition = wording.metric(some[0])
                title = wording.capitalised(say(definition.title))
                caption = say("{metric} against {what}", metric=title, what=say(label))
                said = canvas.translated(label, *LEGEND) | _lines_said(some, key)
                drawn.append((caption, _svg(panels, key, caption, definition, said)))
    return drawn


def _panels(findings: Sequence[Finding], key: str, fewest: int) -> dict[str, dict[str, list[Point]]]:
    """Panel -> line -> points by size; lines with fewer points are no curves."""
    if not findings:
        return {}
    panels: dict[str, dict[str, dict[float, Point]]] = {}
    with in_language("en"):  # what matplotlib lays out
        names = _line_names(findings, key)
    for finding, line in zip(findings, names, strict=True):
        panel = _panel(finding)
        value = _value(finding)
        assert value is not None  # filtered before
        points = panels.setdefault(panel, {}).setdefault(line, {})
        size = _size(finding, key)
        if size not in points or not for_information(finding):  # measured twice: what was judged counts
            points[size] = (size, value, finding)
    curves = {
        panel: {
            line: [points[size] for size in sorted(points)] for line, points in lines.items() if len(points) >= fewest
        }
        for panel, lines in panels.items()
    }
    return canvas.first({panel: lines for panel, lines in curves.items() if lines})


def _panel(finding: Finding) -> str:
    conditions = finding.measurement.conditions
    return next((str(conditions[each]) for each in PANEL if each in conditions), "")


def _line_names(findings: Sequence[Finding], key: str) -> list[str]:
    """What tells the line of each finding from others of its panel."""
    _, names = wording.shared_and_own(findings, without=wording.ALONG[key])
    told_already = [{_panel(finding), *_of_nodes(finding)} for finding in findings]
    return [
        say(", ").join(part for part in name.split(say(", ")) if part not in known)
        for name, known in zip(names, told_already, strict=True)
    ]


def _lines_said(findings: Sequence[Finding], key: str) -> dict[str, str]:
    with in_language("en"):
        names = _line_names(findings, key)
    return {drawn: shown for drawn, shown in zip(names, _line_names(findings, key), strict=True) if drawn}


def _of_nodes(finding: Finding) -> list[str]:
    """What is true of every figure of so many nodes: the names of their lines are long enough."""
    conditions = finding.measurement.conditions
    return wording.words({key: conditions[key] for key in ("ranks", "in_place") if {key, "nodes"} <= {*conditions}})


def _svg(
    panels: dict[str, dict[str, list[Point]]], key: str, caption: str, metric: Metric, said: Mapping[str, str]
) -> str:
    _, label, show = SIZES[key]
    names = list(dict.fromkeys(line for lines in panels.values() for line in lines))
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    healthy = [value for _, _, finding in points if (value := canvas.healthy_value(finding.limit))]
    bounds = [bound for _, _, finding in points if (bound := canvas.limit_value(finding.limit)) is not None]
    top = max(*(value for _, value, _ in points), *healthy, *bounds, 1e-9)
    sizes = sorted({size for size, _, _ in points})
    handles = _legend(names, bool(bounds), bool(healthy))
    with canvas.style(f"{metric.name} against {key}"):
        figure, axes = canvas.panels(len(panels), COLUMNS, HEIGHT, legend=bool(handles))
        for number, (each, (panel, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
            for name, line in lines.items():
                _draw(each, line, names.index(name))
            canvas.title(each, panel)
            marks = canvas.ticks(sizes, 5)
            labels = [show(mark).replace(" ", "\u2009") for mark in marks]
            each.set_xticks([math.log2(mark) for mark in marks], labels, fontsize=7.5)
            each.set_xlim(math.log2(sizes[0]) - 0.7, math.log2(sizes[-1]) + 0.7)
            each.set_ylim(0, top * 1.08)
            canvas.numbered(each.yaxis)
            if number % COLUMNS:
                each.tick_params(axis="y", labelleft=False)
            else:
                canvas.labels(each, y=metric.unit)
            if number + COLUMNS >= len(panels):
                canvas.labels(each, x=label)
        canvas.legend(figure, handles)
        return canvas.svg(figure, f"{caption}: {'; '.join(filter(None, panels))}", said)


def _draw(axes: Any, line: Sequence[Point], index: int) -> None:
    # Logarithms on a plain axis: matplotlib's own logarithmic axis takes twice as long.
    xs, ys = [math.log2(size) for size, _, _ in line], [value for _, value, _ in line]
    axes.plot(xs, ys, **canvas.look(index, 3.5))
    for x, (_, value, finding) in zip(xs, line, strict=True):
        if healthy := canvas.healthy_value(finding.limit):
            axes.plot([x], [healthy], "o", markersize=6, markerfacecolor="none", markeredgecolor=canvas.INK,
                      markeredgewidth=0.9)  # fmt: skip
        canvas.mark(axes, x, value, finding, 0.6)


def _legend(names: Sequence[str], limits: bool, healthy: bool) -> list[Any]:
    handles = [Line2D([], [], **canvas.look(index), label=name or "measured") for index, name in enumerate(names)]
    if limits:
        handles.append(Line2D([], [], color=canvas.INK, linewidth=1.8, label=canvas.LIMIT))
    if healthy:
        handles.append(Line2D([], [], color=canvas.INK, marker="o", markersize=6, markerfacecolor="none",
                              linestyle="", label="published for a healthy machine"))  # fmt: skip
    return handles if len(handles) > 1 else []


def _value(finding: Finding) -> float | None:
    """The figure of all ranks together."""
    return canvas.drawable(finding.measurement.values.get(WORLD))


def _size(finding: Finding, key: str) -> float:
    size = finding.measurement.conditions.get(key, 0)
    return canvas.drawable(size) or 0 if isinstance(size, int | float) else 0
