"""The report of a fleet: verdict, every host by groups of checks, those that are not fine, and where each one's own
report is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import STAMPS, reasons
from pytest_gpufleet.report.fleet_hosts import SYMBOLS, HostRow, columns, counts, host_rows
from pytest_gpufleet.report.page.several_runs import Table, what
from pytest_gpufleet.report.page.standalone import render
from pytest_gpufleet.report.reason_texts import why
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_peers import SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet

ROWS_OF_A_MAP = 25  # then the next table begins beside it
MOST_FIGURES = 12  # of a host
MOST_PLACES = 4  # of a figure
MOST_NAMES = 12
MEANS = {
    "ACCEPTED": "Every host is ACCEPTED, all are alike, and none is worse than its peers on the others.",
    "REJECTED": "A host is REJECTED, unlike the others, or worse than its peers on the others.",
    "INCOMPLETE": "Nothing speaks against a host, but the fleet is not whole: this is no acceptance.",
    "REHEARSAL": "All runs are rehearsals on CPU ranks, which say nothing about any GPU.",
}


@dataclass(frozen=True)
class HostDetail:
    """A host that somebody has to look at. `said`: lines of its own run; `beside`: what only the fleet shows."""

    row: HostRow
    why: str
    said: list[str]
    beside: list[str]
    differences: list[tuple[str, str, str]]
    figures: list[tuple[str, str, str, str]]
    more_figures: int


def page(fleet: Fleet, reports: Mapping[str, str]) -> str:
    """A self-contained HTML page. `reports`: the addresses of the hosts' own reports, by folder, where there is one."""
    rows = host_rows(fleet)
    return render(
        "fleet.html.jinja",
        fleet=fleet,
        stamp=STAMPS[fleet.verdict],
        means=MEANS[fleet.verdict],
        basis=basis.in_words(fleet.grades),
        counts=counts(fleet),
        columns=columns(rows),
        maps=[rows[first : first + ROWS_OF_A_MAP] for first in range(0, len(rows), ROWS_OF_A_MAP)],
        symbols=SYMBOLS,
        anchors={row.host: f"fleet-host-{number}" for number, row in enumerate(rows) if row.wrong},
        details=[_detail(row) for row in rows if row.wrong],
        tables=[table for table in (_equality(fleet), _odd(rows)) if table.rows],
        rows=rows,
        reports=reports,
    )


def _detail(row: HostRow) -> HostDetail:
    record = row.run.record if row.run else None
    return HostDetail(
        row,
        why(record) if record else "",
        reasons(record, "which its own report lists") if record and record.verdict != "ACCEPTED" else [],
        [gap.what for gap in row.gaps if gap.kind != "incomplete"],
        [
            (each.fact, next(value for value, hosts in each.others.items() if row.host in hosts), each.usual or "")
            for each in row.differences
        ],
        [_figure(each) for each in row.slow[:MOST_FIGURES]],
        max(0, len(row.slow) - MOST_FIGURES),
    )


def _figure(slow: SlowPlaces) -> tuple[str, str, str, str]:
    worse = sorted(slow.worse, key=lambda place: -slow.worse[place])
    where = f"all {len(worse)} places" if slow.everywhere else wording.places(worse, MOST_PLACES)
    measured = wording.span(slow.values.values(), slow.figure.metric.unit)
    allowed = " and ".join(map(str, slow.tolerances))
    return what(slow.figure), where, measured, f"{wording.percent(slow.worst)}; allowed: {allowed}"


def _equality(fleet: Fleet) -> Table:
    rows = (
        (each.fact, each.usual or "", value, f"{len(hosts)}: {_names(hosts)}")
        for each in fleet.differences
        for value, hosts in each.others.items()
    )
    return Table("In what hosts differ", ("Fact", "Most hosts", "Others", "Hosts"), tuple(rows))


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
