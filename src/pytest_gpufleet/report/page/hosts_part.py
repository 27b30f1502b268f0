"""The hosts of a fleet, or of a run on many nodes: all of them by groups of checks, those that are not fine, in what
they differ, and where each one's own report is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.place import on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import node_standings, wording
from pytest_gpufleet.report.banner import reasons
from pytest_gpufleet.report.fleet_hosts import SYMBOLS, HostRow, columns
from pytest_gpufleet.report.node_standings import as_fleet
from pytest_gpufleet.report.page.several_runs import Table, what
from pytest_gpufleet.report.reason_texts import why
from pytest_gpufleet.verdict.fleet.among_nodes import NodeRuns
from pytest_gpufleet.verdict.fleet.fleet_peers import SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet

ROWS_OF_A_MAP = 25  # then the next table begins beside it
MOST_FIGURES = 12  # of a host
MOST_PLACES = 4  # of a figure
MOST_NAMES = 12


@dataclass(frozen=True)
class HostDetail:
    """A host that somebody has to look at. `said`: lines of its own run; `beside`: what only shows beside the
    others, or between them."""

    row: HostRow
    why: str
    said: list[str]
    beside: list[str]
    differences: list[tuple[str, str, str]]
    figures: list[tuple[str, str, str, str]]
    more_figures: int


@dataclass(frozen=True)
class HostsPart:
    """What the templates hosts and side_by_side show. `anchors`: of the details, by host. `reports`: the addresses of
    the hosts' own reports, by folder, where there is one."""

    noun: str
    fleet: Fleet
    rows: Sequence[HostRow]
    columns: Sequence[str]
    maps: Sequence[Sequence[HostRow]]
    symbols: Mapping[str, str]
    anchors: Mapping[str, str]
    details: Sequence[HostDetail]
    tables: Sequence[Table]
    reports: Mapping[str, str]

    @property
    def nouns(self) -> str:
        return f"{self.noun}s"


def nodes_part(record: Record, runs: NodeRuns, reports: Mapping[str, str]) -> HostsPart | None:
    """Of a run on many nodes; None of one on its own machine. `runs`: the nodes' own."""
    if not record.of_cluster:
        return None
    fleet = as_fleet(record, runs)
    return hosts_part("node", fleet, node_standings.rows(record, fleet), reports)


def hosts_part(noun: str, fleet: Fleet, rows: Sequence[HostRow], reports: Mapping[str, str]) -> HostsPart:
    """`noun`: what a host is called."""
    return HostsPart(
        noun,
        fleet,
        rows,
        columns(rows),
        [rows[first : first + ROWS_OF_A_MAP] for first in range(0, len(rows), ROWS_OF_A_MAP)],
        SYMBOLS,
        {row.host: f"fleet-host-{number}" for number, row in enumerate(rows) if row.wrong},
        [_detail(row) for row in rows if row.wrong],
        [table for table in (_equality(fleet, noun), _odd(rows)) if table.rows],
        reports,
    )


def _detail(row: HostRow) -> HostDetail:
    record = row.run.record if row.run else None
    return HostDetail(
        row,
        why(record) if record else "",
        reasons(record, "which its own report lists") if record and record.verdict != "ACCEPTED" else [],
        [*(gap.what for gap in row.gaps if gap.kind != "incomplete"), *row.said],
        [
            (each.fact, next(value for value, hosts in each.others.items() if row.host in hosts), each.usual or "")
            for each in row.differences
        ],
        [_figure(each) for each in row.slow[:MOST_FIGURES]],
        max(0, len(row.slow) - MOST_FIGURES),
    )


def _figure(slow: SlowPlaces) -> tuple[str, str, str, str]:
    worse = [on_node(place, 0) for place in sorted(slow.worse, key=lambda place: -slow.worse[place])]
    where = f"all {len(worse)} places" if slow.everywhere else wording.places(worse, MOST_PLACES)
    measured = wording.span(slow.values.values(), slow.figure.metric.unit)
    allowed = " and ".join(map(str, slow.tolerances))
    return what(slow.figure), where, measured, f"{wording.percent(slow.worst)}; allowed: {allowed}"


def _equality(fleet: Fleet, noun: str) -> Table:
    rows = (
        (each.fact, each.usual or "", value, f"{len(hosts)}: {_names(hosts)}")
        for each in fleet.differences
        for value, hosts in each.others.items()
    )
    return Table(f"In what {noun}s differ", ("Fact", f"Most {noun}s", "Others", f"{noun.capitalize()}s"), tuple(rows))


def _names(hosts: tuple[str, ...]) -> str:
    more = f" and {len(hosts) - MOST_NAMES} more" if len(hosts) > MOST_NAMES else ""
    return ", ".join(hosts[:MOST_NAMES]) + more


def _odd(rows: Sequence[HostRow]) -> Table:
    """One row a host: the figure that stands out most."""
    worst = [(row, max(row.odd, key=lambda each: each.worse)) for row in rows if row.odd]
    cells = (
        (
            row.host,
            str(len(row.odd)),
            what(each.figure),
            wording.quantity(each.value, each.figure.metric.unit),
            wording.quantity(each.reference, each.figure.metric.unit),
            wording.percent(each.worse),
        )
        for row, each in sorted(worst, key=lambda found: -found[1].worse)
    )
    caption = "Hosts that stand out in what whole hosts reach: told, and not judged"
    return Table(caption, ("Host", "Figures", "The worst", "Measured", "Median of all hosts", "Worse by"), tuple(cells))
