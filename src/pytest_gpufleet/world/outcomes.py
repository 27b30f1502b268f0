"""How a call can end on one rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

import pytest
from _pytest.outcomes import Skipped

from pytest_gpufleet.world.call import ranks_text

OutcomeKind = Literal["returned", "raised", "skipped", "xfailed", "not applicable"]


@dataclass(frozen=True)
class Outcome:
    """What a rank answers. Plain data: an exception itself often cannot be pickled. `call` is the number of the call
    that it answers, `result` what was returned, packed, `phase` the one in which it was raised, and `seconds` how long
    the call took on this rank."""

    kind: OutcomeKind
    call: int
    result: bytes = b""
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    output: str = ""
    phase: str = ""
    seconds: float = 0.0


class NotApplicable(Skipped):
    """The hardware has no such thing: unlike a skipped check, this does not make a verdict incomplete."""


def not_applicable(reason: str) -> NoReturn:
    """End a test, in the controller or on a rank, because what it checks does not exist here."""
    __tracebackhide__ = True
    raise NotApplicable(f"not applicable: {reason}")


def not_judged(reason: str) -> NoReturn:
    """End a test because what it checks cannot be seen, which makes a verdict INCOMPLETE."""
    __tracebackhide__ = True
    pytest.skip(f"not judged: {reason}")


# How an outcome that is neither a result nor a failure is raised again in the controller.
RAISED_AGAIN: dict[OutcomeKind, type[BaseException]] = {
    "not applicable": NotApplicable,
    "skipped": Skipped,
    "xfailed": pytest.xfail.Exception,
}


def raise_again(outcomes: Mapping[int, Outcome]) -> None:
    """End the test as its ranks have ended it, if any has by what is no failure."""
    __tracebackhide__ = True
    for kind, exception in RAISED_AGAIN.items():
        told = {rank: outcome for rank, outcome in outcomes.items() if outcome.kind == kind}
        if told:
            text = next(iter(told.values())).error_text
            where = "" if len(told) == len(outcomes) else f" (on {ranks_text(told)} of {len(outcomes)} only)"
            ending = exception(text + where)
            ending._use_item_location = True  # type: ignore[attr-defined]  # a skip is told at the test, not here
            raise ending


def echo_output(outcomes: Mapping[int, Outcome]) -> None:
    """Print what ranks printed, so that pytest's capture and -s show it with the test."""
    for rank in sorted(outcomes):
        for line in outcomes[rank].output.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
