"""What this plugin adds to the page that pytest-html writes. Registered only in runs that make a report."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpufleet.report import columns, html
from pytest_gpufleet.verdict.evidence import Evidence

# The style sheet hides pytest-html's own tables until this is opened.
EVERY_TEST = (
    '<details class="fleet-every"><summary>Every test as pytest ran it, with what it printed</summary></details>'
)


class HtmlReport:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_report_title(self, report: Any) -> None:
        report.title = "GPU acceptance report"

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, prefix: list[str]) -> None:
        prefix += [html.summary(self._evidence.record, self._evidence.sha256), EVERY_TEST]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        columns.header(cells)

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        columns.row(cells, getattr(report, "findings", []))
