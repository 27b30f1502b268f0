"""The plots of the report, as SVG to stand inside HTML.

matplotlib's objects are used without pyplot, which keeps global state. Text and axes take the colour of the
text around them (`currentColor`), so that one drawing serves on paper, in light and in dark; the lines have
mid-tones that stand out on both.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pytest_gpufleet.probes.reading import WORLD, Condition
from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict.finding import Finding

COLOURS = ("#2f7ed8", "#cc5c1d", "#1a935f", "#b0529c", "#8d7d0e", "#7b6be0", "#c8434f")
MARKERS = "os^DvPX"
# Stands for currentColor: matplotlib takes real colours only.
INK = "#123457"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gpufleet",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}

Conditions = Mapping[str, Condition]


def busbw_svg(findings: Sequence[Finding]) -> str | None:
    """Bus bandwidth in GB/s against message size, a line for each collective; None with fewer than two sizes.

    A limit is a short mark in the colour of the line that it belongs to.
    """
    points = [(finding, worst[1]) for finding in findings if (worst := _worst(finding, "busbw"))]
    points = [(finding, value) for finding, value in points if _nbytes(finding) > 0]
    if len({_nbytes(finding) for finding, _ in points}) < 2:
        return None
    everywhere, names = _names([finding.measurement.conditions for finding, _ in points], without="bytes")
    lines: dict[str, list[tuple[float, float, Finding]]] = {}
    for name, (finding, value) in zip(names, points, strict=True):
        lines.setdefault(name, []).append((_nbytes(finding), value, finding))
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=3.6)
        axes.set_xscale("log", base=2)
        limits = 0
        for index, (name, line) in enumerate(lines.items()):
            line.sort(key=lambda point: point[0])
            colour = COLOURS[index % len(COLOURS)]
            xs, ys = [point[0] for point in line], [point[1] for point in line]
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=4.5, linewidth=1.6, label=name)
            for nbytes, _, finding in line:
                if finding.limit:
                    reach = max(1.2, 1.7 - 0.08 * index)  # of two equal limits, the ends of the lower one show
                    ends = [nbytes / reach, nbytes * reach]
                    axes.plot(ends, [finding.limit.value] * 2, color=colour, linewidth=3, alpha=0.75)
                    limits += 1
        sizes = sorted({point[0] for line in lines.values() for point in line})
        every = math.ceil(len(sizes) / 8)
        ticks = sizes[::-1][::every]  # from the largest, which is the one that is judged
        axes.set_xticks(ticks, [wording.size(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("message size")
        axes.set_ylabel("bus bandwidth, GB/s")
        handles = list(axes.get_legend_handles_labels()[0])
        if limits:
            handles.append(Line2D([], [], color=INK, linewidth=3, alpha=0.75, label="limit (its line's colour)"))
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
        return _svg(figure, f"Bus bandwidth against message size: {'; '.join(lines)}. {everywhere}")


def training_svg(findings: Sequence[Finding]) -> str | None:
    """Training throughput in images/s, bars for each recipe: one rank and all; None without a figure.

    Without a run on one rank, it is the slowest of those that trained alone. A limit is a mark on its bar.
    """
    # A later metric replaces an earlier one for the same recipe and number of ranks.
    drawn = [
        (finding, worst[1])
        for metric in ("solo_train_throughput", "train_throughput")
        for finding in findings
        if (worst := _worst(finding, metric))
    ]
    if not drawn:
        return None
    everywhere, names = _names([finding.measurement.conditions for finding, _ in drawn], without="ranks")
    bars = {
        (name, finding.measurement.conditions.get("ranks", 0)): (finding, value)
        for name, (finding, value) in zip(names, drawn, strict=True)
    }
    recipes = list(dict.fromkeys(name for name, _ in bars))
    counts = sorted({ranks for _, ranks in bars}, key=str)
    labels = [textwrap.fill(recipe or everywhere or "training", 26) for recipe in recipes]
    height = 0.8 / len(counts)
    colours = {ranks: COLOURS[(1 - index) % len(COLOURS)] for index, ranks in enumerate(counts)}
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=0.9 + 0.75 * len(recipes))
        limits = 0
        for (name, ranks), (finding, value) in bars.items():
            y = recipes.index(name) + height * (counts.index(ranks) - (len(counts) - 1) / 2)
            axes.barh(y, value, height=0.9 * height, color=colours[ranks])
            at = max(value, finding.limit.value if finding.limit else 0)
            axes.annotate(wording.number(value), (at, y), (5, 0), textcoords="offset points", va="center")
            if finding.limit:
                ends = [y - height / 2, y + height / 2]
                axes.plot([finding.limit.value] * 2, ends, color=INK, linewidth=2)
                limits += 1
        axes.set_yticks(range(len(recipes)), labels)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: wording.number(value))
        axes.set_xlabel("images/s")
        handles = [
            Line2D([], [], color=colours[ranks], linewidth=7, label=wording.words({"ranks": ranks})[0])
            for ranks in counts
        ]
        if limits:
            handles.append(Line2D([], [], color=INK, marker="|", markersize=12, linestyle="", label="limit"))
        figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False)
        return _svg(figure, f"Training throughput in images a second: {'; '.join(labels)}. {everywhere}")


def _worst(finding: Finding, metric: str) -> tuple[str, float] | None:
    """The figure to draw: of the whole world where there is one, else of the worst place."""
    if finding.measurement.metric != metric:
        return None
    values = finding.measurement.values
    worst = (WORLD, values[WORLD]) if WORLD in values else wording.worst(finding)
    return worst if worst and math.isfinite(worst[1]) else None


def _nbytes(finding: Finding) -> float:
    nbytes = finding.measurement.conditions.get("bytes", 0)
    return float(nbytes) if isinstance(nbytes, int | float) else 0


def _names(every: Sequence[Conditions], without: str) -> tuple[str, list[str]]:
    """What all have in common, in words; and for each what tells it apart, at least collective or recipe."""
    keys = {key for conditions in every for key in conditions} - {without}
    shared = {key for key in keys if len({conditions.get(key) for conditions in every}) == 1}
    shared -= {"collective", "recipe"}
    names = [
        ", ".join(wording.words({key: value for key, value in conditions.items() if key in keys - shared}))
        for conditions in every
    ]
    return ", ".join(wording.words({key: every[0][key] for key in shared if key in every[0]})), names


def _axes(height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8.2, height), layout="constrained")
    axes = figure.add_subplot()
    for background in (figure.patch, axes.patch):
        background.set_visible(False)  # the page shows through, be it light or dark
    axes.yaxis.labelpad = 8  # the reader's font may be wider than the one that was measured here
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, description: str) -> str:
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the date would make every file differ
    canvas: Any = FigureCanvasSVG(figure)  # some versions of matplotlib come without its types
    canvas.print_svg(file, metadata=nothing)
    _, tag, body = file.getvalue().partition("<svg ")
    # Two drawings on one page must not share ids; none of matplotlib's names is referred to, its hashes are.
    body = re.sub(r' id="[\w.]+_\d+"', "", body).replace(INK, "currentColor")
    return f'{tag}role="img" aria-label="{escape(wording.clean(description))}" {body}'
