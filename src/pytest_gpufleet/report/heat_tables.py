"""Figures of many places as tables whose cells are coloured by them: of pairs, and of what each node of several has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import Pair, Place, Where
from pytest_gpufleet.report import wording

MOST_PLACES = 24  # that are told pair by pair, even if most pairs were not measured
ROWS = 25  # of one table: then the next begins beside it
NOTHING: Mapping[Any, str] = {}
Row = TypeVar("Row")
Column = TypeVar("Column")


@dataclass(frozen=True)
class HeatCell:
    """`heat` is the figure as a share of the largest one, in per cent; None where none is. `told`: with whom."""

    text: str
    heat: int | None
    missed: bool
    told: str = ""


@dataclass(frozen=True)
class HeatTable:
    """`corner`: what stands over the names of the rows."""

    title: str
    conditions: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell, ...]], ...]
    lowest: str
    highest: str


def heat_tables(findings: Sequence[Finding], hosts: wording.Hosts = wording.ALONE) -> list[HeatTable]:
    """Of each finding with figures of pairs: from the place of the row to that of the column, or, where few of many
    pairs were measured, the pairs of each place; and of each with figures of what several nodes have: a row a node."""
    tables = []
    for finding in (each for each in findings if each.measurement.values):
        if _is_by_node(finding):
            tables += _by_node(finding, hosts)
        elif all(isinstance(place, Pair) for place in finding.measurement.values):
            tables += _pairs(finding, hosts)
    return tables


def spans_nodes(finding: Finding) -> bool:
    """Whether several nodes have figures of their own in it."""
    nodes = {part.node for place in finding.measurement.values for part in place.parts if part.is_on_node}
    return len(nodes) > 1


def _is_by_node(finding: Finding) -> bool:
    """Whether every figure is of one device of a node, or of the same device of two."""
    one_device = all(
        len({(part.kind, part.index) for part in place.parts}) == 1 and all(part.is_on_node for part in place.parts)
        for place in finding.measurement.values
    )
    devices = any(part.is_device for place in finding.measurement.values for part in place.parts)
    return one_device and devices and spans_nodes(finding)


def _by_node(finding: Finding, hosts: wording.Hosts) -> list[HeatTable]:
    at: dict[tuple[tuple[Place, ...], Place], Where] = {}
    for where in sorted(finding.measurement.values):
        first = where.parts[0]
        at[tuple(Place(part.node, "node") for part in where.parts), Place(0, first.kind, first.index)] = where
    rows = {nodes: say(" to ").join(wording.place(node, hosts) for node in nodes) for nodes, _ in at}
    columns = {device: wording.place(device) for _, device in sorted(at)}
    return _tables(finding, "Node", rows, columns, at)


def _pairs(finding: Finding, hosts: wording.Hosts) -> list[HeatTable]:
    given = {(place.parts[0], place.parts[1]): place for place in finding.measurement.values}
    if not any(pair[::-1] in given for pair in given):  # each pair was measured once, for both directions
        given |= {(to, place): where for (place, to), where in given.items()}
    names = {place: wording.place(place, hosts) for place in sorted({place for pair in given for place in pair})}
    if len(names) <= MOST_PLACES or 2 * len(given) > len(names) ** 2:
        return _tables(finding, "From, to", names, names, given)
    return _few_pairs(finding, names, given)


def _few_pairs(
    finding: Finding, names: Mapping[Place, str], given: Mapping[tuple[Place, Place], Where]
) -> list[HeatTable]:
    """The pairs of each place, the lowest first."""
    values = finding.measurement.values
    # NaN is worse than any figure.
    ranks = {pair: -math.inf if math.isnan(values[where]) else values[where] for pair, where in given.items()}
    partners = grouped(sorted(given, key=lambda pair: ranks[pair]))
    most = max(map(len, partners.values()))
    columns = {number: say("lowest") if number == 0 else f"{number + 1}." for number in range(most)}
    pairs = {(place, number): other for place, others in partners.items() for number, other in enumerate(others)}
    at = {(place, number): given[place, other] for (place, number), other in pairs.items()}
    told = {cell: say("with {place}", place=names[other]) for cell, other in pairs.items()}
    return _tables(finding, "With others", names, columns, at, told)


def _tables(
    finding: Finding,
    corner: str,
    rows: Mapping[Row, str],
    columns: Mapping[Column, str],
    at: Mapping[tuple[Row, Column], Where],
    told: Mapping[tuple[Row, Column], str] = NOTHING,
) -> list[HeatTable]:
    """`at`: where the figure of a cell was measured, if one was. `told`: what is said beside it."""
    metric, values = wording.metric(finding), finding.measurement.values
    bad = {*finding.missed, *(finding.slower_than_peers or ())}
    numbers = [value for value in values.values() if not math.isnan(value)]
    largest = max((value for value in numbers if math.isfinite(value)), default=0.0)

    def cell(row: Row, column: Column) -> HeatCell:
        where = at.get((row, column))
        if where is None:
            return HeatCell("", None, False)
        value = values[where]
        share = value / largest if largest > 0 and value > 0 else 0.0  # NaN is not above 0
        return HeatCell(wording.number(value), round(100 * min(share, 1.0)), where in bad, told.get((row, column), ""))

    made = [(name, tuple(cell(row, column) for column in columns)) for row, name in rows.items()]
    return [
        HeatTable(
            f"{wording.capitalised(say(metric.title))}{say(', ')}{metric.unit}",
            say(", ").join(wording.conditions(finding)),
            corner,
            tuple(columns.values()),
            tuple(made[first : first + ROWS]),
            wording.number(min(numbers, default=math.nan)),
            wording.number(max(numbers, default=math.nan)),
        )
        for first in range(0, len(made), ROWS)
    ]
