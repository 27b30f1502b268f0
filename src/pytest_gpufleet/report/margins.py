"""How near a run came to its limits: for each group of checks the smallest margin, and every required measurement."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from pytest_gpufleet.model.finding import Finding, distinct, that_count
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.gpu_grid import group_title
from pytest_gpufleet.report.tables import Cell, Row, Table
from pytest_gpufleet.verdict import basis

FULL_BAR = 0.25  # of a limit: far from it is far from it


class Margin(NamedTuple):
    """Of the measurements of a group that were held against a limit: how many are within it, and the one that came
    nearest to it, or is furthest beyond it, with the record that it is from."""

    group: str
    within: int
    judged: int
    nearest: Finding
    record: Record


def margins(*records: Record) -> list[Margin]:
    """Of each group of which something was judged, in the order of the suite; on many nodes of all of them together."""
    judged = ((each, record) for record in records for each in distinct(record.findings) if basis.judged_by(each))
    found = []
    for group, of_group in _by_group(judged).items():
        nearest, record = min(of_group, key=lambda each: wording.margin(each[0]))
        within = sum(each.state == "met" for each, _ in of_group)
        found.append(Margin(group, within, len(of_group), nearest, record))
    return found


def _by_group(findings: Iterable[tuple[Finding, Record]]) -> dict[str, list[tuple[Finding, Record]]]:
    order = {title: number for number, title in enumerate(shipped().chapters)}
    found = grouped((group_title(each.check), (each, record)) for each, record in findings)
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def group_table(*records: Record) -> Table:
    """A row for each group, which has in `details` how people call what came nearest to its limit."""
    rows = []
    for each in margins(*records):
        value, limit, margin, where = texts(each.nearest, each.record.hosts)
        host = each.record.run.host if len(records) > 1 and not each.record.of_cluster else ""
        share = max(-FULL_BAR, min(1.0, wording.margin(each.nearest) / FULL_BAR))  # beyond it there is less room
        state = "missed" if each.within < each.judged else ""
        cells = (
            Cell(say("{met} of {count}", met=each.within, count=each.judged), state),
            Cell(margin, each.nearest.state, bar=share),
            *map(Cell, (value, limit, named(each.nearest), " ".join(filter(None, (host, where))))),
        )
        leads = {key: of for key, of in each.nearest.measurement.conditions.items() if key in SHORT}
        rows.append(Row(say(each.group), cells, say(", ").join([wording.title(each.nearest), *wording.words(leads)])))
    columns = ("Within limits", "Smallest margin", "Measured", "Limit", "What", "Where")
    note = say("the bar begins at the limit and is full at {share} or more", share=wording.percent(FULL_BAR))
    return Table("Margin to the limits, by group", "Group", columns, tuple(rows), (note,))


SHORT = (*wording.LEADING, "bytes")  # conditions by which people call a measurement


def narrow(table: Table) -> Table:
    """`group_table` for a terminal."""
    rows = []
    for row in table.rows:
        within, margin, value, limit, _, where = (cell.text for cell in row.cells)
        rows.append(
            Row(
                row.name,
                (*map(Cell, (within, margin, f"{row.details}{say(': ')}{value} ({limit}){say(', ')}{where}")),),
            )
        )
    return Table("", "Group", ("In limits", "Margin", "Nearest to its limit"), tuple(rows))


def required_tables(record: Record) -> list[Table]:
    """A table for each group and metric, with every measurement that the verdict requires."""
    tables = []
    required = ((each, record) for each in that_count(distinct(record.findings)) if each.required)
    for group, found in _by_group(required).items():
        for findings in grouped((each.measurement.metric, each) for each, _ in found).values():
            shared, names = wording.shared_and_own(findings)
            title = say(", ").join(filter(None, (wording.title(findings[0]), shared)))
            rows = []
            for name, each in zip(names, findings, strict=True):
                value, limit, margin, where = texts(each, record.hosts)
                rows.append(Row(name, (*map(Cell, (value, limit or say(each.state), margin, where)),)))
            columns = ("Value", "Limit", "Margin", "Where")
            tables.append(Table(f"{say(group)}{say(': ')}{title}", "Conditions", columns, tuple(rows)))
    return tables


def texts(finding: Finding, hosts: wording.Hosts = wording.ALONE) -> tuple[str, str, str, str]:
    """The value that is nearest to the limit, the limit without its unit, the margin ("+2.1 %") and the place; "" for
    what there is not."""
    nearest, limit = wording.worst(finding), finding.limit
    if nearest is None:
        return "", "", "", ""
    place = wording.place(nearest[0], hosts)
    if limit is None:
        return wording.quantity(nearest[1], finding.measurement.unit), "", "", place
    share = wording.margin(finding)
    margin = f"{'+' if share >= 0 else ''}{wording.percent(share, 2)}" if math.isfinite(share) else ""
    value, line = wording.value_and_limit(nearest[1], limit)
    return value, line.removesuffix(value.rpartition(" ")[2]).strip(), margin, place


def named(finding: Finding) -> str:
    return say(", ").join([wording.title(finding), *wording.conditions(finding)])
