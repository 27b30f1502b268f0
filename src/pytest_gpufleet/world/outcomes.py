"""How a call can end on one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.event_values import LossCurve
from pytest_gpufleet.world.call import ranks_text


@dataclass(frozen=True)
class Notice:
    """A warning as plain data; `category` is "module.name"."""

    category: str
    text: str
    file: str
    line: int


@dataclass(frozen=True)
class Outcome:
    """What a rank answers. Plain data: an exception itself often cannot be pickled. `kind`: "returned", "raised" or one
    of ENDINGS. `call` is the number of the call that it answers, `result` what was returned, packed, `phase` the one in
    which it was raised, `seconds` how long the call took on this rank, `notices` what it has warned of, and
    `losses` those of the trainings that it tells of."""

    kind: str
    call: int
    result: bytes = b""
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    output: str = ""
    phase: str = ""
    seconds: float = 0.0
    notices: tuple[Notice, ...] = ()
    losses: tuple[LossCurve, ...] = ()


@dataclass(frozen=True)
class Ending:
    """What ends a call and is no failure of it. `again(text)`: as it is raised in the controller."""

    raised: type[BaseException]
    again: Callable[[str], BaseException]


# By the kind of their outcome, the most special first. Who runs tests on a world adds those of its own, in the
# controller and on the ranks.
ENDINGS = {
    "not applicable": Ending(NotApplicable, NotApplicable),
    "not judged": Ending(NotJudged, NotJudged),
}


def kind_of(error: BaseException) -> str:
    """The kind of the outcome of a call that raised this."""
    return next((kind for kind, ending in ENDINGS.items() if isinstance(error, ending.raised)), "raised")


def raise_again(outcomes: Mapping[int, Outcome]) -> None:
    """End the test as its ranks have ended it, if any has by what is no failure."""
    __tracebackhide__ = True
    for kind, ending in ENDINGS.items():
        told = {rank: outcome for rank, outcome in outcomes.items() if outcome.kind == kind}
        if told:
            text = next(iter(told.values())).error_text
            where = "" if len(told) == len(outcomes) else f" (on {ranks_text(told)} of {len(outcomes)} only)"
            raise ending.again(text + where)


def echo_output(outcomes: Mapping[int, Outcome]) -> None:
    """Print what ranks printed, so that pytest's capture and -s show it with the test."""
    for rank in sorted(outcomes):
        for line in outcomes[rank].output.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
