"""What the GPUs did during the run: a panel a quantity, a line a GPU, groups of checks as stripes behind."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

from pytest_gpufleet.model.language import Said, say
from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.gpu_grid import group_title
from pytest_gpufleet.report.plots import canvas

CAPTION = "What the GPUs did during the run"
LONGEST_LINE = 600  # points
MISSING = 3  # times the usual time between two samples: after that one is missing
DASH = 0.004  # of the axis: a line begins so much early, so that a value that stands alone is seen
LINE_STYLES = ("-", "--", ":", "-.")  # where there are more GPUs than colours
# Seconds between two ticks of the time axis, the finest that gives few enough of them.
TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
MOST_TICKS = 9
HOUR = 3600
# Below the time axis: of a run of minutes, and of one of two hours and more.
MINUTES, HOURS = "minutes:seconds since {time} UTC", "hours:minutes since {time} UTC"
LABEL_GAP = 0.035  # between the names of two groups, of the axis' width
LONGEST_LABEL, LAST_LABEL = 16, 0.94  # characters; of the axis' width
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


def drawn(samples: Sequence[Sample], places: Sequence[Place], checks: Spans) -> str:
    """An SVG of every quantity that any GPU gave, over the whole run; "" with fewer than two samples, which are in the
    order in which they were taken, and of each the GPUs in that of `places`."""
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
    every = (
        (each, {place: _line(samples, at, each, length) for at, place in enumerate(places)}) for each in QUANTITIES
    )
    shown = {each: lines for each, lines in every if any(lines.values())}
    return _svg(shown, stripes, start, length) if shown else ""


def _line(samples: Sequence[Sample], index: int, quantity: Quantity, length: float) -> Points:
    """(seconds since the first sample, value) where there is a value; NaN, at which the line breaks, where a sample has
    none or is missing."""
    first, last = samples[0].time, -1
    longest_step = MISSING * median(after.time - before.time for before, after in pairwise(samples))
    points: Points = []
    for number, sample in enumerate(samples):
        gpu = sample.gpus[index] if index < len(sample.gpus) else {}
        if (value := canvas.drawable(gpu.get(quantity.reading))) is not None:
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

    at_ticks = range(0, int(length) + 1, next((tick for tick in TICKS if length / tick <= MOST_TICKS), 86400))
    since = Said(HOURS if hours else MINUTES, time=f"{datetime.fromtimestamp(start, timezone.utc):%H:%M:%S}")
    said = canvas.translated(since, *(name for name, _, _ in stripes))
    above = LABELS_HEIGHT + LEGEND_LINE * (max(map(len, shown.values())) // canvas.LEGEND_COLUMNS)
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(shown), 1, PANEL_HEIGHT, legend=True, above=above)
        for panel, (quantity, lines) in zip(axes, shown.items(), strict=True):
            for number, (place, line) in enumerate(lines.items()):
                style = LINE_STYLES[number // len(canvas.COLOURS) % len(LINE_STYLES)]
                panel.plot(
                    *(zip(*line, strict=True) if line else ((), ())), label=wording.place(place), linestyle=style,
                    linewidth=1.1, color=canvas.COLOURS[number % len(canvas.COLOURS)],
                )  # fmt: skip
            known = [value for line in lines.values() for _, value in line if not math.isnan(value)]
            panel.set_xlim(0, length)
            if quantity.bottom is not None:
                panel.set_ylim(quantity.bottom, max(*known, 1e-3) * 1.08)
            panel.set_xticks(at_ticks, [elapsed(at) for at in at_ticks])
            panel.grid(visible=False, axis="x")
            for _, first, last in stripes[1::2]:
                panel.axvspan(first, last, color=canvas.INK, alpha=0.09, linewidth=0)
            name = f"{quantity.title}, {quantity.unit}"
            said[name] = f"{say(quantity.title)}{say(', ')}{quantity.unit}"
            canvas.title(panel, name)
            texts.append(f"{say(quantity.title)} {wording.span(known, quantity.unit)}")
        _name(axes[0], stripes, length)
        axes[-1].set_xlabel(str(since))
        canvas.legend(figure, axes[0].lines)
        return canvas.svg(figure, f"{say(CAPTION)}{say(': ')}{say('; ').join(texts)}", said)


def _name(axes: Any, stripes: Spans, length: float) -> None:
    """Above the stripes the name of each as far as there is room; the longest come first."""
    longest = sorted(stripes, key=lambda stripe: stripe[1] - stripe[2])[: int(1 / LABEL_GAP)]
    named = [stripe for stripe in stripes if stripe in longest]
    wanted = [(first + last) / 2 / length for _, first, last in named]
    # Near those that are wanted, at least LABEL_GAP apart and none where its end would be cut off, in the same order.
    positions, limit = [*accumulate(wanted, lambda last, at: max(at, last + LABEL_GAP))], LAST_LABEL
    for number in reversed(range(len(positions))):
        positions[number] = min(positions[number], limit)
        limit = positions[number] - LABEL_GAP
    above = axes.get_xaxis_transform()
    leader = {"arrowstyle": "-", "color": canvas.INK, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 0}
    for (name, _, _), at, shown_at in zip(named, wanted, positions, strict=True):
        axes.annotate(
            name, (at * length, 1.22), (shown_at * length, 1.4), xycoords=above, textcoords=above,
            rotation=40, rotation_mode="anchor", va="center", fontsize=8, parse_math=False,
            arrowprops=leader,
        )  # fmt: skip
