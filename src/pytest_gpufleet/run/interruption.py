"""What ends a run early and still leaves its report: Ctrl-C, SIGTERM (of `timeout`, a scheduler, `docker stop`) and
SIGHUP (of a terminal that is closed). After the last two the process dies by that signal, as its sender expects. A
SIGTERM that comes when the time of the run is up is that of its supervisor (hard_end), and ends it by its verdict.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

# With what stands there in a process that nobody has told otherwise: nohup, a debugger and other programs do.
HEEDED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


class Interrupted(KeyboardInterrupt):
    """What ends a run, as what it is: of any other KeyboardInterrupt pytest shows a place in the code, after the
    verdict, as if that had been at fault."""

    __module__ = "builtins"  # of the name, only the class is shown: as of the exceptions that pytest ends tests by


class Interruption:
    """Whether this run was told to end. `tell(what)` is called once, at the first time: "interrupted". `until`: when
    its time is up, on time.monotonic()."""

    def __init__(self, tell: Callable[[str], None], until: float = math.inf) -> None:
        self._tell = tell
        self._until = until
        self.overdue = False  # its time was up
        self.heard = False
        self.deadly: signal.Signals | None = None  # by which the process dies in the end
        self.finishing = False  # nothing but report and results is left to do
        self._deferred = 0
        self._owed = False

    @property
    def why(self) -> str:
        """What ends the run, in words: a Ctrl-C that a test has kept does not, but a signal that came after it."""
        if self.deadly is not None:
            return f"ended by {self.deadly.name}"
        return "its time is up" if self.overdue else "interrupted"

    def heed(self) -> ExitStack:
        """From here to the closing of what is returned a signal is answered at once, and no second one takes the
        report away."""
        with ExitStack() as heeded:
            if threading.current_thread() is threading.main_thread():  # no other may set a handler
                for number, handler in HEEDED.items():
                    if signal.getsignal(number) is handler:
                        signal.signal(number, self._on_signal)
                        heeded.callback(signal.signal, number, handler)
            return heeded.pop_all()

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGTERM and time.monotonic() >= self._until:
            self.overdue = True
        elif number != signal.SIGINT:
            self.deadly = self.deadly or signal.Signals(number)
        # Not SIG_IGN from the first one on: what runs in the tests' processes would inherit it.
        if not self.heard:
            self.hear()
            if self.finishing:
                return
            if not self._deferred:
                raise Interrupted(self.why)
            self._owed = True

    def hear(self) -> None:
        if not self.heard:
            self.heard = True
            self._tell(self.why)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While this lasts a signal raises nothing, but does at its end: what is written comes to be there whole."""
        if threading.current_thread() is not threading.main_thread():  # the only one that hears signals
            yield
            return
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if self._owed and not self._deferred:
            self._owed = False
            raise Interrupted(self.why)

    def before_test(self) -> None:
        """A test may have kept a Ctrl-C for itself, and the next one must be heard. The other signals are for all."""
        if self.deadly is not None or self.overdue:
            raise Interrupted(self.why)
        self.heard = False

    def pass_on(self) -> None:
        """Die by the signal that ended the run, if one did, after all that the interpreter does at its end."""
        if self.deadly is None:
            return
        end_interpreter()
        die_by(self.deadly)


def end_interpreter() -> None:
    """All that the interpreter does at its end."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()  # type: ignore[union-attr]


def die_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
