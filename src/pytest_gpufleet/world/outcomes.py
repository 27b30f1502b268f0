"""How a call can end on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

import pytest
from _pytest.outcomes import Skipped

from pytest_gpufleet.world.shipping import Parcel

OutcomeKind = Literal["returned", "raised", "skipped", "xfailed", "not applicable"]


@dataclass(frozen=True)
class Outcome:
    """Plain data: an exception itself often cannot be pickled. `call` is the number of the call that it answers,
    `ended` the monotonic time."""

    kind: OutcomeKind
    call: int = 0
    result: Parcel | None = None
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    output: str = ""
    ended: float = 0.0


class NotApplicable(Skipped):
    """The hardware has no such thing: unlike a skipped check, this does not make a verdict incomplete."""


def not_applicable(reason: str) -> NoReturn:
    """End a test, in the controller or on a rank, because what it checks does not exist here."""
    __tracebackhide__ = True
    raise NotApplicable(f"not applicable: {reason}")


# How an outcome that is neither a result nor a failure is raised again in the controller.
RAISED_AGAIN: dict[OutcomeKind, type[BaseException]] = {
    "not applicable": NotApplicable,
    "skipped": Skipped,
    "xfailed": pytest.xfail.Exception,
}
