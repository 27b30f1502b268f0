"""What this plugin adds to the page that pytest-html writes. Registered only in runs that make a report."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.plugin import html_columns
from pytest_gpufleet.report.page import other_software, rendering, summary_html
from pytest_gpufleet.report.page.hosts_part import nodes_part
from pytest_gpufleet.report.wording import says
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.run.run import Run

# The style sheet hides pytest-html's own tables until this is opened.
EVERY_TEST = '<details class="fleet-every"><summary>{}</summary></details>'


class HtmlReport:
    """`page`: the file that pytest-html writes; `after_each_test`: not only at the end of the run."""

    def __init__(self, run: Run, evidence: Evidence, page: Path, after_each_test: bool) -> None:
        self._run = run
        self._evidence = evidence
        self._page = page
        self._after_each_test = after_each_test

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_report_title(self, report: Any) -> None:
        report.title = says(self._evidence.record.run.language)("GPU acceptance report")
        report.set_data("environment", other_software.metadata(report.data["environment"]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, prefix: list[str]) -> None:
        record, own = self._evidence.record, self._run.runs_of_nodes()
        say = says(record.run.language)
        nodes = nodes_part(record, own, self._run.folder.reports(own.values(), self._run.folder.path), say)
        every_test = EVERY_TEST.format(say("Every test as pytest ran it, with what it printed"))
        prefix += [summary_html.summary(record, self._evidence.sha256, nodes), every_test]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        html_columns.header(cells)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)  # others add to what is escaped
    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        cells[:] = [cell.replace(report.nodeid, other_software.text(report.nodeid)) for cell in cells]
        html_columns.row(cells, getattr(report, "findings", []), self._evidence.record.hosts)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> Generator[None, None, None]:
        report.extras = other_software.extras(getattr(report, "extras", []))
        if getattr(report, "findings", []):
            _begin_to_load_plots()
        yield
        if self._after_each_test:
            self._protect()

    @pytest.hookimpl(wrapper=True, trylast=True)  # as soon as pytest-html has written the page
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        yield
        self._protect()

    def _protect(self) -> None:
        try:
            rendering.enforce(self._page)
        except OSError as error:
            problem = f"{self._page} could not be written again: {error.strerror}"
            self._evidence.trouble = self._evidence.trouble or problem


@cache
def _begin_to_load_plots() -> None:
    """There is a figure to draw. matplotlib takes a second to import: checks run meanwhile, and nobody waits for it.

    Its own package, a fifth of that, changes the filters of warnings for a moment, which are those of the whole
    process: in another thread they could end as those of a test that is over."""
    _load("matplotlib")
    threading.Thread(target=_load, args=["pytest_gpufleet.report.plots"], daemon=True).start()


def _load(module: str) -> None:
    with suppress(Exception):  # the report will fail in the same way, and tell it
        import_module(module)
