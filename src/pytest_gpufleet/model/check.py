"""A check after it ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from pytest_gpufleet.model.codec import Amount

Outcome = Literal["passed", "failed", "skipped", "not applicable"]

# What made a check fail: figures that missed their limits and nothing else, or anything else. Only the first can be
# undone by judging the figures against other limits. Up to version 0.2 a missed limit could also cut a check off.
FailedBy = Literal["", "limits", "limits, with more to do", "other"]


@dataclass(frozen=True)
class Check:
    """One acceptance test after it ran."""

    id: str
    outcome: Outcome
    seconds: Amount
    title: str = ""  # first line of its docstring
    doc: str = ""  # the rest: why it matters, what to do
    message: str = ""  # why it failed, was skipped or does not apply
    run: str = ""  # the earlier run that this was carried over from
    failed_by: FailedBy = ""


class NotApplicable(BaseException):
    """The hardware has no such thing: unlike a skipped check, this does not make a verdict incomplete. No failure, so
    that no `except Exception` takes it for one."""


def not_applicable(reason: str) -> NoReturn:
    """End a test, in the controller or on a rank, because what it checks does not exist here."""
    __tracebackhide__ = True
    raise NotApplicable(f"not applicable: {reason}")


class NotJudged(BaseException):
    """What the check looks at cannot be seen here, which makes a verdict INCOMPLETE. No failure either."""


def not_judged(reason: str) -> NoReturn:
    """End a test, in the controller or on a rank, because what it checks cannot be seen."""
    __tracebackhide__ = True
    raise NotJudged(f"not judged: {reason}")
