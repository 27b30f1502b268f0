"""The plots of the report, SVG to stand inside HTML: curves against a size, and what the GPUs did during the run.

Importing this loads matplotlib; not pyplot, which keeps global state. Text and axes take the colour of the text around
them (`currentColor`), so that one drawing serves on paper, in light and in dark; the lines have mid-tones that stand
out on both. Places are computed here: matplotlib's layout engines draw everything twice to find them."""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Said, in_language, say
from pytest_gpufleet.model.metric import Metric, Sample
from pytest_gpufleet.model.place import WORLD, Place, grouped
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.failures import group_title
from pytest_gpufleet.report.figures import Line, by_size, size_of

COLOURS = ("#2f7ed8", "#cc5c1d", "#1a935f", "#b0529c", "#8d7d0e", "#7b6be0", "#c8434f")
BAD = "#d03b2f"
MARKERS = "os^DvPX"
# Stands for currentColor: matplotlib takes real colours only.
INK = "#123457"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}

WIDTH = 8.2  # of every plot, in inches
# Room around panels, in inches. The reader's font may be wider than the one that was measured here.
LEFT, RIGHT, TOP, BOTTOM, GAP = 0.72, 0.3, 0.28, 0.5, 0.42
LEGEND, LEGEND_COLUMNS = 0.34, 6
LIMIT = "limit"  # in the legend
LARGEST = 1e30  # that matplotlib's arithmetic of axes takes without an overflow


def style(salt: str) -> Any:
    """The context to draw in. matplotlib makes ids from `salt`, and drawings on one page must not share them."""
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": wording.clean(salt)})


def panels(count: int, columns: int, height: float, legend: bool, above: float = 0.0) -> tuple[Figure, list[Any]]:
    """`count` panels, side by side in as many rows as it takes and `height` inches high, and room `above` them."""
    columns = min(columns, max(2, count))  # one alone is not drawn wider than two
    rows = math.ceil(count / columns)
    head = TOP + (LEGEND if legend else 0.0) + above
    total = head + rows * height + (rows - 1) * (TOP + BOTTOM) + BOTTOM
    width = (WIDTH - LEFT - RIGHT - (columns - 1) * GAP) / columns
    figure = Figure(figsize=(WIDTH, total))
    figure.patch.set_visible(False)  # the page shows through, be it light or dark
    axes = []
    for number in range(count):
        row, column = divmod(number, columns)
        bottom = total - head - (row + 1) * height - row * (TOP + BOTTOM)
        box = ((LEFT + column * (width + GAP)) / WIDTH, bottom / total, width / WIDTH, height / total)
        each: Any = figure.add_axes(box)
        each.patch.set_visible(False)
        each.spines[["top", "right"]].set_visible(False)
        each.grid(color=INK, alpha=0.15, linewidth=0.8)
        each.set_axisbelow(True)
        axes.append(each)
    return figure, axes


def look(number: int, size: float = 4) -> dict[str, Any]:
    """How one of several lines is drawn."""
    colour, marker = (each[number % len(each)] for each in (COLOURS, MARKERS))
    return {"color": colour, "marker": marker, "markersize": size, "linewidth": 1.4}


def title(axes: Any, text: str) -> None:
    axes.set_title(wording.clean(text), fontsize=9, loc="left", pad=5, fontweight="bold", parse_math=False)


def legend(figure: Figure, handles: list[Any]) -> None:
    shown = figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=LEGEND_COLUMNS, frameon=False, fontsize=8.5,
        borderaxespad=0.1, handlelength=1.8, columnspacing=1.4,
    )  # fmt: skip
    for text in shown.get_texts():
        text.set_parse_math(False)
        text.set_text(wording.clean(text.get_text()))


def drawable(value: float | None) -> float | None:
    """The value if it can stand on an axis; None for what only a broken machine measures, which the tables show."""
    return value if value is not None and abs(value) <= LARGEST else None  # NaN is not


def ticks(values: Iterable[float], most: int) -> list[float]:
    """About so many of the values on a logarithmic axis, from the largest down, each far enough from the last."""
    every = sorted(set(values), reverse=True)
    apart, chosen = (every[0] / every[-1]) ** (1 / most), [math.inf]
    for value in every:
        if value * apart <= chosen[-1]:
            chosen.append(value)
    return chosen[1:]


def svg(figure: Figure, description: str, said: Mapping[str, str]) -> str:
    """The drawing. `said`: texts in it, and what stands there in their places: matplotlib, which lays it out, has fonts
    for English alone, and the reader's browser has others."""
    shown = {escape(drawn, quote=False): escape(wording.clean(text), quote=False) for drawn, text in said.items()}
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the date would make every file differ
    canvas: Any = FigureCanvasSVG(figure)  # some versions of matplotlib come without its types
    canvas.print_svg(file, metadata=nothing)
    _, tag, body = file.getvalue().partition("<svg ")
    body = re.sub("[^<>]+(?=</text>)", lambda text: shown.get(text[0], text[0]), body)
    # Two drawings on one page must not share ids; none of matplotlib's names is referred to, its hashes are.
    body = re.sub(r' id="[\w.]+_\d+"', "", body).replace(INK, "currentColor")
    # A tenth of a point is finer than the eye; with six digits the file would be twice as large.
    body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), body)
    return f'{tag}role="img" aria-label="{escape(wording.clean(description))}" {body}'


MOST_PANELS = 24  # of one metric
MOST_METRICS = 12  # far more than any group has: evidence may come from anybody
COLUMNS = 3

# What may stand on the horizontal axis, and how many points are worth a curve.
SIZES: dict[str, tuple[int, str, Callable[[float], str]]] = {
    "bytes": (3, "message size", wording.size),
    "nodes": (2, "number of nodes", wording.number),
    "batch": (3, "batch of each GPU", wording.number),
}
PANEL = ("collective", "operation", "recipe")  # the first of these that a figure has gives it its panel
MEASURED, HEALTHY = "measured", "published for a healthy machine"  # in the legend
CIRCLE: Any = {"marker": "o", "markersize": 6, "markerfacecolor": "none", "linestyle": ""}

Panels = Mapping[str, Sequence[tuple[str, Line]]]  # the lines of each, with their names


def curves(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) for each metric that was measured for all ranks together at several sizes: a panel for each
    collective or recipe, limits as short marks, and what was published for a healthy machine as open circles."""
    result, of_all = [], [each for each in findings if drawable(each.measurement.values.get(WORLD))]
    for key, (fewest, label, _) in SIZES.items():
        points = (each for each in of_all if 0 < size_of(each, key) <= LARGEST)
        for some in [*grouped((each.measurement.metric, each) for each in points).values()][:MOST_METRICS]:
            under = (each.measurement.conditions for each in some)
            at = [next((str(given[name]) for name in PANEL if name in given), "") for given in under]
            with in_language("en"):  # which matplotlib lays out
                names = _line_names(some, at, key)
            lines = by_size(some, zip(at, names, strict=True), key)
            by_panel = grouped((panel, (name, line)) for (panel, name), line in lines.items() if len(line) >= fewest)
            if by_panel:
                metric, shown = some[0].measurement.definition, dict([*by_panel.items()][:MOST_PANELS])
                caption = say("{metric} against {what}", metric=wording.capitalised(say(metric.title)), what=say(label))
                said = {text: say(text) for text in (label, MEASURED, HEALTHY)}
                said |= dict(zip(names, _line_names(some, at, key), strict=True))
                said[LIMIT] = say("Limit").lower()  # "limit" itself is said where limits are counted
                result.append((caption, _curves_svg(shown, key, caption, metric, said)))
    return result


def _line_names(findings: Sequence[Finding], panels: Sequence[str], key: str) -> list[str]:
    """What tells the line of each finding from others of its panel, short where it is of nodes or of the sweep."""
    _, names = wording.shared_and_own(findings, without=wording.ALONG[key])
    shown = []
    for finding, panel, name in zip(findings, panels, names, strict=True):
        given = finding.measurement.conditions
        left_out = ("ranks", "in_place") if "nodes" in given else ("workload",)
        known = wording.words({each: given[each] for each in left_out if each in given})
        shown.append(say(", ").join(part for part in name.split(say(", ")) if part not in (panel, *known)))
    return shown


def _curves_svg(shown: Panels, key: str, caption: str, metric: Metric, said: Mapping[str, str]) -> str:
    _, label, show = SIZES[key]
    names = list(dict.fromkeys(name for lines in shown.values() for name, _ in lines))
    points = [finding for lines in shown.values() for _, line in lines for finding in line.values()]
    sizes = sorted({size_of(finding, key) for finding in points})
    bounds, healthy = ([*filter(None, marks)] for marks in zip(*map(_marks, points), strict=True))
    top = max(*(finding.measurement.values[WORLD] for finding in points), *healthy, *bounds, 1e-9)
    handles = [Line2D([], [], **look(index), label=name or MEASURED) for index, name in enumerate(names)]
    if bounds:
        handles.append(Line2D([], [], color=INK, linewidth=1.8, label=LIMIT))
    if healthy:
        handles.append(Line2D([], [], color=INK, label=HEALTHY, **CIRCLE))
    handles = handles if len(handles) > 1 else []
    with style(f"{metric.name} against {key}"):
        figure, axes = panels(len(shown), COLUMNS, 1.35, legend=bool(handles))
        for number, (each, (panel, lines)) in enumerate(zip(axes, shown.items(), strict=True)):
            for name, line in lines:
                # Logarithms on a plain axis: matplotlib's own logarithmic axis takes twice as long.
                xs, values = [*map(math.log2, line)], [finding.measurement.values[WORLD] for finding in line.values()]
                each.plot(xs, values, **look(names.index(name), 3.5))
                for x, value, finding in zip(xs, values, line.values(), strict=True):
                    bound, reached = _marks(finding)
                    if reached:
                        each.plot([x], [reached], color=INK, markeredgewidth=0.9, **CIRCLE)
                    if bound is not None:
                        each.plot([x - 0.6, x + 0.6], [bound] * 2, color=INK, linewidth=1.8)
                    if finding.state == "missed":
                        each.plot([x], [value], "X", color=BAD, markersize=8, markeredgewidth=0)
            title(each, panel)
            marks = ticks(sizes, 5)
            labels = [show(mark).replace(" ", "\u2009") for mark in marks]
            each.set_xticks([math.log2(mark) for mark in marks], labels, fontsize=7.5)
            each.set_xlim(math.log2(sizes[0]) - 0.7, math.log2(sizes[-1]) + 0.7)
            each.set_ylim(0, top * 1.08)
            each.yaxis.set_major_formatter(lambda value, _: wording.number(value))
            if number % COLUMNS:
                each.tick_params(axis="y", labelleft=False)
            else:
                each.set_ylabel(wording.clean(metric.unit), parse_math=False)
            if number + COLUMNS >= len(shown):
                each.set_xlabel(label)
        if handles:
            legend(figure, handles)
        return svg(figure, f"{caption}: {'; '.join(filter(None, shown))}", said)


def _marks(finding: Finding) -> tuple[float | None, float | None]:
    """The limit, and what a healthy machine was measured at where the limit was made from that."""
    limit = finding.limit
    return (drawable(limit.value), drawable(limit.healthy)) if limit else (None, None)


CAPTION = "What the GPUs did during the run"
LONGEST_LINE = 600  # points
MISSING = 3  # times the usual time between two samples: after that one is missing
DASH = 0.004  # of the axis: a line begins so much early, so that a value that stands alone is seen
LINE_STYLES = ("-", "--", ":", "-.")  # where there are more GPUs than colours
# Seconds between two ticks of the time axis, the finest that gives few enough of them.
TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
HOUR = 3600
# Below the time axis: of a run of minutes, and of one of two hours and more.
MINUTES, HOURS = "minutes:seconds since {time} UTC", "hours:minutes since {time} UTC"
# Characters of the name of a group; and of the axis' width the narrowest group that is named, and the last place.
LONGEST_LABEL, NARROWEST, LAST_LABEL = 16, 0.035, 0.94
PANEL_HEIGHT, LABELS_HEIGHT, LEGEND_LINE = 0.95, 0.7, 0.18  # in inches

# (name, start, end) of a check, in seconds since the epoch; of a group, in seconds since the first sample
Spans = Sequence[tuple[str, float, float]]
Points = list[tuple[float, float]]


class Quantity(NamedTuple):
    """What one panel shows: a reading times `scale`. `bottom`: where its axis starts, None for anywhere."""

    title: str
    unit: str
    reading: str
    scale: float = 1.0
    bottom: float | None = 0.0


QUANTITIES = (
    Quantity("GPU utilisation", "%", "utilization_percent"),
    Quantity("GPU memory used", "GiB", "memory_used_bytes", 1 / 2**30),
    Quantity("Temperature of the GPU", "°C", "temperature_c", bottom=None),
    Quantity("Temperature of the GPU memory", "°C", "memory_temperature_c", bottom=None),
    Quantity("Power", "W", "power_watts"),
    Quantity("SM clock", "MHz", "sm_clock_mhz"),
)


def telemetry(samples: Sequence[Sample], places: Sequence[Place], checks: Spans) -> str:
    """An SVG of every quantity that any GPU gave, the GPUs in the order of `places`; "" with fewer than two samples."""
    # Not the time of the last sample: somebody may have set the clock back during the run.
    start, length = (samples[0].time, max(each.time for each in samples) - samples[0].time) if samples else (0.0, 0.0)
    if length <= 0:
        return ""
    stripes = []
    for group, ran in groupby(sorted(checks, key=lambda check: check[1]), lambda check: group_title(check[0])):
        label = group if len(group) <= LONGEST_LABEL else f"{group[: LONGEST_LABEL - 3]}..."
        _, begins, ends = zip(*ran, strict=True)
        first, last = (min(max(at - start, 0.0), length) for at in (begins[0], max(ends)))
        stripes.append((label, first, last))
    made = ((each, {place: _line(samples, at, each, length) for at, place in enumerate(places)}) for each in QUANTITIES)
    shown = {each: lines for each, lines in made if any(lines.values())}
    return _svg(shown, stripes, start, length) if shown else ""


def _line(samples: Sequence[Sample], index: int, quantity: Quantity, length: float) -> Points:
    """(seconds since the first sample, value); NaN, at which the line breaks, where a sample has none or is missing."""
    first, last = samples[0].time, -1
    longest_step = MISSING * median(after.time - before.time for before, after in pairwise(samples))
    points: Points = []
    for number, sample in enumerate(samples):
        gpu = sample.gpus[index] if index < len(sample.gpus) else {}
        if (value := drawable(gpu.get(quantity.reading))) is not None:
            at, value = sample.time - first, value * quantity.scale
            if not points or number - last > 1 or sample.time - samples[last].time > longest_step:
                points += [(at, math.nan)] * bool(points) + [(at - DASH * length, value)]
            points.append((at, value))
            last = number
    if len(points) <= LONGEST_LINE:
        return points
    result: Points = []  # of each stretch the lowest and the highest, in their order
    stretches = LONGEST_LINE // 2
    for number in range(stretches):
        stretch = points[len(points) * number // stretches : len(points) * (number + 1) // stretches]
        known = [point for point in stretch if not math.isnan(point[1])] or stretch[:1]
        result += sorted({min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])})
    return result


def _svg(shown: Mapping[Quantity, Mapping[Place, Points]], stripes: Spans, start: float, length: float) -> str:
    hours, texts = length >= 2 * HOUR, []

    def elapsed(seconds: float) -> str:
        whole, rest = divmod(round(seconds), HOUR if hours else 60)
        return f"{whole}:{rest // 60 if hours else rest:02}"

    at_ticks = range(0, int(length) + 1, next((tick for tick in TICKS if length / tick <= 9), 86400))
    since = Said(HOURS if hours else MINUTES, time=f"{datetime.fromtimestamp(start, timezone.utc):%H:%M:%S}")
    said = {text: say(text) for text in (since, *(name for name, _, _ in stripes))}
    above = LABELS_HEIGHT + LEGEND_LINE * (max(map(len, shown.values())) // LEGEND_COLUMNS)
    with style(CAPTION):
        figure, axes = panels(len(shown), 1, PANEL_HEIGHT, legend=True, above=above)
        for panel, (quantity, lines) in zip(axes, shown.items(), strict=True):
            for number, (place, line) in enumerate(lines.items()):
                dashes = LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]
                panel.plot(
                    *(zip(*line, strict=True) if line else ((), ())), label=wording.place(place), linestyle=dashes,
                    linewidth=1.1, color=COLOURS[number % len(COLOURS)],
                )  # fmt: skip
            known = [value for line in lines.values() for _, value in line if not math.isnan(value)]
            panel.set_xlim(0, length)
            if quantity.bottom is not None:
                panel.set_ylim(quantity.bottom, max(*known, 1e-3) * 1.08)
            panel.set_xticks(at_ticks, [elapsed(at) for at in at_ticks])
            panel.grid(visible=False, axis="x")
            for _, first, last in stripes[1::2]:
                panel.axvspan(first, last, color=INK, alpha=0.09, linewidth=0)
            name = f"{quantity.title}, {quantity.unit}"
            said[name] = f"{say(quantity.title)}{say(', ')}{quantity.unit}"
            title(panel, name)
            texts.append(f"{say(quantity.title)} {wording.span(known, quantity.unit)}")
        for name, first, last in stripes:
            if last - first > length * NARROWEST:  # else it would cover the next one
                at = min((first + last) / 2, length * LAST_LABEL), 1.25  # above the stripe
                axes[0].text(*at, name, transform=axes[0].get_xaxis_transform(), rotation=40, rotation_mode="anchor",
                             va="center", fontsize=8, parse_math=False)  # fmt: skip
        axes[-1].set_xlabel(str(since))
        legend(figure, axes[0].lines)
        return svg(figure, f"{say(CAPTION)}{say(': ')}{say('; ').join(texts)}", said)
