"""What this plugin adds to the page that pytest-html writes. Registered only in runs that make a report."""

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet import redaction, safe_files
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import in_language, say
from pytest_gpufleet.plugin import compat, listeners
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page import rendering, report_page
from pytest_gpufleet.report.page.hosts_part import nodes_part
from pytest_gpufleet.run import conclusion, opening
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.run.folder import JUNIT, REPORT
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import path

# Measured and Limit are not sortable: pytest-html sorts as text, and the rows carry different units.
HEADER = (
    "<th>Measured</th>",
    "<th>Limit</th>",
    '<th class="sortable" data-column-type="worstPlace">Worst place</th>',
)
COLUMNS = ("measured", "limit", "worstPlace")
URGENCY = {"missed": 0, "not judged": 1, "met": 2, "for information": 3}


def header(cells: list[str]) -> None:
    """Insert the columns Measured, Limit and Worst place after the one with the test's name."""
    at = _after_test(cells)
    cells[at:at] = HEADER


def row(cells: list[str], findings: list[Finding], hosts: wording.Hosts = wording.ALONE) -> None:
    """Insert the cells of one test; of several findings the one nearest to trouble is shown."""
    if not cells:  # another plugin has taken the row out
        return
    at = _after_test(cells)
    texts = _texts(findings, hosts)
    # Bare text only: pytest-html opens a row by the parent of what was clicked, which has to be the row.
    cells[at:at] = [
        f'<td class="col-{name}">{escape(wording.clean(text))}</td>' for name, text in zip(COLUMNS, texts, strict=True)
    ]


def _after_test(cells: list[str]) -> int:
    return next((index + 1 for index, cell in enumerate(cells) if "testId" in cell), len(cells))


def _texts(findings: list[Finding], hosts: wording.Hosts) -> tuple[str, str, str]:
    measured = [finding for finding in findings if finding.measurement.values]
    if not measured:
        return "", "", ""
    finding = min(measured, key=lambda finding: (URGENCY.get(finding.state, 0), wording.margin(finding)))
    worst = wording.worst(finding)
    assert worst is not None  # it has values
    place, value = worst
    text = wording.quantity(value, wording.metric(finding).unit)
    if finding.slower_than_peers and not finding.missed:
        limit = "peers"  # its own limit is met, and would read as a contradiction
    elif finding.limit:
        text, limit = wording.value_and_limit(value, finding.limit)
    else:
        limit = "none" if finding.slower_than_peers is None else "peers"
    more = f" (tightest of {len(measured)})" if len(measured) > 1 else ""
    return text + more, limit, wording.place(place, hosts)


# Of an address, as a browser reads it: without white space and control characters.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=:)", re.IGNORECASE)
_IGNORED = re.compile(r"[\x00-\x20]+")
_HARMLESS = ("http", "https", "mailto")
_LINKS = ("json", "text", "url")  # the extras that pytest-html makes a link of; the others it keeps as data


def text(value: object) -> str:
    return escape(wording.clean(str(value)))


def metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    """What pytest-metadata found in the environment of a CI server, for pytest-html's table."""
    return {
        wording.clean(str(name)): {text(key): text(each) for key, each in value.items()}
        if isinstance(value, Mapping)
        else text(value)
        for name, value in given.items()
    }


def extras(given: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What tests attached to their reports. Markup is shown as text, and an address that is none is left out."""
    return [shown for each in given if (shown := _extra(each)) is not None]


def _extra(extra: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, content = extra.get("format_type"), extra.get("content")
    if kind == "html":
        return {**extra, "content": text(content)}
    scheme = _SCHEME.match(_IGNORED.sub("", str(content)))
    if kind in ("url", "image", "video") and scheme and scheme[0].lower() not in _HARMLESS:
        return None
    if kind not in _LINKS:
        return dict(extra)
    shown = {key: text(value) if isinstance(value, str) else value for key, value in extra.items()}
    return shown if kind == "url" else {**shown, "content": content}  # which pytest-html encodes


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
        with in_language(self._evidence.record.run.language):
            report.title = say("GPU acceptance report")
        report.set_data("environment", metadata(report.data["environment"]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, prefix: list[str]) -> None:
        record, own = self._evidence.record, self._run.runs_of_nodes()
        with in_language(record.run.language):
            nodes = nodes_part(record, own, self._run.folder.reports(own.values(), self._run.folder.path))
            every_test = EVERY_TEST.format(say("Every test as pytest ran it, with what it printed"))
            prefix += [report_page.summary(record, self._evidence.sha256, nodes), every_test]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        header(cells)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)  # others add to what is escaped
    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        cells[:] = [cell.replace(report.nodeid, text(report.nodeid)) for cell in cells]
        row(cells, getattr(report, "findings", []), self._evidence.record.hosts)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> Generator[None, None, None]:
        report.extras = extras(getattr(report, "extras", []))
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


# By the attribute of pytest's options that says where the file is to be, and the option that sets it.
WRITTEN = {"htmlpath": ("--html", REPORT), "xmlpath": ("--junitxml", JUNIT)}


class ReportFiles:
    """Hooks around those who write. What was asked for elsewhere is a copy."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        """Refused if something was asked for that could not be written in the end."""
        self._run = run
        self._option = config.option
        self._junit: Any = None  # its plugin, where there is no room for the report
        self._copies: dict[Path, Path] = {}
        self._asked: dict[str, Path] = {}
        for name, (option, file) in WRITTEN.items():
            if given := getattr(config.option, name, None):
                self._asked[file] = path(given).absolute()  # as they read it
                opening.check_copy(option, self._asked[file])

    def put_into_the_folder(self) -> Path:
        """Have both files written into the folder of the run, and tell where report.html will be."""
        folder = self._run.folder.path.absolute()
        self._copies = {folder / file: copy for file, copy in self._asked.items()}
        for name, (_, file) in WRITTEN.items():
            if hasattr(self._option, name):  # else pytest has no such plugin
                setattr(self._option, name, str(self._run.folder / file))
        return folder / REPORT

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """A path that is not there, or a marker that is wrong: the run never began, and has no report."""
        try:
            return (yield)
        except pytest.UsageError:
            self._run.never_began = True
            compat.stop_report_writers(session.config)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """If the report cannot be written (disk full), keep its writers from ending the session with a traceback."""
        try:
            return (yield)
        finally:
            self._run.interruption.finishing = True
            if not self._run.report_can_be_written():
                self._junit = compat.stop_report_writers(session.config)

    @pytest.hookimpl(wrapper=True, trylast=True)  # when all have written, and before the terminal tells what
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        try:
            yield
        finally:
            if self._junit is not None:
                self._run.write(Path(self._junit.logfile), self._write_junit)
            if self._run.options.alias and (junit := self._run.folder / JUNIT).exists():  # it has the name of the host
                self._run.write(junit, _with_aliases)
            for written, copy in self._copies.items():
                if written.exists():
                    self._run.write(copy, partial(_copy, written))
            if self._run.exit_status is not None:
                self._end(session, self._run.exit_status)

    def _end(self, session: pytest.Session, status: int) -> None:
        run = self._run
        conclusion.summarize(run)
        try:
            listeners.announce_verdict(session.config, status or (conclusion.INCOMPLETE if run.unwritten else 0))
        finally:
            session.exitstatus = run.exit_status = status or (conclusion.INCOMPLETE if run.unwritten else 0)

    def _write_junit(self, path: Path) -> None:
        try:
            self._junit.pytest_sessionfinish()
        except OSError:
            with suppress(OSError):
                path.unlink()  # half of it
            raise


def _with_aliases(path: Path) -> None:
    safe_files.write_text(path, redaction.aliased(path.read_text(encoding="utf-8")))


def _copy(written: Path, path: Path) -> None:
    safe_files.write_text(path, written.read_text(encoding="utf-8"))
