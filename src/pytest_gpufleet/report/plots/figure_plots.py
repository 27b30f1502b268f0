"""The plots of the figures of a group of checks: curves against a size. Importing this loads matplotlib."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import in_language, say
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.figures import by_size, size_of
from pytest_gpufleet.report.plots import canvas

MOST_PANELS = 24
MOST_METRICS = 12  # far more than any group has: evidence may come from anybody
COLUMNS = 3

# What may stand on the horizontal axis, and how many points are worth a curve.
SIZES: dict[str, tuple[int, str, Callable[[float], str]]] = {
    "bytes": (3, "message size", wording.size),
    "nodes": (2, "number of nodes", wording.number),
    "batch": (3, "batch of each GPU", wording.number),
}
PANEL = ("collective", "operation", "recipe")  # the first of these that a figure has gives it its panel
CURVE_HEIGHT = 1.35
MEASURED, HEALTHY = "measured", "published for a healthy machine"  # in the legend

Line = Mapping[float, Finding]  # by size
Panels = Mapping[str, Sequence[tuple[str, Line]]]  # the lines of each, with their names


def curves(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) for each metric that was measured for all ranks together at several sizes.

    One panel for each collective or recipe, limits as short marks, and what was published for a healthy machine as
    open circles. Lines with too few points are no curves.
    """
    drawn = []
    for key, (fewest, label, _) in SIZES.items():
        shown = (
            each
            for each in findings
            if canvas.drawable(each.measurement.values.get(WORLD)) and 0 < size_of(each, key) <= canvas.LARGEST
        )
        for some in [*grouped((each.measurement.metric, each) for each in shown).values()][:MOST_METRICS]:
            with in_language("en"):  # which matplotlib lays out
                names = _line_names(some, key)
            lines = by_size(some, zip(map(_panel_name, some), names, strict=True), key)
            panels = grouped((panel, (name, line)) for (panel, name), line in lines.items() if len(line) >= fewest)
            if panels:
                metric = wording.metric(some[0])
                title = wording.capitalised(say(metric.title))
                caption = say("{metric} against {what}", metric=title, what=say(label))
                said = canvas.translated(label, MEASURED, HEALTHY) | dict(
                    zip(names, _line_names(some, key), strict=True)
                )
                drawn.append((caption, _curves_svg(dict([*panels.items()][:MOST_PANELS]), key, caption, metric, said)))
    return drawn


def _panel_name(finding: Finding) -> str:
    conditions = finding.measurement.conditions
    return next((str(conditions[each]) for each in PANEL if each in conditions), "")


def _line_names(findings: Sequence[Finding], key: str) -> list[str]:
    """What tells the line of each finding from others of its panel; without what is true of every figure of so many
    nodes, whose names are long enough."""
    _, names = wording.shared_and_own(findings, without=wording.ALONG[key])
    shown = []
    for finding, name in zip(findings, names, strict=True):
        given = finding.measurement.conditions
        left_out = ("ranks", "in_place") if "nodes" in given else ("workload",)
        known = wording.words({each: given[each] for each in left_out if each in given})
        parts = (part for part in name.split(say(", ")) if part not in (_panel_name(finding), *known))
        shown.append(say(", ").join(parts))
    return shown


def _curves_svg(panels: Panels, key: str, caption: str, metric: Metric, said: Mapping[str, str]) -> str:
    _, label, show = SIZES[key]
    names = list(dict.fromkeys(name for lines in panels.values() for name, _ in lines))
    points = [finding for lines in panels.values() for _, line in lines for finding in line.values()]
    sizes = sorted({size_of(finding, key) for finding in points})
    bounds, healthy = [*filter(None, map(_bound, points))], [*filter(None, map(_healthy, points))]
    top = max(*(finding.measurement.values[WORLD] for finding in points), *healthy, *bounds, 1e-9)
    handles = [Line2D([], [], **canvas.look(index), label=name or MEASURED) for index, name in enumerate(names)]
    if bounds:
        handles.append(Line2D([], [], color=canvas.INK, linewidth=1.8, label=canvas.LIMIT))
    if healthy:
        circle: Any = {"marker": "o", "markersize": 6, "markerfacecolor": "none", "linestyle": ""}
        handles.append(Line2D([], [], color=canvas.INK, label=HEALTHY, **circle))
    handles = handles if len(handles) > 1 else []
    with canvas.style(f"{metric.name} against {key}"):
        figure, axes = canvas.panels(len(panels), COLUMNS, CURVE_HEIGHT, legend=bool(handles))
        for number, (each, (panel, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
            for name, line in lines:
                _draw_curve(each, line, names.index(name))
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
                each.set_ylabel(wording.clean(metric.unit), parse_math=False)
            if number + COLUMNS >= len(panels):
                each.set_xlabel(label)
        if handles:
            canvas.legend(figure, handles)
        return canvas.svg(figure, f"{caption}: {'; '.join(filter(None, panels))}", said)


def _bound(finding: Finding) -> float | None:
    return canvas.drawable(finding.limit.value) if finding.limit else None


def _healthy(finding: Finding) -> float | None:
    """What a healthy machine was measured at, where the limit was made from that."""
    return canvas.drawable(finding.limit.healthy) if finding.limit else None


def _draw_curve(axes: Any, line: Line, index: int) -> None:
    # Logarithms on a plain axis: matplotlib's own logarithmic axis takes twice as long.
    points = [(math.log2(size), finding.measurement.values[WORLD], finding) for size, finding in line.items()]
    axes.plot([x for x, _, _ in points], [value for _, value, _ in points], **canvas.look(index, 3.5))
    for x, value, finding in points:
        if healthy := _healthy(finding):
            axes.plot([x], [healthy], "o", markersize=6, markerfacecolor="none", markeredgecolor=canvas.INK,
                      markeredgewidth=0.9)  # fmt: skip
        if (bound := _bound(finding)) is not None:
            axes.plot([x - 0.6, x + 0.6], [bound] * 2, color=canvas.INK, linewidth=1.8)
        if finding.state == "missed":
            axes.plot([x], [value], "X", color=canvas.BAD, markersize=8, markeredgewidth=0)
