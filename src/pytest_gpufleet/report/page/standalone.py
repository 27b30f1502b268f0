"""The whole report as one file, made from evidence alone: where pytest-html had no chance to write it."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.language import Language
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page import summary_html
from pytest_gpufleet.report.page.hosts_part import nodes_part
from pytest_gpufleet.report.page.rendering import render
from pytest_gpufleet.report.wording import says
from pytest_gpufleet.verdict.fleet.fleet_peers import NodeRuns

ALONE: NodeRuns = {}
NOWHERE: Mapping[str, str] = {}


def page(
    record: Record,
    sha256: str,
    runs: NodeRuns = ALONE,
    reports: Mapping[str, str] = NOWHERE,
    language: Language | None = None,
) -> str:
    """A self-contained HTML page: the report as pytest-html's page has it, and a plain table of every check.

    `sha256`: of the whole evidence file. `runs` and `reports`: as `hosts_part.nodes_part` takes them. `language`: that
    of the run, if none is given.
    """
    language = language or record.run.language
    return render(
        "page.html.jinja",
        language,
        host=record.run.host or "unknown host",
        fragment=summary_html.summary(record, sha256, nodes_part(record, runs, reports, says(language)), language),
        checks=[_row(check) for check in record.checks.values()],
    )


def _row(check: Check) -> tuple[str, ...]:
    return (
        check.outcome,
        wording.SYMBOLS.get(check.outcome, "○"),
        wording.clean(check.title),
        wording.clean(check.id),
        f"{check.seconds:,.1f}",
        wording.clean(check.message),
    )
