"""The plots of what the GPUs did during the run: one a quantity, a line a GPU, groups of checks as stripes behind."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from pytest_gpufleet.model.language import Said, say
from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.gpu_grid import group_title
from pytest_gpufleet.report.plots import canvas

LONGEST_LINE = 600  # points
MISSING = 3  # times the usual time between two samples: after that one is missing
DASH = 0.004  # of the axis, for a value that stands alone
LINE_STYLES = ("-", "--", ":", "-.")  # where there are more GPUs than colours
# Seconds between two ticks of the time axis, the finest that gives few enough of them.
TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
MOST_TICKS = 9
HOUR = 3600
# Below the time axis, and for those who do not see the plot: of a run of minutes, and of one of two hours and more.
MINUTES = (
    "minutes:seconds since {time} UTC",
    "{what} of {gpus} GPUs over {time} (minutes:seconds): {low} to {high}",
)
HOURS = ("hours:minutes since {time} UTC", "{what} of {gpus} GPUs over {time} (hours:minutes): {low} to {high}")
LABEL_GAP = 0.035  # between the names of two groups, of the axis' width
LONGEST_LABEL = 16
# Of the axes in the figure, as fractions of it; the legend beside it takes one column for so many GPUs.
LEFT, BOTTOM, WIDTH, HEIGHT = 0.09, 0.19, 0.83, 0.53
LEGEND_LINES, LEGEND_WIDTH = 8, 0.09

# (name, start, end) of a check, in seconds since the epoch; of a group, in seconds since the first sample
Spans = Sequence[tuple[str, float, float]]
Points = list[tuple[float, float]]


class Quantity(NamedTuple):
    """What one plot shows: a reading times `scale`. `bottom`: where its axis starts, None for anywhere."""

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


def svgs(samples: Sequence[Sample], places: Sequence[Place], checks: Spans) -> list[tuple[str, str]]:
    """(title, SVG) for each quantity that any GPU gave, over the whole run; nothing with fewer than two samples, which
    are in the order in which they were taken, and of each the GPUs in that of `places`."""
    # Not the time of the last sample: somebody may have set the clock back during the run.
    start, length = (samples[0].time, max(each.time for each in samples) - samples[0].time) if samples else (0.0, 0.0)
    if length <= 0:
        return []
    stripes = []
    for group, ran in groupby(sorted(checks, key=lambda check: check[1]), lambda check: group_title(check[0])):
        label = group if len(group) <= LONGEST_LABEL else f"{group[: LONGEST_LABEL - 3]}..."
        _, begins, ends = zip(*ran, strict=True)
        first, last = (min(max(at - start, 0.0), length) for at in (begins[0], max(ends)))
        stripes.append((label, first, last))
    every = ((each, {place: _line(samples, at, each) for at, place in enumerate(places)}) for each in QUANTITIES)
    return [(each.title, _svg(each, lines, stripes, start, length)) for each, lines in every if any(lines.values())]


def _line(samples: Sequence[Sample], index: int, quantity: Quantity) -> Points:
    """(seconds since the first sample, value) where there is a value; NaN, at which the line breaks, where a sample has
    none or is missing."""
    first, last = samples[0].time, -1
    longest_step = MISSING * median(after.time - before.time for before, after in pairwise(samples))
    points: Points = []
    for number, sample in enumerate(samples):
        gpu = sample.gpus[index] if index < len(sample.gpus) else {}
        if (value := canvas.drawable(gpu.get(quantity.reading))) is not None:
            if points and (number - last > 1 or sample.time - samples[last].time > longest_step):
                points.append((points[-1][0], math.nan))
            points.append((sample.time - first, value * quantity.scale))
            last = number
    return _decimated(points)


def _decimated(points: Points) -> Points:
    """At most LONGEST_LINE points: of each stretch the lowest and the highest, in their order."""
    if len(points) <= LONGEST_LINE:
        return points
    result = []
    stretches = LONGEST_LINE // 2
    for number in range(stretches):
        stretch = points[len(points) * number // stretches : len(points) * (number + 1) // stretches]
        known = [point for point in stretch if not math.isnan(point[1])] or stretch[:1]
        result += sorted({min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])})
    return result


def _dashed(points: Points, length: float) -> Points:
    """A line, in which a value between two gaps is a short line of its own, with a break behind it: else it would not
    be seen. As one path it takes half of what marks do."""
    known = [False, *(not math.isnan(y) for _, y in points), False]
    half = length * DASH / 2
    drawn: Points = []
    for (x, y), before, here, after in zip(points, known, known[1:], known[2:], strict=False):
        alone = here and not (before or after)
        drawn += [(x - half, y), (x + half, y), (x + half, math.nan)] if alone else [(x, y)]
    return drawn


def _svg(quantity: Quantity, lines: Mapping[Place, Points], stripes: Spans, start: float, length: float) -> str:
    known = [value for line in lines.values() for _, value in line if not math.isnan(value)]
    hours = length >= 2 * HOUR
    below, text = HOURS if hours else MINUTES

    def elapsed(seconds: float) -> str:
        whole, rest = divmod(round(seconds), HOUR if hours else 60)
        return f"{whole}:{rest // 60 if hours else rest:02}"

    with canvas.style(quantity.title):
        figure = Figure(figsize=(canvas.WIDTH, 2.6))
        figure.patch.set_visible(False)
        columns = math.ceil(len(lines) / LEGEND_LINES)
        # The same place in every plot: the time axes lie in line.
        axes = canvas.plain(figure.add_axes((LEFT, BOTTOM, WIDTH - LEGEND_WIDTH * columns, HEIGHT)))
        axes.grid(visible=False, axis="x")
        for number, (place, line) in enumerate(lines.items()):
            colour = canvas.COLOURS[number % len(canvas.COLOURS)]
            style = LINE_STYLES[number // len(canvas.COLOURS) % len(LINE_STYLES)]
            xs, ys = zip(*_dashed(line, length), strict=True) if line else ((), ())
            axes.plot(xs, ys, color=colour, solid_capstyle="round", label=wording.place(place),
                      linestyle=style, linewidth=1.1)  # fmt: skip
        axes.set_xlim(0, length)
        if quantity.bottom is not None:
            axes.set_ylim(quantity.bottom, max(*known, 1e-3) * 1.08)
        axes.set_ylabel(quantity.unit)
        at_ticks = range(0, int(length) + 1, next((tick for tick in TICKS if length / tick <= MOST_TICKS), 86400))
        axes.set_xticks(at_ticks, [elapsed(at) for at in at_ticks])
        since = Said(below, time=f"{datetime.fromtimestamp(start, timezone.utc):%H:%M:%S}")
        axes.set_xlabel(str(since))
        _mark(axes, stripes, length)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False, fontsize=8, ncols=columns,
                    columnspacing=0.8, handlelength=1.6)  # fmt: skip
        low, high = (wording.quantity(end(known), quantity.unit) for end in (min, max))
        what, over = say(quantity.title), elapsed(length)
        description = say(text, what=what, gpus=len(lines), time=over, low=low, high=high)
        return canvas.svg(figure, description, canvas.translated(since, *(name for name, _, _ in stripes)))


def _mark(axes: Any, stripes: Spans, length: float) -> None:
    """Every other stripe shaded, and above it the name of each as far as there is room; the longest come first."""
    for _, first, last in stripes[1::2]:
        axes.axvspan(first, last, color=canvas.INK, alpha=0.09, linewidth=0)
    longest = sorted(stripes, key=lambda stripe: stripe[1] - stripe[2])[: int(1 / LABEL_GAP)]
    named = [stripe for stripe in stripes if stripe in longest]
    wanted = [(first + last) / 2 / length for _, first, last in named]
    above = axes.get_xaxis_transform()
    leader = {"arrowstyle": "-", "color": canvas.INK, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 0}
    for (name, _, _), at, shown_at in zip(named, wanted, _apart(wanted), strict=True):
        axes.annotate(
            name, (at * length, 1.0), (shown_at * length, 1.09), xycoords=above, textcoords=above,
            rotation=40, rotation_mode="anchor", va="center", fontsize=8, parse_math=False,
            arrowprops=leader,
        )  # fmt: skip


def _apart(wanted: Sequence[float]) -> list[float]:
    """Positions near those that are wanted, at least LABEL_GAP apart and none beyond 1, in the same order."""
    positions = [*accumulate(wanted, lambda last, at: max(at, last + LABEL_GAP))]
    limit = 1.0
    for number in reversed(range(len(positions))):
        positions[number] = min(positions[number], limit)
        limit = positions[number] - LABEL_GAP
    return positions
