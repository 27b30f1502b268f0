"""Who gives data to whom in each collective."""

import math
from collections.abc import Sequence
from typing import Any

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import say
from pytest_gpufleet.report.plots import canvas

RANKS = 4
COLUMNS = 3
HEIGHT = 1.25
CAPTION = "Who gives data to whom in each collective: what the operation asks for, not the way that NCCL takes"
RADIUS, RIM = 1.0, 11  # of the ring, in its units; of a rank, in points
EVERY = {(a, b) for a in range(RANKS) for b in range(RANKS) if a != b}
FROM_FIRST = {(0, rank) for rank in range(1, RANKS)}
TO_FIRST = {(rank, 0) for rank in range(1, RANKS)}
AROUND = {(rank, (rank + 1) % RANKS) for rank in range(RANKS)}
# Of each collective the arrows, and what goes along each.
PICTURES: dict[str, tuple[set[tuple[int, int]], str]] = {
    "all_reduce": (EVERY, "all data: each ends with the sum"),
    "all_gather": (EVERY, "own part: each ends with all parts"),
    "reduce_scatter": (EVERY, "a part: each ends with its sum"),
    "all_to_all": (EVERY, "another part to each"),
    "broadcast": (FROM_FIRST, "the same data to each"),
    "scatter": (FROM_FIRST, "another part to each"),
    "reduce": (TO_FIRST, "all data: rank 0 ends with the sum"),
    "gather": (TO_FIRST, "own part: rank 0 ends with all"),
    "sendrecv": (AROUND, "own data to the next"),
}


def collective_pictures(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) with a panel for each collective that was measured."""
    bandwidths = [finding.measurement for finding in findings if finding.measurement.metric == "busbw"]
    measured = {one.conditions.get("collective") for one in bandwidths if "nodes" not in one.conditions}
    shown = {name: picture for name, picture in PICTURES.items() if name in measured}
    if not shown:
        return []
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(shown), COLUMNS, HEIGHT, legend=False)
        for each, (name, (arrows, meaning)) in zip(axes, shown.items(), strict=True):
            _panel(each, arrows)
            canvas.title(each, name)
            each.annotate(meaning, (0, -1.75), ha="center", fontsize=8)
        said = canvas.translated(*(meaning for _, meaning in shown.values()))
        texts = "; ".join(f"{name}: {said[meaning]}" for name, (_, meaning) in shown.items())
        return [(CAPTION, canvas.svg(figure, f"{say(CAPTION)}. {texts}", said))]


def _panel(axes: Any, arrows: set[tuple[int, int]]) -> None:
    places = [_place(rank) for rank in range(RANKS)]
    for giver, taker in sorted(arrows):
        both = (taker, giver) in arrows
        line = {"arrowstyle": "<|-|>" if both else "-|>", "color": canvas.COLOURS[0], "shrinkA": RIM, "shrinkB": RIM}
        if not both or giver < taker:
            axes.annotate("", places[taker], places[giver], arrowprops=line)
    circle = {"boxstyle": "circle,pad=0.35", "facecolor": "none", "edgecolor": canvas.INK}
    for rank, place in enumerate(places):
        axes.annotate(str(rank), place, ha="center", va="center", fontsize=9, fontweight="bold", bbox=circle)
    axes.set_xlim(-2.4, 2.4)
    axes.set_ylim(-1.9, 1.35)
    axes.set_axis_off()


def _place(rank: int) -> tuple[float, float]:
    """Rank 0 above, the others clockwise."""
    angle = 2 * math.pi * rank / RANKS
    return 1.6 * RADIUS * math.sin(angle), RADIUS * math.cos(angle)
