"""What a test's reports amount to as a check of the verdict."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

import pytest

from pytest_gpufleet.guard import HealthWorsened
from pytest_gpufleet.verdict.evidence import Check
from pytest_gpufleet.verdict.judge import LimitMissed
from pytest_gpufleet.world.failures import RankFailure
from pytest_gpufleet.world.outcomes import NotApplicable

MESSAGE_LIMIT = 20_000

# Setup, call and teardown of one test: pytest's report of each and what was raised in it.
Phases = list[tuple[pytest.TestReport, BaseException | None]]


def finished(item: pytest.Item, phases: Phases) -> dict[str, Any]:
    """The check that a finished test was, as JSON."""
    title, _, doc = (inspect.getdoc(getattr(item, "obj", None)) or "").partition("\n")
    outcome, message = _outcome(phases)
    seconds = sum(report.duration for report, _ in phases)
    return asdict(Check(item.nodeid, outcome, round(seconds, 3), title, doc.strip(), message[:MESSAGE_LIMIT]))


def _outcome(phases: Phases) -> tuple[str, str]:
    for report, error in phases:
        if report.failed:
            own = isinstance(error, (LimitMissed, RankFailure, HealthWorsened))
            crash = getattr(report.longrepr, "reprcrash", None)
            headline = f"{crash.message}\n\n" if crash else ""
            return "failed", str(error) if own else headline + report.longreprtext
    for report, error in phases:
        if isinstance(error, NotApplicable):
            return "not applicable", str(error)
        if report.skipped:  # an expected failure is reported as skipped too
            return "skipped", str(getattr(report, "wasxfail", "") or error)
    return "passed", ""
