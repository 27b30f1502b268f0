"""One bar a GPU, beside the limit and its peers."""

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any
from unicodedata import east_asian_width

from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import in_language, say
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.figures import for_information, per_gpu
from pytest_gpufleet.report.plots import canvas

COLUMNS = 3
BAR = 0.155  # inches
MOST = 12
LONGEST_LINE, MOST_LINES = 34, 2  # of a title
MEASURED: Any = {"facecolor": to_rgba(canvas.COLOURS[0], 0.8), "linewidth": 0}
# Hatched, for paper without colour.
MISSED: Any = {"facecolor": "#e8938a", "edgecolor": canvas.BAD, "hatch": "//////", "linewidth": 0.8}
LEGEND = ("measured", "missed", "median")


def bars(findings: Sequence[Finding], hosts: wording.Hosts = wording.ALONE) -> list[tuple[str, str]]:
    """(caption, SVG) for each metric of which every GPU has a figure of its own: a panel for each of its conditions.

    Metrics of which nothing has to have a limit are left to the tables.
    """
    drawn = []
    some = [finding for finding in findings if per_gpu(finding)]
    for metric in dict.fromkeys(finding.measurement.metric for finding in some):
        of_metric = [finding for finding in some if finding.measurement.metric == metric]
        # What was judged comes first if there is more than anybody wants to look at.
        of_metric.sort(key=for_information)
        if not for_information(of_metric[0]):
            drawn.append(_plot(of_metric[:MOST], hosts))
    return drawn


def _plot(findings: Sequence[Finding], hosts: wording.Hosts) -> tuple[str, str]:
    metric = wording.metric(findings[0])
    called = wording.capitalised(say(metric.title))
    caption = called if "GPU" in metric.title else say("{metric}, by GPU", metric=called)
    scale, unit = (100, "%") if metric.unit == "ratio" else (1, metric.unit)
    places = sorted({place for finding in findings for place in finding.measurement.values})
    with in_language("en"):  # what matplotlib lays out
        _, names = wording.shared_and_own(findings)
        labels = {place: wording.place(place, hosts) for place in places}
    shared, translated = wording.shared_and_own(findings)
    with canvas.style(f"{metric.name} by GPU"):
        height = 0.1 + BAR * len(places)
        most = LONGEST_LINE if len(findings) >= COLUMNS else LONGEST_LINE * COLUMNS // 2
        titles, texts = ([_lines(name, most) for name in each] for each in (names, translated))
        figure, axes = canvas.panels(len(findings), COLUMNS, height, legend=True, lines=max(map(len, titles)))
        for number, (each, finding, title) in enumerate(zip(axes, findings, titles, strict=True)):
            _panel(each, finding, labels, scale)
            canvas.title(each, "\n".join(title))
            if number % COLUMNS:
                each.tick_params(axis="y", labelleft=False)
            if number + COLUMNS >= len(findings):
                canvas.labels(each, x=unit)
        canvas.legend(figure, _legend(findings))
        said = canvas.translated(*LEGEND)
        for drawn, lines in zip(titles, texts, strict=True):
            last = len(drawn) - 1  # for which there is room
            said["\n".join(drawn)] = "\n".join([*lines[:last], " ".join(lines[last:])])
        return caption, canvas.svg(figure, f"{caption}: {'; '.join(filter(None, translated))}. {shared}", said)


def _lines(title: str, most: int) -> list[str]:
    """A title in lines of so many letters, of which those of Chinese take the room of two."""
    wide = "".join(f"{letter}\0" if east_asian_width(letter) in ("F", "W") else letter for letter in title)
    lines = textwrap.wrap(wide, most, max_lines=MOST_LINES, placeholder="...")
    return [line.replace("\0", "") for line in lines]


def _panel(axes: Any, finding: Finding, labels: Mapping[Where, str], scale: float) -> None:
    given = finding.measurement.values
    values = {place: value * scale for place, value in given.items() if canvas.drawable(value) is not None}
    bad = {*finding.missed, *(finding.slower_than_peers or ())}
    bound = canvas.limit_value(finding.limit)
    limit = bound * scale if bound is not None else None
    top = max([*values.values(), limit or 0.0, 1e-9])
    for row, place in enumerate(labels):
        value = values.get(place)
        if value is not None:
            axes.barh(row, value, height=0.72, **(MISSED if place in bad else MEASURED))
        text = wording.number(given[place] * scale) if place in given else "-"
        weight = "bold" if place in bad else "normal"
        axes.annotate(text, (top * 1.03, row), va="center", fontsize=7.5, fontweight=weight)
    if len(values) > 1:
        axes.axvline(median(values.values()), color=canvas.INK, linewidth=0.9, linestyle=":")
    if limit is not None:
        axes.axvline(limit, color=canvas.INK, linewidth=1.6)
    canvas.lying_bars(axes, [*labels.values()], top * 1.24, 7.5)


def _legend(findings: Sequence[Finding]) -> list[Any]:
    handles: list[Any] = [Patch(**MEASURED, label="measured")]
    if any(finding.state == "missed" for finding in findings):
        handles.append(Patch(**MISSED, label="missed"))
    handles.append(Line2D([], [], color=canvas.INK, linewidth=0.9, linestyle=":", label="median"))
    if any(finding.limit for finding in findings):
        handles.append(Line2D([], [], color=canvas.INK, linewidth=1.6, label=canvas.LIMIT))
    return handles
