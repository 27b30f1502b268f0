"""Ranks as processes of this machine, forked from one that has imported torch for all of them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.world.engines import processes
from pytest_gpufleet.world.engines.channel import ControllerEnd, Garbled
from pytest_gpufleet.world.engines.forkserver import Forkserver
from pytest_gpufleet.world.engines.protocol import Death, Message
from pytest_gpufleet.world.rank import RankSpec
from pytest_gpufleet.world.rank_failure import exit_summary
from pytest_gpufleet.world.worker import main

PRELOAD = ["torch", "torch.distributed", "cloudpickle", "pytest", main.__name__]
NEWS_SECONDS = 0.2  # the connection of a dying rank closes a moment before its exit status is there
TURN_SECONDS = 0.005  # between two looks at what is still alive
END_SECONDS = 1.0  # for ranks to go when the controller ends


@dataclass
class _Rank:
    """`pid` is 0 until it is forked, `exitcode` None until it has ended; `lost`: its death has been told. `request`: no
    other rank of this engine, in whatever world, has it."""

    request: int
    connection: ControllerEnd
    lifeline: int
    pid: int = 0
    exitcode: int | None = None
    lost: bool = False


class LocalEngine:
    """One process a rank, a socket pair to each. Nothing listens anywhere."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._requests = itertools.count()
        self._server: Forkserver | None = None
        self._unkillable: set[int] = set()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._let_go)

    def start(self, specs: Sequence[RankSpec]) -> None:
        self._give_up_a_stuck_server()  # it may have come to harm while nobody needed it
        if self._server is None:
            self._server = Forkserver(PRELOAD)
        self._ranks = []
        for spec in specs:
            ours, theirs = socket.socketpair()
            held, lifeline = os.pipe()
            connection, request = ControllerEnd(ours), next(self._requests)
            self._ranks.append(_Rank(request, connection, lifeline))
            try:
                self._server.fork(request, theirs.fileno(), held)
            finally:
                theirs.close()
                os.close(held)
            connection.send((sys.path, sys.argv, _folder()))
            connection.send((main.main, spec))

    def submit(self, rank: int, message: Any) -> None:
        self._ranks[rank].connection.send(message)

    def wait(self, timeout: float) -> list[Message | Death]:
        assert self._server is not None
        with selectors.PollSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            for index, rank in enumerate(self._ranks):
                if not rank.lost:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.connection.has_unsent else 0)
                    selector.register(rank.connection, wanted, index)
            ready = {key.data for key, _ in selector.select(max(0.0, timeout))}
        if None in ready and (death := self._hear()):
            return [self._lose(index, death) for index, rank in enumerate(self._ranks) if not rank.lost]
        ended = {index for index, rank in enumerate(self._ranks) if rank.exitcode is not None and not rank.lost}
        return [event for index in sorted((ready - {None}) | ended) for event in self._collect(index)]

    def _hear(self) -> str:
        """Take in what the fork server tells. How ranks are lost if it is gone itself, else ""."""
        assert self._server is not None
        ranks = {rank.request: rank for rank in self._ranks}
        try:
            for news in self._server.news():
                if rank := ranks.get(news.request):  # else of an earlier world
                    rank.pid, rank.exitcode = news.pid, news.exitcode
        except EOFError:
            exitcode = self._server.exitcode()
            how = "" if exitcode is None else f", which died {exit_summary(exitcode)}"
            return f"with the process that all ranks are forked from{how}"
        return ""

    def _collect(self, index: int) -> list[Message | Death]:
        rank = self._ranks[index]
        events: list[Message | Death] = []
        over, how = rank.exitcode is not None, ""  # asked first: what it sent before it died comes before its death
        rank.connection.flush()
        try:
            events = [Message(index, content) for content in rank.connection.receive()]
        except EOFError:
            over, how = True, self._why_closed(rank)
        except Garbled as garbled:
            over, how = True, f"for its controller: {garbled}"
        if over:
            events.append(self._lose(index, how or exit_summary(rank.exitcode or 0)))
        return events

    def _why_closed(self, rank: _Rank) -> str:
        """ "" if the rank has ended, which its exit status tells."""
        deadline = time.monotonic() + NEWS_SECONDS
        while rank.exitcode is None and time.monotonic() < deadline and not self._hear():
            time.sleep(TURN_SECONDS)
        if rank.exitcode is not None:
            return ""
        if processes.look(rank.pid):
            return "for its controller: it closed its connection and lives on"
        assert self._server is not None
        told = (
            f"in a way that only process {self._server.pid} knows, from which it was forked and which does not answer"
        )
        return f"{told} {processes.trouble(self._server.pid)}".rstrip()

    def _lose(self, index: int, how: str) -> Death:
        self._ranks[index].lost = True
        return Death(index, how)

    def interrupt(self, rank: int) -> None:
        if (process := self._ranks[rank]).pid and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR2)
                os.kill(process.pid, signal.SIGUSR1)

    def state(self, rank: int) -> str:
        if self._server is None or rank >= len(self._ranks):  # it was not even asked for
            return ""
        if pid := self._ranks[rank].pid:
            return processes.trouble(pid)
        return f"before it was forked from process {self._server.pid} {processes.trouble(self._server.pid)}".rstrip()

    def kill(self, timeout: float) -> list[int]:
        until = time.monotonic() + timeout
        while (alive := self._alive()) and time.monotonic() < until:
            processes.kill(alive)
            while any(map(processes.look, alive)) and time.monotonic() < until:
                time.sleep(TURN_SECONDS)
        self._unkillable |= alive
        left = [index for index, rank in enumerate(self._ranks) if rank.pid in alive]
        self._give_up_a_stuck_server()
        self._close_connections()
        return left

    def _alive(self) -> set[int]:
        """The ranks and all that they have started, without what could not be killed before."""
        if self._server is None:
            return set()
        ranks = {rank.pid for rank in self._ranks if rank.pid}
        return processes.started_by(self._server.pid, ranks) - self._unkillable

    def _give_up_a_stuck_server(self) -> None:
        """Keep the fork server only if it has done all that it was asked to do, and can do more."""
        if self._server is None:
            return
        gone = self._hear()
        if gone or processes.trouble(self._server.pid) or not all(rank.pid for rank in self._ranks):
            self._server.kill()
            self._server = None

    def _close_connections(self) -> None:
        while self._ranks:  # each once, wherever Ctrl-C comes
            rank = self._ranks.pop()
            rank.connection.close()
            os.close(rank.lifeline)

    def _let_go(self) -> None:
        """In a process that was forked from the controller: it must neither use the ranks nor keep them alive."""
        self._close_connections()
        if self._server is not None:
            self._server.let_go()
            self._server = None

    def _end(self) -> None:
        self.kill(END_SECONDS)
        if self._server is not None:
            self._server.kill()


def _folder() -> str:
    with contextlib.suppress(OSError):  # it was removed
        return os.getcwd()
    return ""
