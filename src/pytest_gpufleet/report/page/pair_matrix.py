"""What was measured between pairs of GPUs, as a matrix whose cells are coloured by their figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.report import wording


@dataclass(frozen=True)
class PairCell:
    """`heat` is the figure as a share of the largest one, in per cent; None on the diagonal and where none is."""

    text: str
    heat: int | None
    missed: bool


@dataclass(frozen=True)
class PairMatrix:
    title: str
    conditions: str
    places: tuple[str, ...]
    rows: tuple[tuple[str, tuple[PairCell, ...]], ...]
    lowest: str
    highest: str


def pair_matrices(findings: Sequence[Finding], hosts: wording.Hosts = wording.ALONE) -> list[PairMatrix]:
    """A matrix for each finding that has figures of pairs: from the GPU of the row to the GPU of the column."""
    return [_matrix(finding, hosts) for finding in findings if finding.measurement.values and _is_pairs(finding)]


def _is_pairs(finding: Finding) -> bool:
    return all(isinstance(place, Pair) for place in finding.measurement.values)


def _matrix(finding: Finding, hosts: wording.Hosts) -> PairMatrix:
    metric, given = wording.metric(finding), finding.measurement.values
    values = {place.parts: value for place, value in given.items()}
    bad = {place.parts for place in (*finding.missed, *(finding.slower_than_peers or ()))}
    if not any(pair[::-1] in values for pair in values):  # each pair was measured once, for both directions
        bad |= {pair[::-1] for pair in bad}
        values |= {pair[::-1]: value for pair, value in values.items()}
    places = sorted({place for pair in values for place in pair})
    numbers = [value for value in values.values() if not math.isnan(value)]
    largest = max((value for value in numbers if math.isfinite(value)), default=0.0)

    def cell(pair: tuple[Place, ...]) -> PairCell:
        if pair not in values:
            return PairCell("", None, False)
        value = values[pair]
        share = value / largest if largest > 0 and value > 0 else 0.0  # NaN is not above 0
        return PairCell(wording.number(value), round(100 * min(share, 1.0)), pair in bad)

    names = {place: wording.place(place, hosts) for place in places}
    title = f"{wording.capitalised(metric.title)}, {metric.unit}"
    return PairMatrix(
        title,
        ", ".join(wording.conditions(finding)),
        tuple(names.values()),
        tuple((names[row], tuple(cell((row, column)) for column in places)) for row in places),
        wording.number(min(numbers, default=math.nan)),
        wording.number(max(numbers, default=math.nan)),
    )
