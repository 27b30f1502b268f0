"""Who gives data to whom in each collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.report.plots import canvas

RANKS = 4
COLUMNS = 3
HEIGHT = 1.25
CAPTION = "Who gives data to whom in each collective: what the operation asks for, not the way that NCCL takes"
RADIUS, NODE = 1.0, 0.26
Arrows = Iterable[tuple[int, int]]


def _every(ranks: int) -> Arrows:
    return ((a, b) for a in range(ranks) for b in range(ranks) if a != b)


def _from_first(ranks: int) -> Arrows:
    return ((0, rank) for rank in range(1, ranks))


def _to_first(ranks: int) -> Arrows:
    return ((rank, 0) for rank in range(1, ranks))


def _around(ranks: int) -> Arrows:
    return ((rank, (rank + 1) % ranks) for rank in range(ranks))


def _to_parents_and_back(ranks: int) -> Arrows:
    return (way for rank in range(1, ranks) for way in ((rank, (rank - 1) // 2), ((rank - 1) // 2, rank)))


# Of each collective the arrows, what goes along each, and what is there in the end.
PICTURES: dict[str, tuple[Callable[[int], Arrows], str]] = {
    "all_reduce": (_every, "all data: each ends with the sum"),
    "all_gather": (_every, "own part: each ends with all parts"),
    "reduce_scatter": (_every, "a part: each ends with its sum"),
    "all_to_all": (_every, "another part to each"),
    "broadcast": (_from_first, "the same data to each"),
    "scatter": (_from_first, "another part to each"),
    "reduce": (_to_first, "all data: rank 0 ends with the sum"),
    "gather": (_to_first, "own part: rank 0 ends with all"),
    "sendrecv": (_around, "own data to the next"),
}
# Two ways that are published for the same all_reduce; which one NCCL takes, it chooses by size and machine.
WAYS: dict[str, tuple[Callable[[int], Arrows], str]] = {
    "all_reduce as a ring": (_around, "pieces go around twice"),
    "all_reduce as a tree": (_to_parents_and_back, "sums go up, and back down"),
}


def collective_pictures(findings: Sequence[Finding], say: Say = english) -> list[tuple[str, str]]:
    """(caption, SVG) with a panel for each collective that was measured, and for ring and tree beside all_reduce."""
    bandwidths = [finding.measurement for finding in findings if finding.measurement.metric == "busbw"]
    measured = {one.conditions.get("collective") for one in bandwidths if "nodes" not in one.conditions}
    shown = {name: picture for name, picture in PICTURES.items() if name in measured}
    if not shown:
        return []
    if "all_reduce" in shown:
        shown |= WAYS
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(shown), COLUMNS, HEIGHT, legend=False)
        for each, (name, (arrows, told)) in zip(axes, shown.items(), strict=True):
            _panel(each, [*arrows(RANKS)])
            canvas.title(each, name)
            each.annotate(told, (0, -1.75), ha="center", fontsize=8)
        said = canvas.in_language(say, *WAYS, *(told for _, told in shown.values()))
        texts = "; ".join(f"{say(name)}: {said[told]}" for name, (_, told) in shown.items())
        return [(CAPTION, canvas.svg(figure, f"{say(CAPTION)}. {texts}", said))]


def _panel(axes: Any, arrows: Sequence[tuple[int, int]]) -> None:
    places = [_place(rank) for rank in range(RANKS)]
    for giver, taker in arrows:
        both = (taker, giver) in arrows
        line = {"arrowstyle": "<|-|>" if both else "-|>", "color": canvas.COLOURS[0], "shrinkA": 0, "shrinkB": 0}
        if not both or giver < taker:
            ends = _towards(places[taker], places[giver]), _towards(places[giver], places[taker])
            axes.annotate("", *ends, arrowprops=line)
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


def _towards(here: tuple[float, float], there: tuple[float, float]) -> tuple[float, float]:
    """The point at the rim of the node here that looks there."""
    x, y = there[0] - here[0], there[1] - here[1]
    length = math.hypot(x, y)
    return here[0] + NODE * 1.2 * x / length, here[1] + NODE * 1.2 * y / length
