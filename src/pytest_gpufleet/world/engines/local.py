"""Ranks as processes of this machine, forked from one that has imported torch for all of them."""

import atexit
import contextlib
import itertools
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pytest_gpufleet.world.call import Answer, Death, RankSpec, Trace
from pytest_gpufleet.world.engines import channel, processes, rank_files
from pytest_gpufleet.world.engines.forkserver import Forkserver
from pytest_gpufleet.world.engines.processes import current_folder
from pytest_gpufleet.world.engines.rank_files import RankFiles
from pytest_gpufleet.world.worker import main

PRELOAD = ["torch", "torch.distributed", "cloudpickle", main.__name__]
NEWS_SECONDS = 0.2  # the connection of a dying rank closes a moment before its exit status is there
TURN_SECONDS = 0.005  # between two looks at what is still alive
STACK_SECONDS, STACK_TURN_SECONDS = 0.3, 0.02  # for ranks to write their stacks, and between two looks at it
# What ranks find in their environment unless the controller has something else there. CUDA counts GPUs as nvidia-smi
# does; the heartbeat is torch's own deadline for a stuck NCCL watchdog, and ours comes first.
DEFAULTS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(7 * 24 * 3600)}
RECORDED = "2000"  # collectives, by NCCL's flight recorder, which is read after a hang
# The same where all ranks are on this machine: NCCL and Gloo listen on loopback only.
ON_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


@cache
def recorder() -> str:
    """What switches the flight recorder on. torch 2.8 renamed it, and warns of the old name in each rank."""
    renamed = tuple(map(int, version("torch").split(".")[:2])) >= (2, 8)
    return "TORCH_FR_BUFFER_SIZE" if renamed else "TORCH_NCCL_TRACE_BUFFER_SIZE"


@dataclass
class _Rank:
    """`pid` is 0 until it is forked, `exitcode` None until it has ended; `lost`: its death has been reported.
    `request`: no other rank of this engine, in whatever world, has it."""

    index: int
    request: int
    connection: socket.socket
    files: RankFiles
    pid: int = 0
    exitcode: int | None = None
    lost: bool = False

    def lose(self, how: str) -> Death:
        self.lost = True
        return Death(self.index, how)


class LocalEngine:
    """One process a rank, a socket pair to each. Nothing listens anywhere. `network(spec)`: variables by which a rank
    finds the interfaces towards other nodes; None if there are none. Modules that are `likely` to be used on ranks are
    imported for all of them, as far as there is time before the first is asked for."""

    def __init__(
        self, network: Callable[[RankSpec], Mapping[str, str]] | None = None, likely: Sequence[str] = ()
    ) -> None:
        self._network, self._likely = network, likely
        self._ranks: dict[int, _Rank] = {}  # by their indexes, as their specs have them
        self._requests = itertools.count()
        self._server: Forkserver | None = None
        self._scratch: tuple[Path, int] | None = None  # the folder of the ranks, and what holds it
        self._unkillable: set[int] = set()
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._let_go)

    def get_ready(self, prepare: Callable[[], None]) -> None:
        """Have torch imported for the ranks, and what `prepare` of their specs needs, while nobody needs them yet."""
        if self._server is None:
            self._server = Forkserver([*PRELOAD, prepare.__module__], self._likely)

    def start(self, specs: Sequence[RankSpec]) -> None:
        self._give_up_a_stuck_server()  # it may have come to harm while nobody needed it
        self.get_ready(specs[0].prepare)
        assert self._server is not None
        folder, _ = self._scratch = rank_files.make_scratch()
        self._ranks = {}
        for spec in specs:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            rank = _Rank(spec.index, next(self._requests), ours, RankFiles(folder, spec.index))
            self._ranks[spec.index] = rank
            with theirs:
                self._server.fork(rank.request, theirs.fileno())
            found = sys.path, sys.argv, current_folder()
            for parcel in (found, (main.main, spec, rank.files, self.environment(spec))):
                channel.offer(ours, channel.Message(pickle.dumps(parcel, protocol=pickle.HIGHEST_PROTOCOL)))

    def environment(self, spec: RankSpec) -> dict[str, str]:
        """What a rank finds when it starts: all that the controller has, DEFAULTS where it has nothing, how ranks of
        several nodes reach each other, what torchrun sets, and what its spec says."""
        defaults = {**DEFAULTS, recorder(): RECORDED, **({} if self._network else ON_LOOPBACK)}
        network = self._network(spec) if self._network else {}
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        numbers = zip(names, map(str, (spec.index, spec.local_index, spec.size, spec.local_size)), strict=True)
        return {**defaults, **os.environ, **network, **dict(numbers), **spec.environment}

    def rendezvous(self) -> str:
        assert self._scratch is not None
        return f"file://{self._scratch[0]}/store"  # no port is open for strangers, and none can be in use already

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        message = channel.Message(parcel)
        for rank in self._ranks.keys() & {*ranks}:
            channel.offer(self._ranks[rank].connection, message)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register all by which something may happen that `wait` reports: its `data` is an index of a rank, or None."""
        if self._server is None or not self._ranks:
            return
        selector.register(self._server, selectors.EVENT_READ)
        for index, rank in self._ranks.items():
            if not rank.lost:
                selector.register(rank.connection, selectors.EVENT_READ, index)

    def wait(self, timeout: float) -> list[Answer | Death]:
        with selectors.PollSelector() as selector:
            self.watch(selector)
            ready = {key.data for key, _ in selector.select(max(0.0, timeout))}
        left = [rank for _, rank in sorted(self._ranks.items()) if not rank.lost]
        if None in ready and (how := self._hear()):
            return [rank.lose(how) for rank in left]
        changed = [rank for rank in left if rank.index in ready or rank.exitcode is not None]
        return [event for rank in changed for event in self._collect(rank)]

    def _hear(self) -> str:
        """Take in the news of the fork server. How ranks are lost if it is gone itself, else ""."""
        assert self._server is not None
        ranks = {rank.request: rank for rank in self._ranks.values()}
        try:
            for request, pid, exitcode in self._server.news():
                if rank := ranks.get(request):  # else of an earlier world
                    rank.pid, rank.exitcode = pid, exitcode
        except EOFError:
            exitcode = self._server.exitcode()
            how = "" if exitcode is None else f", which died {processes.exit_summary(exitcode)}"
            return f"with the process that all ranks are forked from{how}"
        return ""

    def _collect(self, rank: _Rank) -> list[Answer | Death]:
        events: list[Answer | Death] = []
        over, how = rank.exitcode is not None, ""  # asked first: what it sent before it died comes before its death
        try:
            events = [Answer(rank.index, parcel) for parcel in channel.received(rank.connection)]
        except EOFError:
            over, how = True, self._why_closed(rank)
        except channel.Garbled as garbled:
            over, how = True, f"for its controller: {garbled}"
        return [*events, rank.lose(how or processes.exit_summary(rank.exitcode or 0))] if over else events

    def _why_closed(self, rank: _Rank) -> str:
        """ "" if the rank has ended, as its exit status says."""
        deadline = time.monotonic() + NEWS_SECONDS
        while rank.exitcode is None and time.monotonic() < deadline and not self._hear():
            time.sleep(TURN_SECONDS)
        if rank.exitcode is not None:
            return ""
        if processes.look(rank.pid):
            return "for its controller: it closed its connection and lives on"
        assert self._server is not None
        parent = self._server.pid
        unknown = f"in a way that only process {parent} knows, from which it was forked and which does not answer"
        return f"{unknown} {processes.trouble(parent)}".rstrip()

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        known = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        asked = [rank for rank in known if rank.pid and rank.exitcode is None]
        before = last = {rank.files: rank.files.stack_bytes() for rank in asked}
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR2)
                os.kill(rank.pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        while before and time.monotonic() < until:
            now = {files: files.stack_bytes() for files in before}
            if now == last and all(now[files] > size for files, size in before.items()):
                break  # all have written, and nobody is still writing
            last = now
            time.sleep(STACK_TURN_SECONDS)
        return {rank.index: rank.files.trace(self._state(rank), before.get(rank.files, 0)) for rank in known}

    def _state(self, rank: _Rank) -> str:
        if rank.pid or self._server is None:
            return processes.trouble(rank.pid)
        return f"before it was forked from process {self._server.pid} {processes.trouble(self._server.pid)}".rstrip()

    def kill(self, timeout: float) -> dict[int, str]:
        alive = processes.end(self._alive, timeout)
        self._unkillable |= alive
        left = {index: self._state(rank) for index, rank in self._ranks.items() if rank.pid in alive}
        self._give_up_a_stuck_server()
        self._close(remove=True)
        return left

    def _alive(self) -> set[int]:
        """The ranks and all that they have started, without what could not be killed before."""
        ranks = {rank.pid for rank in self._ranks.values() if rank.pid}
        return processes.started_by(self._server.pid, ranks) - self._unkillable if self._server else set()

    def _give_up_a_stuck_server(self) -> None:
        """Keep the fork server only if it has done all that it was asked to do, and can do more."""
        server = self._server
        if server and (self._hear() or processes.trouble(server.pid) or 0 in {of.pid for of in self._ranks.values()}):
            server.kill()
            self._server = None

    def _close(self, remove: bool) -> None:
        while self._ranks:  # each once, wherever Ctrl-C comes
            _, rank = self._ranks.popitem()
            rank.connection.close()
        (folder, held), self._scratch = self._scratch or (None, -1), None
        if folder is not None:
            if remove:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

    def _let_go(self) -> None:
        """In a process that was forked from the controller: it must neither use the ranks nor keep them alive."""
        self._close(remove=False)
        if self._server is not None:
            self._server.let_go()
            self._server = None

    def end(self) -> None:
        """End the ranks, and the process that they are forked from."""
        self.kill(timeout=1.0)  # ranks go when the controller ends
        if self._server is not None:
            self._server.kill()
            self._server = None
