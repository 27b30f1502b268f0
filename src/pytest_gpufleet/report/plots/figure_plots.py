"""The plots of the figures of a group of checks: curves against a size, and what each way to train makes of a GPU.
Importing this loads matplotlib."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from pytest_gpufleet.model.conditions import METHODS, Condition
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import in_language, say
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.figures import TITLES, Way, by_size, is_swept, size_of, ways_of
from pytest_gpufleet.report.plots import canvas

MOST_PANELS = 24
MOST_METRICS = 12  # far more than any group has: evidence may come from anybody


def draw(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) of everything that can be drawn of the figures of one group of checks."""
    metrics = [*dict.fromkeys(finding.measurement.metric for finding in findings)][:MOST_METRICS]
    some = [each for each in findings if each.measurement.metric in metrics]
    return [*training_plot(some), *curves([each for each in some if not is_swept(each.measurement.conditions)])]


COLUMNS = 3

# What may stand on the horizontal axis, and how many points are worth a curve.
SIZES: dict[str, tuple[int, str, Callable[[float], str]]] = {
    "bytes": (3, "message size", wording.size),
    "nodes": (2, "number of nodes", wording.number),
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
        for some in grouped((each.measurement.metric, each) for each in shown).values():
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
        known = wording.words({each: given[each] for each in ("ranks", "in_place") if {each, "nodes"} <= {*given}})
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


TRAINING_HEIGHT, TRAINING_COLUMNS = 1.5, 2
MOST_TICKS = 6
TRAINING_CAPTION = "Training throughput of each GPU by recipe, method, batch and accumulated gradients"
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
    texts = []
    with canvas.style(TRAINING_CAPTION):
        figure, axes = canvas.panels(len(panels), TRAINING_COLUMNS, TRAINING_HEIGHT, legend=True)
        for each, (axis, panel) in zip(axes, panels.items(), strict=True):
            _draw_training(each, panel, counts)
            canvas.title(each, AXES[axis])
            best = ((wording.words({axis: value})[0], max(row.rates), row) for value, row in panel.items())
            shown = ", ".join(f"{word} {wording.number(row.rates[count] / count)}" for word, count, row in best)
            texts.append(f"{say(AXES[axis])}: {shown}")
        canvas.legend(figure, [Line2D([], [], label=name, **canvas.look(at)) for at, name in enumerate(names.values())])
        for each in axes[::TRAINING_COLUMNS]:
            each.set_ylabel(RATE)
        return [(TRAINING_CAPTION, canvas.svg(figure, f"{say(TRAINING_CAPTION)}. {'; '.join(texts)}", said))]


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


def _draw_training(axes: Any, panel: Panel, counts: Sequence[int]) -> None:
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
    names = (METHODS.get(each, each) if isinstance(each, str) else wording.number(each) for each in panel)
    axes.set_xticks(range(0, len(panel), step), [*map(wording.clean, names)][::step])
    axes.set_xlim(-0.5, len(panel) - 0.5)
    axes.set_ylim(0, max(1e-9, *(rate for each in rates for rate in each.values())) * 1.1)
    canvas.numbered(axes.yaxis)
    axes.tick_params(labelsize=7.5)
