"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
import signal
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass

# proc(5): states in which a process cannot answer.
CANNOT_ANSWER = {
    "T": "(stopped by a signal)",
    "t": "(stopped by a debugger)",
    "D": "(in a system call that cannot be interrupted, such as one of the GPU driver)",
}
DEAD = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    """`state` as in proc(5)."""

    pid: int
    state: str
    parent: int
    session: int


def look(pid: int) -> Process | None:
    """None if there is no such process, or nothing but its exit status is left of it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state.decode() in DEAD else Process(pid, state.decode(), int(parent), int(session))


def trouble(pid: int) -> str:
    """Why a process cannot answer, "" if nothing is known of that."""
    process = look(pid)
    return CANNOT_ANSWER.get(process.state, "") if process else ""


def started_by(server: int, sessions: Container[int] = ()) -> set[int]:
    """All descendants of `server` that have left its session, and all processes of these other sessions.

    A descendant whose parent has ended stays one, since `server` adopts it.
    """
    running = {process.pid: process for name in os.listdir("/proc") if name.isdigit() and (process := look(int(name)))}
    found = {server} | {pid for pid, process in running.items() if process.session in sessions}
    while more := {pid for pid, process in running.items() if process.parent in found} - found:
        found |= more
    return {pid for pid in found - {server} if running[pid].session != server}


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
