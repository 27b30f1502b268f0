"""The head's end of all nodes: where agents dial in, and what carries messages to and from them."""

import os
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.nodes import messages
from pytest_gpufleet.nodes.wire import Line, Listener
from pytest_gpufleet.verdict.fleet.host_runs import expected_as, natural

BEAT = codec.packed(messages.Beat())
BEAT_SECONDS = 1.0
NOT_NEEDED = codec.packed(messages.End(messages.OVER))
TOO_LATE = codec.packed(messages.End("the run has begun without it"))


@dataclass(frozen=True)
class Arrived:
    """A message of a node (messages.FromAgent, packed)."""

    node: int
    message: bytes


@dataclass(frozen=True)
class Gone:
    """Nothing comes from this node any more, and nothing goes there: its agent has ended. `why` goes on where "node 3
    is lost" ends: ": its agent died by SIGKILL"."""

    node: int
    why: str


class Starter(Protocol):
    """Who starts agents: all of them, or that of this host, where a launcher starts the others. By their index."""

    name: str  # "local", "srun", "ray 2.60.0" ...
    secured: Secured
    secret: bytes

    @property
    def own(self) -> Collection[int]:
        """Those whose end is seen here."""

    def start(self, port: int) -> Mapping[int, str]:
        """The names of those that were started. Refused if there is nothing to start agents on."""

    def ended(self) -> dict[int, str]:
        """How each ended of which that is seen here."""

    def close(self, timeout: float) -> dict[int, str]:
        """End those that can be ended from here, by force after `timeout` seconds. Who is left, and why."""


@dataclass(frozen=True)
class _Agent:
    """One that was started: who it is, by which name ZeroMQ knows it, "" if it has not dialled in, and from where."""

    who: messages.DialIn
    wire_name: bytes = b""
    address: str = ""


class Transport:
    """Carries messages, each once and in their order. It judges no silence: presence and deadlines are the
    controller's. Any thread may send; one receives.

    `wanted`: so many nodes are waited for, for `seconds`; None: for as many as `starter` starts. `expected`: names of
    hosts, in the order in which nodes without an index are numbered. `only_expected`: others end at once, and
    well. `port`, `run`: see wire.Listener.
    """

    def __init__(
        self,
        starter: Starter,
        wanted: int | None = None,
        seconds: float = 120.0,
        expected: Sequence[str] = (),
        address: str = "127.0.0.1",
        port: int = 0,
        run: str = "",
        only_expected: bool = False,
    ) -> None:
        self.name = starter.name
        self.secured: Secured = starter.secured
        self.missing: tuple[str, ...] = ()  # who was waited for in vain, as far as anybody knows their names
        self.strangers: tuple[str, ...] = ()  # addresses of those with another secret
        self.dialled: dict[int, messages.DialIn] = {}  # the first message of each node
        self.own: Mapping[int, int | None] = {}  # nodes whose agents `starter` sees, with their index
        self._starter, self._wanted, self._seconds, self._expected = starter, wanted, seconds, expected
        self._only_expected = only_expected
        self._where = (run, address, port)
        self._listener: Listener | None = None
        self._agents: dict[bytes, _Agent] = {}
        self._lines: dict[bytes, Line] = {}
        self._nodes: dict[bytes, int] = {}
        self._wire_names: dict[int, bytes] = {}
        self._early: list[Arrived] = []  # what came before all were there
        self._gone: set[int] = set()
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ------------------------------------------------------------ the beginning

    def start(self) -> Mapping[int, str]:
        """Have agents started and wait until they have dialled in. The nodes by number, with their names."""
        listener = self._listener = Listener(self._starter.secret, *self._where)
        listener.wake_by(self._bell)
        started = self._starter.start(listener.port)
        self.name, self.secured = self._starter.name, self._starter.secured  # known by now
        wanted = self._wanted or len(started)
        until, early = time.monotonic() + self._seconds, []
        while len(self._agents.keys()) < wanted and time.monotonic() < until:
            if set(self._starter.ended()) & started.keys() and len(started) == wanted:
                break
            listener.wait(BEAT_SECONDS)
            early += self._take_in()
            for line in self._lines.values():
                line.send(BEAT)
        names = self._number(started)
        self._early = [Arrived(self._nodes[wire_name], message) for wire_name, message in early]
        if len(self._agents) < wanted:
            self._note_who_is_missing(wanted)
        return names

    def _number(self, started: Mapping[int, str]) -> dict[int, str]:
        """By index; those without one as they are expected, and by name."""
        there = {agent.who.index for agent in self._agents.values()}
        agents = [*self._agents.values()]
        agents += [_Agent(messages.DialIn(name, index)) for index, name in started.items() if index not in there]
        place = {name: number for number, name in enumerate(self._expected)}

        def key(agent: _Agent) -> tuple[object, ...]:
            who = agent.who
            known = place.get(expected_as(who.name, self._expected) or "", len(place))
            return (who.index is None, who.index or 0, known, natural(who.name))

        agents.sort(key=key)
        self._nodes = {agent.wire_name: node for node, agent in enumerate(agents) if agent.wire_name}
        self._wire_names = {node: wire_name for wire_name, node in self._nodes.items()}
        self.dialled = {node: agent.who for node, agent in enumerate(agents) if agent.wire_name}
        self.own = {node: agent.who.index for node, agent in enumerate(agents) if agent.who.index in self._starter.own}
        return dict(enumerate(_names(agents)))

    def _note_who_is_missing(self, wanted: int) -> None:
        assert self._listener is not None
        agents = self._agents.values()
        known = {expected_as(agent.who.name, self._expected) for agent in agents}
        indexes = {agent.who.index for agent in agents}
        self.missing = tuple(name for name in self._expected if name not in known)
        if not self._expected and None not in indexes:
            self.missing = tuple(f"task {index}" for index in range(wanted) if index not in indexes)
        self.strangers = tuple(sorted(self._listener.strangers({agent.address for agent in agents})))

    def _take_in(self) -> list[tuple[bytes, bytes]]:
        """The messages that have come, with who sent them; those that dial in are noted."""
        assert self._listener is not None
        found = []
        for wire_name, frame, address in self._listener.receive(self._lines):
            line = self._lines.get(wire_name)
            if line is None:
                line = Line(lambda frame, to=wire_name: self._listener.send(to, frame))  # type: ignore[misc]
            message = line.take(frame)
            if message is None:
                continue
            if wire_name in self._lines:
                found.append((wire_name, message))
            else:
                self._dialled(wire_name, line, message, address)
        return found

    def _dialled(self, wire_name: bytes, line: Line, message: bytes, address: str) -> None:
        with suppress(ValueError):  # else it is no agent
            who = codec.unpacked(message, messages.DialIn)
            if self._only_expected and expected_as(who.name, self._expected) is None:
                line.send(NOT_NEEDED)
                return
            doubled = who.index is not None and any(agent.who.index == who.index for agent in self._agents.values())
            if self._nodes or doubled:
                line.send(TOO_LATE)
                return
            self._lines[wire_name] = line
            self._agents[wire_name] = _Agent(who, wire_name, address)
            line.send(BEAT)

    # ------------------------------------------------------------ messages

    def send(self, node: int, message: bytes) -> None:
        """Never blocks and never raises: that a node is gone shows in `receive`, or in its silence."""
        self._unsent.append((node, message))
        with suppress(BlockingIOError):  # it is awake by then
            os.eventfd_write(self._bell, 1)

    def receive(self, timeout: float) -> list[Arrived | Gone]:
        """What has come from any node, as soon as anything has; [] after `timeout` seconds. Gone comes once."""
        assert self._listener is not None
        if not self._early and not self._unsent:
            self._listener.wait(timeout)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._unsent:
            node, message = self._unsent.popleft()
            if node in self._wire_names:
                self._lines[self._wire_names[node]].send(message)
        ended = self._starter.ended()
        events: list[Arrived | Gone] = [*self._early]
        self._early = []
        events += [Arrived(self._nodes[wire_name], message) for wire_name, message in self._take_in()]
        for node in self.own.keys() - self._gone:
            if (index := self.own[node]) in ended:
                self._gone.add(node)
                events.append(Gone(node, ended[index]))
        return events

    def close(self, timeout: float) -> dict[int, str]:
        """Those of its own agents that could not be ended, and why."""
        left = self._starter.close(timeout)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            os.close(self._bell)
        return {node: left[index] for node, index in self.own.items() if index is not None and index in left}


def _names(agents: Sequence[_Agent]) -> list[str]:
    """Where several hosts have one name, with what tells them apart."""
    hosts = Counter(agent.who.name for agent in agents)
    places = Counter((agent.who.name, agent.address) for agent in agents)
    return [
        name if hosts[name := agent.who.name] == 1
        else f"{name} ({agent.address if places[name, agent.address] == 1 else number})"
        for number, agent in enumerate(agents, 1)
    ]  # fmt: skip
