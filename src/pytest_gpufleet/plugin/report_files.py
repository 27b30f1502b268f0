"""What a run keeps of its tests: what their reports amount to as checks of the verdict, and report.html, report.txt and
junit.xml in its folder, and what was asked for elsewhere."""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pytest_gpufleet import redaction, safe_files
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.events import Check, CheckFinished, FailedBy, Outcome
from pytest_gpufleet.model.fault import Fault, Faults
from pytest_gpufleet.plugin import compat, listeners
from pytest_gpufleet.plugin.compat import CHECK, PHASES, RUN, Phases
from pytest_gpufleet.redaction import redacted
from pytest_gpufleet.report.page import page
from pytest_gpufleet.report.terminal import summary_lines
from pytest_gpufleet.run import lifetime
from pytest_gpufleet.run.folder import JUNIT, REPORT, TEXT
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import path
from pytest_gpufleet.verdict.judgement import LimitMissed
from pytest_gpufleet.world.failure import RankFailure

# By the attribute of pytest's options that says where the file is to be, and the option that sets it.
WRITTEN = {"htmlpath": ("--html", REPORT), "xmlpath": ("--junitxml", JUNIT)}


def write_report(run: Run) -> None:
    """The page that `gpufleet report` makes of the evidence too, and the end of report.txt."""
    record, digest, folder = run.written.record, run.written.sha256, run.folder
    reports = folder.reports(run.fleet.hosts, folder.path) if run.fleet else {}
    run.write(folder.report, lambda path: safe_files.write_text(path, page(record, digest, run.fleet, reports)))
    _add_text(folder / TEXT, summary_lines.ending(record, str(folder)))


def _add_text(path: Path, text: str) -> None:
    """It can be followed (`tail -f`). Where it cannot be written, the other files say so."""
    with suppress(OSError), safe_files.append_to(path) as file:
        file.write(text)


class ReportFiles:
    """What was asked for elsewhere is a copy; of the report too, which pytest-html does not write then."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        """Refused if something was asked for that could not be written in the end."""
        self._run, self._option = run, config.option
        self._asked: dict[str, Path] = {}
        for name, (option, file) in WRITTEN.items():
            if given := getattr(config.option, name, None):
                self._asked[file] = path(given).absolute()  # as they read it
                lifetime.check_copy(option, self._asked[file])

    def put_into_the_folder(self) -> None:
        """Have junit.xml written into the folder of the run, and no page by pytest-html."""
        self._text = (self._run.folder / TEXT).absolute()  # a test may go into another folder
        _add_text(self._text, summary_lines.beginning(self._run.written.record))
        for name, where in (("htmlpath", None), ("xmlpath", str(self._run.folder / JUNIT))):
            if hasattr(self._option, name):  # else pytest has no such plugin
                setattr(self._option, name, where)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # pytest's own, for errors in the collection
            self._run.interruption.hear()
        if isinstance(excinfo.value, pytest.exit.Exception):
            self._run.exited = f"pytest.exit() ended the run: {excinfo.value.msg}"

    @pytest.hookimpl(tryfirst=True)  # before anybody shows it
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        redaction.hide_in(report)
        if report.failed:
            self._run.not_imported.append(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        record = self._run.written.record
        if nodeid in record.checks:
            findings = (each for each in record.findings if each.check == nodeid)
            _add_text(self._text, summary_lines.of_check(record, nodeid, findings))

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """A path that is not there, or a marker that is wrong: the run never began, and has no report."""
        self._run.beginning.close()
        try:
            return (yield)
        except pytest.UsageError:
            self._run.never_began = True
            compat.stop_junit(session.config)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._run.interruption.finishing = True

    @pytest.hookimpl(wrapper=True, trylast=True)  # when all have written, and before the terminal tells what
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        junit = self._run.folder / JUNIT
        try:
            yield
        except OSError as error:  # no traceback of junit.xml's writer where there is no room for it
            self._run.unwritten.append(f"{junit} could not be written: {error.strerror}")
            junit.unlink(missing_ok=True)  # half of it
        finally:
            if self._run.options.alias and junit.exists():  # it has the name of the host
                self._run.write(junit, partial(_copy, junit, redaction.aliased))
            if self._run.exit_status is not None and not self._run.never_began:
                write_report(self._run)
            for file, copy in self._asked.items():
                if (written := self._run.folder / file).exists():
                    self._run.write(copy, partial(_copy, written, str))
            if self._run.exit_status is not None:
                lifetime.summarize(self._run)
                status = self._run.exit_status or (lifetime.INCOMPLETE if self._run.unwritten else 0)
                record, folder = replace(self._run.written.record, exit_status=status), self._run.folder.path
                listeners.write_textfile(self._run, record)
                hook, ends = "pytest_gpufleet_verdict", (KeyboardInterrupt,)  # pytest.exit would end nothing
                try:
                    listeners.announce(session.config, hook, ends, record=record, folder=folder)
                finally:
                    status = status or (lifetime.INCOMPLETE if self._run.unwritten else 0)
                    session.exitstatus = self._run.exit_status = status


def _copy(written: Path, change: Callable[[str], str], path: Path) -> None:
    safe_files.write_text(path, change(written.read_text(encoding="utf-8")))


MESSAGE_LIMIT = 20_000
GRAVEST: tuple[Outcome, ...] = ("failed", "skipped", "passed", "not applicable")


def keep(item: pytest.Item, report: pytest.TestReport, error: BaseException | None) -> None:
    """Put on record what a phase of a test was, and with the last of them the check that it was."""
    run = item.config.stash[RUN]
    if isinstance(error, Faults) and report.failed:
        # With all that identifies the GPU, and without a traceback, which helps nobody.
        identity = run.target.topology.identity
        told = (filter(None, (each.described(identity), each.story)) for each in error.faults)
        report.longrepr = "\n".join(map("\n".join, told))
    redaction.hide_in(report)
    for fault in _faults(item, report, error):
        what, story = redacted(fault.what), redacted(fault.story[: 2 * MESSAGE_LIMIT])
        run.accuse(fault.changed(check=item.nodeid, what=what[:MESSAGE_LIMIT], story=story[:MESSAGE_LIMIT]))
    phases = item.stash.setdefault(PHASES, [])
    phases.append((report, error))
    if report.when == "teardown":
        run.record(CheckFinished(check=_finished(item, phases)))


def _finished(item: pytest.Item, phases: Phases) -> Check:
    """Of what was raised only text is kept. A test that another plugin runs again is what it was at its worst."""
    title, _, doc = (inspect.getdoc(getattr(item, "obj", None)) or "").partition("\n")
    outcomes = [_outcome(*each) for each in phases]
    outcome, message = min(outcomes, key=lambda each: (each[0] != "failed", each[0] == "passed"))  # the first of these
    if outcome == "passed" and not any(report.when == "call" for report, _ in phases):  # --setup-only and the like
        outcome, message = "skipped", "its body was not run"
    seconds = sum(report.duration for report, _ in phases)
    failed_by: FailedBy = ""
    if failed := [each for each in phases if _failed(*each)]:
        report, error = failed[0]
        worsened = any("GPU health" in title for title, _ in report.sections)
        only = len(failed) == 1 and not worsened and isinstance(error, LimitMissed) and error.only
        failed_by = "limits" if only else "other"
    text = redacted(message[: 2 * MESSAGE_LIMIT])[:MESSAGE_LIMIT]  # cut last, and not through a secret
    log = "\n".join(f"{title}\n{text.rstrip()}" for title, text in phases[-1][0].sections)[-MESSAGE_LIMIT:]
    check = Check(item.nodeid, outcome, round(seconds, 3), title, doc.strip(), text, failed_by=failed_by, log=log)
    if (before := item.stash.get(CHECK, None)) is not None:
        worst = min(before, check, key=lambda each: GRAVEST.index(each.outcome))
        failed_by = "other" if before.outcome == outcome == "failed" else worst.failed_by
        check = replace(worst, seconds=round(before.seconds + check.seconds, 3), failed_by=failed_by)
    item.stash[CHECK] = check
    del item.stash[PHASES]
    return check


def _faults(item: pytest.Item, report: pytest.TestReport, error: BaseException | None) -> Sequence[Fault]:
    """What is wrong by what ended a phase of a test, without what is on record: missed limits, and what was watched."""
    if not _failed(report, error) or isinstance(error, LimitMissed):
        return []
    match error:
        case RankFailure():
            return [error.fault([spec.place for spec in item.config.stash[RUN].ranks.pool.specs])]
        case Faults():
            return [fault for fault in error.faults if not fault.watched]
        case None:  # nothing was raised, as where a failure was expected and had to be
            return [Fault("check_failed", (), report.longreprtext.partition("\n")[0])]
    return [Fault("check_failed", (), f"{type(error).__name__}: {error}".partition("\n")[0])]


def _outcome(report: pytest.TestReport, error: BaseException | None) -> tuple[Outcome, str]:
    """Of one phase."""
    if _failed(report, error):
        own = isinstance(error, (LimitMissed, RankFailure))
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longreprtext
        headline = "" if crash is None or text.startswith(crash.message) else f"{crash.message}\n\n"
        taken_away = "" if report.failed else f"{type(error).__name__}: {error}"  # pytest shows nothing of it then
        return "failed", str(error) if own else headline + text or taken_away
    if isinstance(error, NotApplicable):
        return "not applicable", str(error)
    # An expected failure is reported as skipped too; a skip stays one, whatever others make of its report.
    if report.skipped or isinstance(error, (pytest.skip.Exception, NotJudged)):
        return "skipped", str(getattr(report, "wasxfail", "") or error)
    return "passed", ""


def _failed(report: pytest.TestReport, error: BaseException | None) -> bool:
    """Other plugins and conftest files may change a report later (a rerun, a retry): what was raised stays, unless it
    was expected, which is reported as skipped."""
    raised = error is not None and not isinstance(error, compat.NO_FAILURE)
    return report.failed or (raised and not (report.skipped and hasattr(report, "wasxfail")))
