"""The terminal on its way to a rank that stands in a debugger, and back: what is told, and what stops meanwhile."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pytest_gpufleet.world.call import Members
from pytest_gpufleet.world.engines.protocol import Engine


@dataclass(frozen=True)
class Wanted:
    """A rank, process `pid`, stands at a breakpoint, or after a failure, and waits for a Loan."""

    pid: int
    failed: bool


@dataclass(frozen=True)
class Returned:
    """The rank goes on."""


@dataclass(frozen=True)
class Loan:
    """`path` of the terminal; else why there is none for any rank. Neither: the terminal is for another rank."""

    path: str = ""
    refused: str = ""


class Terminal(Protocol):
    """Of the process that all of a run is steered from."""

    post_mortem: bool  # whether a rank that fails is to ask for it

    def lend(self, rank: int, ranks: Members, wanted: Wanted) -> Loan:
        """To one of the `ranks` of a call. While it is lent, nobody else reads or writes it."""

    def take_back(self) -> None: ...


class Loans:
    """What becomes of the terminal during one call. While it is lent, the time of the call stands still."""

    def __init__(self, engine: Engine, ranks: Members, terminal: Terminal | None, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._ranks = ranks
        self._terminal = terminal
        self._clock = clock
        self._holder: int | None = None
        self._since = 0.0
        self._stood_still = 0.0  # seconds, by loans that are over

    def now(self) -> float:
        """The time on the clock, without that in which the terminal was lent."""
        return (self._clock() if self._holder is None else self._since) - self._stood_still

    def hear(self, rank: int, told: Wanted | Returned) -> None:
        if isinstance(told, Returned):
            self.over(rank)
            return
        loan = Loan()
        if self._terminal is None:
            loan = Loan(refused="there is no pytest here whose terminal a debugger could have")
        elif self._holder is None:
            loan = self._terminal.lend(rank, self._ranks, told)
        if loan.path:
            self._holder, self._since = rank, self._clock()
        self._engine.submit([rank], pickle.dumps(loan))

    def over(self, rank: int | None = None) -> None:
        """The rank goes on or is gone; without one: the call is over."""
        if self._holder is None or rank not in (None, self._holder):
            return
        self._stood_still += self._clock() - self._since
        self._holder = None
        assert self._terminal is not None
        self._terminal.take_back()
