"""pdb on a rank: it asks the controller for the terminal whenever it stops, and gives it back whenever it goes on."""

from __future__ import annotations

import io
import os
import pdb
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO, cast

from pytest_gpufleet.world.debugging import Loan, Returned, Wanted
from pytest_gpufleet.world.engines.channel import RankEnd

# Where stepping does not stop: what calls a test's body on a rank.
OWN = ("pytest_gpufleet.plugin.*", "pytest_gpufleet.world.*")


class DebuggerQuit(Exception):
    """The debugger was told to quit, which ends the test."""


class Debugger(pdb.Pdb):
    """`borrow(failed)` gives the terminal for as long as it lasts, or None if another rank has it."""

    def __init__(self, borrow: Callable[[bool], Any]) -> None:
        self.unseen = io.StringIO()  # what is to be shown when it stops next
        super().__init__(stdout=self.unseen, nosigint=True, skip=OWN)
        self._borrow = borrow

    def interaction(self, frame: FrameType | None, *trouble: Any) -> None:
        with self._borrow(frame is None) as terminal:
            if terminal is None:
                self.set_continue()
                return
            told, (self.stdin, self.stdout) = self.unseen.getvalue(), terminal
            try:
                self.stdout.write(told)
                super().interaction(frame, *trouble)
            finally:
                self.stdout = self.unseen = io.StringIO()

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Without the frames that lead to the body."""
        stack, index = super().get_stack(f, t)
        own = [at for at, (frame, _) in enumerate(stack) if "__tracebackhide__" in frame.f_locals]
        first = own[-1] + 1 if own and own[-1] < len(stack) - 1 else 0
        return stack[first:], max(0, index - first)

    def do_quit(self, arg: str) -> NoReturn:
        raise DebuggerQuit("the debugger was told to quit")

    do_q = do_exit = do_EOF = do_quit  # noqa: N815  # as pdb calls it


class Debugging:
    """breakpoint() and pdb.set_trace() of this rank. `connection` is what its calls come by: it is free while one is at
    work."""

    def __init__(self, connection: RankEnd) -> None:
        self._connection = connection
        self._rank = os.getpid()
        if "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = self._stop
        pdb.set_trace = self._stop

    def _stop(self, *args: object, **kwargs: object) -> None:
        Debugger(self._borrow).set_trace(sys._getframe(1))

    def after_failure(self, error: BaseException, frames: TracebackType | None) -> None:
        if frames is None or isinstance(error, DebuggerQuit) or os.getpid() != self._rank:
            return
        debugger = Debugger(self._borrow)
        debugger.reset()
        debugger.unseen.write("".join(traceback.format_exception(type(error), error, frames)))
        with suppress(DebuggerQuit):  # the failure itself is told
            debugger.interaction(None, frames)

    @contextmanager
    def _borrow(self, failed: bool) -> Iterator[tuple[TextIO, TextIO] | None]:
        if os.getpid() != self._rank:
            raise RuntimeError("breakpoint() in a process that a rank has started: there is no terminal for it")
        self._connection.send(pickle.dumps(Wanted(self._rank, failed)))
        loan: Loan = pickle.loads(self._connection.receive())
        if not loan.path:
            if loan.refused and not failed:
                raise RuntimeError(f"breakpoint() on a rank: {loan.refused}")
            yield None
            return
        try:
            with _opened(loan.path, "r") as typed, _opened(loan.path, "w") as shown, _heeding_ctrl_c():
                yield typed, shown
        finally:
            self._connection.send(pickle.dumps(Returned()))


def _opened(path: str, mode: str) -> TextIO:
    # A rank leads a session of its own, and must not make the terminal its own by opening it.
    return cast("TextIO", open(path, mode, opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)))


@contextmanager
def _heeding_ctrl_c() -> Iterator[None]:
    """The controller passes Ctrl-C on while the terminal is lent: for pdb it ends what was being typed."""
    if threading.current_thread() is not threading.main_thread():  # which cannot set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
