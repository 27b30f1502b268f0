"""What ends a run early and still leaves its report: Ctrl-C, SIGTERM (of `timeout`, a scheduler, `docker stop`) and
SIGHUP (of a terminal that is closed). After the last two the process dies by that signal, as its sender expects. A
SIGTERM that comes when the time of the run is up is that of its supervisor (hard_end), and ends it by its verdict."""

import atexit
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# With what stands there in a process that nobody has told otherwise: nohup, a debugger and other programs do.
HEEDED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt for which pytest shows no place in the code, as if that had been at fault."""

    __module__ = "builtins"  # of the name, only the class is shown: as of the exceptions that pytest ends tests by


class Interruption:
    """Whether this run was told to end. `tell(what)` is called once. `until`: its time is up (time.monotonic())."""

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
        """Until what is returned is closed, a signal is answered at once, and no second one takes the report away."""
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
        if self.deadly is not None:
            end_interpreter()
            die_by(self.deadly)


def end_interpreter() -> None:
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()  # type: ignore[union-attr]


def die_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# The hard end of a run: it gets a process of its own, and the one that was started sees to it that it is over in time.
# A process that is stuck in a driver cannot be ended, not even by SIGKILL, and a wait for it never ends. So what a
# prolog waits for is the supervisor, which touches no GPU and leaves a stuck process behind.

# Before the deadline. A run that is told to end has taken 2 to 7 s for its report and up to 10 s to kill its ranks.
REPORT_SECONDS = 30.0
LAST_SECONDS = 10.0  # for the supervisor, where the run has not done it
KILL_SECONDS = 3.0  # for what is killed to be gone
TURN_SECONDS = 0.2  # between two looks, where no signal tells


@dataclass(frozen=True)
class Supervised:
    """`until`: when the run is told to end, on time.monotonic(), which all processes of a machine share."""

    until: float
    pipe: int  # to which the run writes the path of its folder


def supervise(run: Callable[[Supervised], int], seconds: float) -> tuple[int | None, Path | None]:
    """`run()` in a process of its own, which is over `seconds` from now but for LAST_SECONDS, with all that it has
    started. Signals are passed on to it, and if it dies by one, so does this process. Its exit status, None if it had
    to be ended; and the folder of its evidence, if it had any."""
    from pytest_gpufleet.world.engines import processes  # of which a plain pytest run loads nothing

    until = time.monotonic() + seconds
    reading, pipe = os.pipe()
    forwarded = {number for number in HEEDED if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded | {signal.SIGCHLD})
    processes.adopt()  # what the run leaves behind stays ours, and can be killed
    supervisor, child = os.getpid(), os.fork()
    if child == 0:
        processes.end_with_parent(supervisor)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        _live(run, Supervised(until - REPORT_SECONDS, pipe))
    os.close(pipe)
    try:
        ended = in_time = _await(child, until - REPORT_SECONDS, forwarded)
        if ended is None:
            os.kill(child, signal.SIGTERM)
            ended = _await(child, until - LAST_SECONDS, forwarded)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = None if ended is None else os.waitstatus_to_exitcode(ended)
    if status is not None and status < 0 and in_time is not None:
        die_by(-status)
    if status is None or status < 0:
        status = None
        processes.kill([child])  # what it leaves behind may then clean up
        gone = time.monotonic() + KILL_SECONDS
        while processes.descendants(supervisor) and time.monotonic() < gone:
            time.sleep(TURN_SECONDS / 10)
        processes.end(lambda: processes.descendants(supervisor), KILL_SECONDS)  # but for what cannot be killed
    with os.fdopen(reading, "rb") as file:
        os.set_blocking(reading, False)
        folder = file.read(4096)  # PATH_MAX of Linux
    return status, Path(os.fsdecode(folder)) if folder else None


def _live(run: Callable[[Supervised], int], supervised: Supervised) -> NoReturn:
    """The process of the run, which ends here, whatever stands below on its stack."""
    status = 3  # as pytest.ExitCode.INTERNAL_ERROR
    try:
        status = run(supervised)
    except BaseException:
        traceback.print_exc()
    end_interpreter()
    os._exit(status)


def _await(child: int, until: float, forwarded: set[signal.Signals]) -> int | None:
    """The wait status of `child`, None if it has none in time. What is told to this process is told to it."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        left = until - time.monotonic()
        if left <= 0:
            return None
        heard = signal.sigtimedwait(forwarded | {signal.SIGCHLD}, min(left, TURN_SECONDS))
        if heard and heard.si_signo in forwarded and heard.si_code != 0x80:
            os.kill(child, heard.si_signo)  # not SI_KERNEL (asm-generic/siginfo.h): all here get Ctrl-C on a terminal
