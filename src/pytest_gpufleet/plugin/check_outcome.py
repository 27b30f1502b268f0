"""What a test's reports amount to as a check of the verdict."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_gpufleet import redaction
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.events import Check, CheckFinished, FailedBy, Outcome
from pytest_gpufleet.model.fault import Fault, Faults
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.keys import CHECK, ONLY_LIMITS, PHASES, RUN, Phases
from pytest_gpufleet.redaction import redacted
from pytest_gpufleet.verdict.judgement import LimitMissed
from pytest_gpufleet.world.failure import RankFailure

MESSAGE_LIMIT = 20_000
GRAVEST: tuple[Outcome, ...] = ("failed", "skipped", "passed", "not applicable")
NOT_RUN = "its body was not run"


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
        telemetry = run.activity.end() if run.activity else None
        run.record(CheckFinished(check=_finished(item, phases), telemetry=telemetry))


def _finished(item: pytest.Item, phases: Phases) -> Check:
    """Of what was raised nothing is kept but text: the frames of a traceback hold all that the test had. One that
    another plugin runs again is what it was at its worst."""
    title, _, doc = (inspect.getdoc(getattr(item, "obj", None)) or "").partition("\n")
    outcome, message = _outcome(phases)
    seconds = sum(report.duration for report, _ in phases)
    failed = [each for each in phases if _failed(*each)]
    failed_by: FailedBy = ""
    if failed:
        worsened = any("GPU health" in title for title, _ in failed[0][0].sections)
        alone = len(failed) == 1 and not worsened and failed[0][1] is item.stash.get(ONLY_LIMITS, None)
        failed_by = "limits" if alone else "other"
    check = Check(
        item.nodeid,
        outcome,
        round(seconds, 3),
        title,
        doc.strip(),
        redacted(message[: 2 * MESSAGE_LIMIT])[:MESSAGE_LIMIT],  # cut last, and not through a secret
        failed_by=failed_by,
        log="\n".join(f"{title}\n{text.rstrip()}" for title, text in phases[-1][0].sections)[-MESSAGE_LIMIT:],
    )
    if (before := item.stash.get(CHECK, None)) is not None:
        worst = min(before, check, key=lambda each: GRAVEST.index(each.outcome))
        twice = before.outcome == outcome == "failed"
        failed_by = "other" if twice else worst.failed_by
        check = replace(worst, seconds=round(before.seconds + check.seconds, 3), failed_by=failed_by)
    item.stash[CHECK] = check
    del item.stash[PHASES]
    if ONLY_LIMITS in item.stash:
        del item.stash[ONLY_LIMITS]
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


def _outcome(phases: Phases) -> tuple[Outcome, str]:
    for report, error in phases:
        if _failed(report, error):
            own = isinstance(error, (LimitMissed, RankFailure))
            crash = getattr(report.longrepr, "reprcrash", None)
            text = report.longreprtext
            headline = "" if crash is None or text.startswith(crash.message) else f"{crash.message}\n\n"
            taken_away = "" if report.failed else f"{type(error).__name__}: {error}"  # pytest shows nothing of it then
            return "failed", str(error) if own else headline + text or taken_away
    for report, error in phases:
        if isinstance(error, NotApplicable):
            return "not applicable", str(error)
        # An expected failure is reported as skipped too; a skip stays one, whatever others make of its report.
        if report.skipped or isinstance(error, (pytest.skip.Exception, NotJudged)):
            return "skipped", str(getattr(report, "wasxfail", "") or error)
    if not any(report.when == "call" for report, _ in phases):  # --setup-only and the like
        return "skipped", NOT_RUN
    return "passed", ""


def _failed(report: pytest.TestReport, error: BaseException | None) -> bool:
    """Other plugins and conftest files may change a report later (a rerun, a retry): what was raised stays, unless it
    was expected, which is reported as skipped."""
    raised = error is not None and not isinstance(error, compat.NO_FAILURE)
    return report.failed or (raised and not (report.skipped and hasattr(report, "wasxfail")))
