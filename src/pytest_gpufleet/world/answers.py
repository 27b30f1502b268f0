"""What comes back from the ranks of a call, and how long it is waited for."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

from pytest_gpufleet.world.call import Members
from pytest_gpufleet.world.engines.protocol import Answer, Death, Engine
from pytest_gpufleet.world.outcomes import Outcome

# After the first failure the other ranks get this long to tell their own story before they are killed.
GRACE_SECONDS = 0.4
TURN_SECONDS = 0.5  # between two looks at whether the world was stopped by another thread


@dataclass
class Answers:
    """How a call has ended on the ranks on which it has. Ranks may have died that were not in it."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)
    failed: bool = False  # on any rank

    @property
    def ranks(self) -> set[int]:
        return self.outcomes.keys() | self.deaths.keys()

    def take(self, rank: int, ending: Outcome | Death, number: int) -> None:
        """One more. An outcome of another call than this one is of a call that is over."""
        if isinstance(ending, Death):
            self.deaths[rank] = ending
            self.failed = True
        elif ending.call == number:
            self.outcomes[rank] = ending
            self.failed = self.failed or ending.kind == "raised"


def _told(answer: Answer) -> Outcome | Death:
    # A pickle runs code. This one comes from a process that we have started ourselves, by a way that nobody else can
    # write to. Nothing else in this project's controller is unpickled, but the result in it.
    try:
        told = pickle.loads(answer.parcel)
    except (Exception, SystemExit) as error:
        what = f"a message that cannot be unpickled ({type(error).__name__})"
        return Death(answer.rank, f"for its controller: it sent {what}")
    if isinstance(told, Outcome):
        return told
    return Death(answer.rank, "for its controller: it sent what is no answer")


def collect(
    engine: Engine,
    number: int,
    ranks: Members,
    timeout: float,
    stopped: Callable[[], bool],
    clock: Callable[[], float],
) -> Answers:
    """Wait until every rank has answered the call of this number, one has failed, or `timeout` seconds have passed.
    RuntimeError if `stopped`."""
    __tracebackhide__ = True
    answers, missing = Answers(), set(ranks)
    until = clock() + timeout
    graceful = True
    remaining = timeout
    # One look after the deadline: this process may have been stopped (Ctrl-Z), and not the ranks.
    while missing and remaining > 0:
        if stopped():
            raise RuntimeError("the world was stopped by another thread")
        remaining = until - clock()
        for event in engine.wait(min(remaining, TURN_SECONDS)):
            told = event if isinstance(event, Death) else _told(event)
            answers.take(event.rank, told, number)
            if event.rank in answers.outcomes or event.rank in answers.deaths:
                missing.discard(event.rank)
        if answers.failed and graceful:
            graceful = False
            until = min(until, clock() + GRACE_SECONDS)
    return answers
