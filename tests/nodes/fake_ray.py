"""Calls to an actor as Ray makes them, without Ray: what is called is run here, and its answer may get lost."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class Missing(Exception):
    """ray.exceptions.ActorUnavailableError: the call may have been run or not."""


@dataclass
class Reference:
    name: str
    run: Callable[[], Any]
    answer: Future = field(default_factory=Future)

    def future(self) -> Future:
        return self.answer


@dataclass
class Method:
    name: str
    calls: list[Reference]
    function: Callable[..., Any]

    def remote(self, *arguments: Any) -> Reference:
        self.calls.append(Reference(self.name, lambda: self.function(*arguments)))
        return self.calls[-1]


class Actor:
    """`calls` that were made and not yet run: `run` and `lose` say what becomes of one."""

    def __init__(self, real: Any) -> None:
        self.calls: list[Reference] = []
        self.take = Method("take", self.calls, lambda confirmed, seconds, *given: real.take(confirmed, 0.0, *given))
        self.give = Method("give", self.calls, real.give)

    def run(self, index: int) -> None:
        call = self.calls.pop(index)
        try:
            call.answer.set_result(call.run())
        except Exception as error:
            call.answer.set_exception(error)

    def lose(self, index: int, run: bool) -> None:
        """Nobody hears of this call: it was run, or it was not."""
        call = self.calls.pop(index)
        if run:
            call.run()
        call.answer.set_exception(Missing())
