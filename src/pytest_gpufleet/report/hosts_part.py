"""The hosts of a fleet, or of a run on many nodes: all of them by groups of checks, those that are not fine, in what
they differ, and where each one's own report is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import gpu_grid, hosts, wording
from pytest_gpufleet.report.banner import STAMPS, reasons, why
from pytest_gpufleet.report.hosts import HostRow, as_fleet, columns, counts, host_rows
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.several_runs import what
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_peers import SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.fleet.host_runs import NodeRuns

MOST_FIGURES = 12  # of a host
MOST_PLACES = 4  # of a figure


@dataclass(frozen=True)
class HostsPart:
    """What the templates hosts and side_by_side show. `noun`: what a host is called. `reports`: the addresses of the
    hosts' own reports, by folder, where there is one."""

    noun: str
    fleet: Fleet
    rows: Sequence[HostRow]
    reports: Mapping[str, str]
    symbols: ClassVar[Mapping[str, str]] = gpu_grid.SYMBOLS

    @property
    def nouns(self) -> str:
        return f"{self.noun}s"

    def columns(self) -> list[str]:
        return columns(self.rows)

    def anchors(self) -> dict[str, str]:
        """Where each host that somebody has to look at is told of."""
        return {row.host: f"fleet-host-{number}" for number, row in enumerate(self.rows) if row.wrong}

    def why(self, row: HostRow) -> str:
        return why(row.run.record) if row.run and row.verdict != "ACCEPTED" else ""

    def said(self, row: HostRow) -> list[str]:
        """What only shows beside the others, or between them, and what its own run says."""
        beside = [say(gap.what) for gap in row.gaps if gap.kind != "incomplete"]
        beside += [wording.capitalised(say(text)) for text in row.said]
        rejected = row.run is not None and row.verdict != "ACCEPTED"
        return beside + (
            reasons(row.run.record, "which its own report lists", with_checks=True) if row.run and rejected else []
        )

    def figures(self, row: HostRow) -> list[tuple[str, str, str, str]]:
        """The worst of those that are worse than its peers'."""
        return [_figure(each) for each in row.slow[:MOST_FIGURES]]

    def odd(self) -> list[tuple[str, ...]]:
        """One row a host: the figure that stands out most."""
        worst = [(row, max(row.odd, key=lambda each: each.worse)) for row in self.rows if row.odd]
        return [
            (
                row.host,
                str(len(row.odd)),
                what(each.figure),
                wording.quantity(each.value, each.figure.metric.unit),
                wording.quantity(each.reference, each.figure.metric.unit),
                wording.percent(each.worse),
            )
            for row, each in sorted(worst, key=lambda found: -found[1].worse)
        ]


def nodes_part(record: Record, runs: NodeRuns, reports: Mapping[str, str]) -> HostsPart | None:
    """Of a run on many nodes; None of one on its own machine. `runs`: the nodes' own."""
    if not record.of_cluster:
        return None
    fleet = as_fleet(record, runs)
    return HostsPart("node", fleet, hosts.rows(record, fleet), reports)


def _figure(slow: SlowPlaces) -> tuple[str, str, str, str]:
    worse = [on_node(each.place, 0) for each in sorted(slow.places, key=lambda each: -each.worse)]
    where = say("all {count} places", count=len(worse)) if slow.everywhere else wording.places(worse, MOST_PLACES)
    measured = wording.span([each.value for each in slow.places], slow.figure.metric.unit)
    allowed = say(" and ").join(say(each.text) for each in slow.tolerances)
    worst = say("{percent}; allowed: {allowed}", percent=wording.percent(slow.worst), allowed=allowed)
    return what(slow.figure), where, measured, worst


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
        title=say("GPU acceptance of a fleet: {count} hosts", count=len(fleet.hosts)),
        made="Made by {tool} from the evidence of each host's run.",
        fleet=fleet,
        stamp=STAMPS[fleet.verdict],
        means=MEANS[fleet.verdict],
        basis=basis.in_words(fleet.grades),
        counts=counts(fleet),
        hosts=HostsPart("host", fleet, host_rows(fleet), reports),
    )
