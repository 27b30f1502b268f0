"""The hosts of a fleet, or of a run on many nodes: all of them by groups of checks, those that are not fine, in what
they differ, and where each one's own report is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.language import say, some
from pytest_gpufleet.model.place import on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import gpu_grid, hosts, wording
from pytest_gpufleet.report.banner import STAMPS, reasons, why
from pytest_gpufleet.report.hosts import HostRow, as_fleet, columns, counts, host_rows
from pytest_gpufleet.report.page.rendering import render
from pytest_gpufleet.report.page.several_runs import Table, what
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_peers import SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.fleet.host_runs import NodeRuns

ROWS_OF_A_MAP = 25  # then the next table begins beside it
MOST_FIGURES = 12  # of a host
MOST_PLACES = 4  # of a figure
MOST_NAMES = 12
ODD = ("Host", "Figures", "The worst", "Measured", "Median of all hosts", "Worse by")  # the heads of a table


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
    return hosts_part("node", fleet, hosts.rows(record, fleet), reports)


def hosts_part(noun: str, fleet: Fleet, rows: Sequence[HostRow], reports: Mapping[str, str]) -> HostsPart:
    """`noun`: what a host is called."""
    return HostsPart(
        noun,
        fleet,
        rows,
        columns(rows),
        [rows[first : first + ROWS_OF_A_MAP] for first in range(0, len(rows), ROWS_OF_A_MAP)],
        gpu_grid.SYMBOLS,
        {row.host: f"fleet-host-{number}" for number, row in enumerate(rows) if row.wrong},
        [_detail(row) for row in rows if row.wrong],
        [table for table in (_equality(fleet, noun), _odd(rows)) if table.rows],
        reports,
    )


def _detail(row: HostRow) -> HostDetail:
    record = row.run.record if row.run else None
    rejected = record is not None and record.verdict != "ACCEPTED"
    return HostDetail(
        row,
        why(record) if record else "",
        reasons(record, "which its own report lists") if record and rejected else [],
        [
            *(say(gap.what) for gap in row.gaps if gap.kind != "incomplete"),
            *(wording.capitalised(say(text)) for text in row.said),
        ],
        [
            (say(each.fact), say(here), say(each.usual or ""))
            for each in row.differences
            for here in [next(value for value, hosts in each.others.items() if row.host in hosts)]
        ],
        [_figure(each) for each in row.slow[:MOST_FIGURES]],
        max(0, len(row.slow) - MOST_FIGURES),
    )


def _figure(slow: SlowPlaces) -> tuple[str, str, str, str]:
    worse = [on_node(place, 0) for place in sorted(slow.worse, key=lambda place: -slow.worse[place])]
    where = say("all {count} places", count=len(worse)) if slow.everywhere else wording.places(worse, MOST_PLACES)
    measured = wording.span(slow.values.values(), slow.figure.metric.unit)
    allowed = say(" and ").join(say(each.told) for each in slow.tolerances)
    worst = say("{percent}; allowed: {allowed}", percent=wording.percent(slow.worst), allowed=allowed)
    return what(slow.figure), where, measured, worst


def _equality(fleet: Fleet, noun: str) -> Table:
    rows = (
        (say(each.fact), say(each.usual or ""), say(value), f"{len(hosts)}{say(': ')}{say(some(hosts, MOST_NAMES))}")
        for each in fleet.differences
        for value, hosts in each.others.items()
    )
    things = say(f"{noun}s")
    return Table(
        say("In what {things} differ", things=things),
        ("Fact", say("Most {things}", things=things), "Others", wording.capitalised(things)),
        tuple(rows),
    )


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
    caption = say("Hosts that stand out in what whole hosts reach: told, and not judged")
    return Table(caption, ODD, tuple(cells))


# The report of a fleet: verdict, every host by groups of checks, those that are not fine, and where each one's own
# report is.

MEANS = {
    "ACCEPTED": "Every host is ACCEPTED, all are alike, and none is worse than its peers on the others.",
    "REJECTED": "A host is REJECTED, unlike the others, or worse than its peers on the others.",
    "INCOMPLETE": "Nothing speaks against a host, but the fleet is not whole: this is no acceptance.",
    "REHEARSAL": "All runs are rehearsals on CPU ranks, which say nothing about any GPU.",
}


def page(fleet: Fleet, reports: Mapping[str, str]) -> str:
    """A self-contained HTML page. `reports`: the addresses of the hosts' own reports, by folder, where there is one."""
    return render(
        "fleet.html.jinja",
        fleet=fleet,
        stamp=STAMPS[fleet.verdict],
        means=MEANS[fleet.verdict],
        basis=basis.in_words(fleet.grades),
        counts=counts(fleet),
        hosts=hosts_part("host", fleet, host_rows(fleet), reports),
    )
