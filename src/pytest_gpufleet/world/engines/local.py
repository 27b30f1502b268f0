"""Ranks as processes of this machine, forked from one that has imported torch for all of them."""

import atexit
import contextlib
import itertools
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pytest_gpufleet.world.call import RankSpec
from pytest_gpufleet.world.engines import channel, forkserver, processes, rank_files
from pytest_gpufleet.world.engines.channel import ControllerEnd, Garbled
from pytest_gpufleet.world.engines.forkserver import Forkserver
from pytest_gpufleet.world.engines.processes import current_folder
from pytest_gpufleet.world.engines.protocol import Answer, Death, Trace
from pytest_gpufleet.world.engines.rank_files import RankFiles, stack_sizes, wait_for_stacks
from pytest_gpufleet.world.worker import main

PRELOAD = ["torch", "torch.distributed", "cloudpickle", main.__name__]
NEWS_SECONDS = 0.2  # the connection of a dying rank closes a moment before its exit status is there
TURN_SECONDS = 0.005  # between two looks at what is still alive
END_SECONDS = 1.0  # for ranks to go when the controller ends
# What ranks find in their environment unless the controller has something else there.
# CUDA_DEVICE_ORDER: CUDA counts GPUs as nvidia-smi does. The heartbeat is torch's own deadline for a stuck NCCL
# watchdog; ours comes first.
DEFAULTS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(7 * 24 * 3600)}
RECORDED = "2000"  # collectives, by NCCL's flight recorder, which is read after a hang
# The same where all ranks are on this machine: NCCL and Gloo listen on loopback only.
ON_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


@cache
def recorder() -> str:
    """What switches the flight recorder on. torch 2.8 renamed it, and warns of the old name in each rank."""
    major, minor, *_ = version("torch").split(".")
    return "TORCH_FR_BUFFER_SIZE" if (int(major), int(minor)) >= (2, 8) else "TORCH_NCCL_TRACE_BUFFER_SIZE"


@dataclass
class _Rank:
    """`pid` is 0 until it is forked, `exitcode` None until it has ended; `lost`: its death has been reported.
    `request`: no other rank of this engine, in whatever world, has it."""

    request: int
    connection: ControllerEnd
    lifeline: int
    files: RankFiles
    pid: int = 0
    exitcode: int | None = None
    lost: bool = False


class LocalEngine:
    """One process a rank, a socket pair to each. Nothing listens anywhere.

    `network(spec)`: what of the environment of a rank says by which interfaces it talks to ranks of other nodes; None
    if there are none. Modules that are `likely` to be used on ranks are imported for all of them, as far as there is
    time before the first is asked for.
    """

    def __init__(
        self, network: Callable[[RankSpec], Mapping[str, str]] | None = None, likely: Sequence[str] = ()
    ) -> None:
        self._network = network
        self._likely = likely
        self._ranks: dict[int, _Rank] = {}  # by their indexes, as their specs have them
        self._requests = itertools.count()
        self._server: Forkserver | None = None
        self._scratch: rank_files.Scratch | None = None
        self._sent: dict[Path, set[int]] = {}  # parcels in files, and the ranks that have not answered to them yet
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
        rank_files.sweep_scratch()
        self._scratch = made = rank_files.make_scratch()
        self._ranks, packages = {}, forkserver.beside_the_path()
        for spec in specs:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            held, lifeline = os.pipe()
            connection, request = ControllerEnd(ours, made.path), next(self._requests)
            files = rank_files.files_in(made, spec.index)
            self._ranks[spec.index] = _Rank(request, connection, lifeline, files)
            try:
                self._server.fork(request, theirs.fileno(), held)
            finally:
                theirs.close()
                os.close(held)
            found = sys.path, {**packages, **spec.packages}, sys.argv, current_folder(), made.path
            for parcel in (found, (main.main, spec, files, self.environment(spec))):
                pickled = pickle.dumps(parcel, protocol=pickle.HIGHEST_PROTOCOL)
                connection.send(channel.message_or_file(pickled, made.path)[0])

    def environment(self, spec: RankSpec) -> dict[str, str]:
        """What a rank finds when it starts: all that the controller has, DEFAULTS where it has nothing, how ranks of
        several nodes reach each other, what torchrun sets, and what its spec says."""
        counted = {
            "RANK": spec.index,
            "LOCAL_RANK": spec.local_index,
            "WORLD_SIZE": spec.size,
            "LOCAL_WORLD_SIZE": spec.local_size,
        }
        numbers = {name: str(number) for name, number in counted.items()}
        defaults = {**DEFAULTS, recorder(): RECORDED}
        if self._network is None:
            return {**defaults, **ON_LOOPBACK, **os.environ, **numbers, **spec.environment}
        return {**defaults, **os.environ, **self._network(spec), **numbers, **spec.environment}

    def rendezvous(self) -> str:
        assert self._scratch is not None
        return f"file://{self._scratch.store}"

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        ranks = set(ranks)
        assert self._scratch is not None
        message, path = channel.message_or_file(parcel, self._scratch.path)
        if path is not None:
            self._sent[path] = set(ranks)
        for rank in ranks:
            self._ranks[rank].connection.send(message)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register all by which something may happen that `wait` reports: its `data` is an index of a rank, or None."""
        if self._server is None or not self._ranks:
            return
        selector.register(self._server, selectors.EVENT_READ)
        for index, rank in self._ranks.items():
            if not rank.lost:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.connection.has_unsent else 0)
                selector.register(rank.connection, wanted, index)

    def wait(self, timeout: float) -> list[Answer | Death]:
        with selectors.PollSelector() as selector:
            self.watch(selector)
            ready = {key.data for key, _ in selector.select(max(0.0, timeout))}
        if None in ready and (death := self._hear()):
            return [self._lose(index, death) for index, rank in self._ranks.items() if not rank.lost]
        ended = {index for index, rank in self._ranks.items() if rank.exitcode is not None and not rank.lost}
        return [event for index in sorted((ready - {None}) | ended) for event in self._collect(index)]

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

    def _collect(self, index: int) -> list[Answer | Death]:
        rank = self._ranks[index]
        events: list[Answer | Death] = []
        over, how = rank.exitcode is not None, ""  # asked first: what it sent before it died comes before its death
        rank.connection.flush()
        try:
            events = [Answer(index, parcel) for parcel in rank.connection.receive()]
        except EOFError:
            over, how = True, self._why_closed(rank)
        except Garbled as garbled:
            over, how = True, f"for its controller: {garbled}"
        if over:
            events.append(self._lose(index, how or processes.exit_summary(rank.exitcode or 0)))
        elif events:
            for path, ranks in list(self._sent.items()):
                ranks.discard(index)
                if not ranks:
                    path.unlink(missing_ok=True)
                    del self._sent[path]
        return events

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

    def _lose(self, index: int, how: str) -> Death:
        self._ranks[index].lost = True
        return Death(index, how)

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        known = {rank: self._ranks[rank] for rank in ranks if rank in self._ranks}
        asked = [each for each in known.values() if each.pid and each.exitcode is None]
        before = stack_sizes(each.files for each in asked)
        for each in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGUSR2)
                os.kill(each.pid, signal.SIGUSR1)
        wait_for_stacks(before)
        return {rank: each.files.trace(self._state(each), before.get(each.files, 0)) for rank, each in known.items()}

    def _state(self, rank: _Rank) -> str:
        if rank.pid:
            return processes.trouble(rank.pid)
        if self._server is None:
            return ""
        return f"before it was forked from process {self._server.pid} {processes.trouble(self._server.pid)}".rstrip()

    def kill(self, timeout: float) -> dict[int, str]:
        until = time.monotonic() + timeout
        while (alive := self._alive()) and time.monotonic() < until:
            processes.kill(alive)
            while any(map(processes.look, alive)) and time.monotonic() < until:
                time.sleep(TURN_SECONDS)
        self._unkillable |= alive
        left = {index: self._state(rank) for index, rank in self._ranks.items() if rank.pid in alive}
        self._give_up_a_stuck_server()
        self._close(rank_files.Scratch.remove)
        return left

    def _alive(self) -> set[int]:
        """The ranks and all that they have started, without what could not be killed before."""
        if self._server is None:
            return set()
        ranks = {rank.pid for rank in self._ranks.values() if rank.pid}
        return processes.started_by(self._server.pid, ranks) - self._unkillable

    def _give_up_a_stuck_server(self) -> None:
        """Keep the fork server only if it has done all that it was asked to do, and can do more."""
        if self._server is None:
            return
        gone = self._hear()
        if gone or processes.trouble(self._server.pid) or not all(rank.pid for rank in self._ranks.values()):
            self._server.kill()
            self._server = None

    def _close(self, leave: Callable[[rank_files.Scratch], None]) -> None:
        self._sent.clear()
        while self._ranks:  # each once, wherever Ctrl-C comes
            _, rank = self._ranks.popitem()
            rank.connection.close()
            os.close(rank.lifeline)
        made, self._scratch = self._scratch, None
        if made is not None:
            leave(made)

    def _let_go(self) -> None:
        """In a process that was forked from the controller: it must neither use the ranks nor keep them alive."""
        self._close(rank_files.Scratch.let_go)
        if self._server is not None:
            self._server.let_go()
            self._server = None

    def end(self) -> None:
        """End the ranks, and the process that they are forked from."""
        self.kill(END_SECONDS)
        if self._server is not None:
            self._server.kill()
            self._server = None
