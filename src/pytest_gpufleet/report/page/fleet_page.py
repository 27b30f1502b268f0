"""The report of a fleet: verdict, every host by groups of checks, those that are not fine, and where each one's own
report is."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_gpufleet.model.language import Language
from pytest_gpufleet.report.banner import STAMPS
from pytest_gpufleet.report.fleet_hosts import counts, host_rows
from pytest_gpufleet.report.page.hosts_part import hosts_part
from pytest_gpufleet.report.page.rendering import render
from pytest_gpufleet.report.translation import says
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet

MEANS = {
    "ACCEPTED": "Every host is ACCEPTED, all are alike, and none is worse than its peers on the others.",
    "REJECTED": "A host is REJECTED, unlike the others, or worse than its peers on the others.",
    "INCOMPLETE": "Nothing speaks against a host, but the fleet is not whole: this is no acceptance.",
    "REHEARSAL": "All runs are rehearsals on CPU ranks, which say nothing about any GPU.",
}


def page(fleet: Fleet, reports: Mapping[str, str], language: Language = "en") -> str:
    """A self-contained HTML page. `reports`: the addresses of the hosts' own reports, by folder, where there is one."""
    say = says(language)
    return render(
        "fleet.html.jinja",
        language,
        fleet=fleet,
        stamp=STAMPS[fleet.verdict],
        means=MEANS[fleet.verdict],
        basis=basis.in_words(fleet.grades, say),
        counts=counts(fleet, say),
        hosts=hosts_part("host", fleet, host_rows(fleet), reports, say),
    )
