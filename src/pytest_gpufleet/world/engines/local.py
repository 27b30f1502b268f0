"""Ranks as processes of this machine: multiprocessing's forkserver, so that torch is imported once for all of them."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pytest_gpufleet.world import worker
from pytest_gpufleet.world.engines.channel import ControllerEnd, Garbled, RankEnd
from pytest_gpufleet.world.engines.protocol import Death, Message
from pytest_gpufleet.world.failures import exit_summary
from pytest_gpufleet.world.rank import RankSpec

# proc(5): states in which a process cannot answer.
PROCESS_STATES = {
    "T": "(stopped by a signal)",
    "t": "(stopped by a debugger)",
    "D": "(in a system call that cannot be interrupted, such as one of the GPU driver)",
}

PRELOAD = ["torch", "torch.distributed", "cloudpickle", "pytest", worker.__name__]


class LocalEngine:
    """One process a rank, a pipe to each. Nothing listens on a port."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[ControllerEnd] = []
        self._lifelines: list[Connection] = []
        self._gone: set[int] = set()
        atexit.register(self.kill, 1.0)  # before multiprocessing's own handler, which would wait for the ranks

    def start(self, specs: Sequence[RankSpec]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._processes, self._pipes, self._lifelines = [], [], []
        self._gone = set()
        for spec in specs:
            ours, theirs = socket.socketpair()
            lifeline_end, lifeline = context.Pipe(duplex=False)
            process = context.Process(
                target=worker.main, args=(RankEnd(theirs), lifeline_end, spec), name=f"gpufleet-rank-{spec.index}"
            )
            process.start()
            theirs.close()
            lifeline_end.close()
            self._processes.append(process)
            self._pipes.append(ControllerEnd(ours))
            self._lifelines.append(lifeline)

    def submit(self, rank: int, message: Any) -> None:
        self._pipes[rank].send(message)

    def wait(self, timeout: float) -> list[Message | Death]:
        with selectors.PollSelector() as selector:
            for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True)):
                if rank not in self._gone:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pipe.has_unsent else 0)
                    selector.register(pipe, wanted, rank)
                    selector.register(process.sentinel, selectors.EVENT_READ, rank)
            ready = selector.select(max(0.0, timeout))
        return [event for rank in sorted({key.data for key, _ in ready}) for event in self._collect(rank)]

    def _collect(self, rank: int) -> list[Message | Death]:
        process, pipe = self._processes[rank], self._pipes[rank]
        events: list[Message | Death] = []
        dead = not process.is_alive()  # asked first: what it sent before it died comes before its death
        lost = ""
        pipe.flush()
        try:
            events = [Message(rank, content) for content in pipe.receive()]
        except EOFError:
            process.join(0.2)  # the pipe of a dying process closes a moment before its exit status is there
            dead, lost = True, "it closed its connection and lives on" if process.is_alive() else ""
        except Garbled as garbled:
            dead, lost = True, str(garbled)
        if dead:
            self._gone.add(rank)
            events.append(Death(rank, f"for its controller: {lost}" if lost else exit_summary(process.exitcode or 0)))
        return events

    def interrupt(self, rank: int) -> None:
        process = self._processes[rank]
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR2)
                os.kill(process.pid, signal.SIGUSR1)

    def state(self, rank: int) -> str:
        try:
            stat = Path(f"/proc/{self._processes[rank].pid}/stat").read_text()
        except (OSError, IndexError):
            return ""
        return PROCESS_STATES.get(stat.rpartition(")")[2].split()[0], "")

    def kill(self, timeout: float) -> list[int]:
        alive = {rank: process for rank, process in enumerate(self._processes) if process.is_alive()}
        for process in self._processes:
            _kill_group(process)
        deadline = time.monotonic() + timeout
        while alive and (remaining := deadline - time.monotonic()) > 0:
            done = wait([process.sentinel for process in alive.values()], remaining)
            for rank, process in list(alive.items()):
                if process.sentinel in done:
                    process.join()
                    del alive[rank]
        for pipe in self._pipes:
            pipe.close()
        for lifeline in self._lifelines:
            lifeline.close()
        self._processes, self._pipes, self._lifelines = [], [], []
        return sorted(alive)


def _kill_group(process: BaseProcess) -> None:
    """Kill a rank and whatever it started (data loader workers, compilers)."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # gone, or not yet the leader of its own group
        if process.is_alive():
            process.kill()
