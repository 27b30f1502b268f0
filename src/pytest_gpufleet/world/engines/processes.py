"""Processes of this machine, as /proc shows them."""

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

# proc(5): states in which a process cannot answer.
CANNOT_ANSWER = {
    "T": "(stopped by a signal)",
    "t": "(stopped by a debugger)",
    "D": "(in a system call that cannot be interrupted, such as one of the GPU driver)",
}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TURN_SECONDS = 0.05  # until it is looked for processes again that have just been started
F_SETSIG = 10  # linux/fcntl.h; Python has no name for it


class Process(NamedTuple):
    """`state` as in proc(5)."""

    state: str
    parent: int
    session: int


def look(pid: int) -> Process | None:
    """None if there is no such process, or nothing but its exit status is left of it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    state, parent, session, threads = (fields[number] for number in (0, 1, 3, 17))
    # The first thread may be dead while another one lives on, stuck in the driver, and still has all children.
    return None if state in ("Z", "X", "x") and int(threads) <= 1 else Process(state, int(parent), int(session))


def trouble(pid: int) -> str:
    """Why a process cannot answer, "" if nothing is known of that."""
    process = look(pid)
    return CANNOT_ANSWER.get(process.state, "") if process else ""


def started_by(server: int, sessions: Container[int] = ()) -> set[int]:
    """All descendants of `server` (it adopts those of dead parents) outside its session, and all of these sessions."""
    # Looked at one by one: one that is adopted just then may be missed, but not twice.
    for _ in range(2):
        running = _running()
        found = _with_descendants({server, *(each for each in running if running[each].session in sessions)}, running)
        if started := {pid for pid in found - {server} if running[pid].session != server}:
            return started
    return set()


def descendants(pid: int) -> set[int]:
    """All processes that `pid` has started, and that these have, as long as those between are there."""
    return _with_descendants({pid}, _running()) - {pid}


def _running() -> dict[int, Process]:
    return {int(name): process for name in os.listdir("/proc") if name.isdigit() and (process := look(int(name)))}


def _with_descendants(found: set[int], running: Mapping[int, Process]) -> set[int]:
    while more := {pid for pid, process in running.items() if process.parent in found} - found:
        found = found | more
    return found


def current_folder() -> str:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return ""


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end(find: Callable[[], set[int]], seconds: float) -> set[int]:
    """Kill what is found until nothing is, or the time is up; what is left then, stuck in a driver."""
    until = time.monotonic() + seconds
    while (alive := find()) and time.monotonic() < until:
        kill(alive)
        found_again = time.monotonic() + TURN_SECONDS
        while any(map(look, alive)) and time.monotonic() < min(until, found_again):
            time.sleep(TURN_SECONDS / 10)
    return alive


def adopt() -> None:
    """Whoever loses its parent below this process becomes its child, and no child of init, so that it can be killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, whoever holds the GIL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def end_with(lifeline: int, group: int, by: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to a process group when the other end of a pipe or socket is closed, however who
    held it has ended, or when it is written to. A process of the group has to keep `lifeline` open."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, F_SETSIG, by)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def exit_summary(exitcode: int) -> str:
    """What an exit status means in words; a negative one is a signal."""
    if exitcode == -signal.SIGKILL:
        return "by SIGKILL (somebody killed it; the kernel's out-of-memory killer does so too: see dmesg)"
    if exitcode >= 0:
        return f"with exit status {exitcode}"
    try:
        return f"by {signal.Signals(-exitcode).name} ({signal.strsignal(-exitcode)})"
    except ValueError:
        return f"by signal {-exitcode}"
