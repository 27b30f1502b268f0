"""The head's end of all nodes: where agents dial in, and what carries messages to and from them."""

import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.nodes.agent_process import OwnAgents
from pytest_gpufleet.nodes.messages import BEAT, BEAT_SECONDS, OVER, DialIn, End
from pytest_gpufleet.nodes.wire import Line, Listener
from pytest_gpufleet.verdict.fleet.host_runs import expected_as, natural

NOT_NEEDED, TOO_LATE = (codec.packed(End(why)) for why in (OVER, "the run has begun without it"))


# A message of a node (messages.FromAgent, packed), or why nothing comes from it any more, and nothing goes there: its
# agent has ended, as it goes on where "node 3 is lost" ends (": its agent died by SIGKILL").
Event = tuple[int, bytes | str]


@dataclass
class _Agent:
    """One that was started: who it is; `line` and `address` if it has dialled in; `node` once it has a number."""

    who: DialIn
    line: Line | None = None
    address: str = ""
    node: int = -1


@dataclass
class Transport:
    """Carries messages, each once and in their order. It judges no silence: presence and deadlines are the
    controller's. Any thread may send; one receives.

    `wanted`: so many nodes are waited for, for `seconds`; None: for as many as `starter` starts. `expected`: names of
    hosts, in the order in which nodes without an index are numbered. `only_expected`: others end at once, and
    well. `port`, `run`: see wire.Listener.
    """

    starter: OwnAgents
    wanted: int | None = None
    seconds: float = 120.0
    expected: Sequence[str] = ()
    address: str = "127.0.0.1"
    port: int = 0
    run: str = ""
    only_expected: bool = False
    missing: tuple[str, ...] = ()  # who was waited for in vain, as far as anybody knows their names
    strangers: tuple[str, ...] = ()  # addresses of those with another secret
    own: dict[int, int] = field(default_factory=dict)  # nodes whose agents `starter` sees, with their index
    _listener: Listener | None = None
    _agents: dict[bytes, _Agent] = field(default_factory=dict)  # that have dialled in, as ZeroMQ knows them
    _nodes: list[_Agent] = field(default_factory=list)  # by their number, once all are there
    _early: list[Event] = field(default_factory=list)  # what came before that
    _gone: set[int] = field(default_factory=set)
    _unsent: deque[tuple[int, bytes]] = field(default_factory=deque)
    _bell: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    @property
    def name(self) -> str:
        return self.starter.name

    @property
    def secured(self) -> Secured:
        return self.starter.secured

    @property
    def dialled(self) -> dict[int, DialIn]:
        """The first message of each node."""
        return {agent.node: agent.who for agent in self._nodes if agent.line}

    # ------------------------------------------------------------ the beginning

    def start(self) -> Mapping[int, str]:
        """Have agents started and wait until they have dialled in. The nodes by number, with their names."""
        listener = self._listener = Listener(self.starter.secret, self.run, self.address, self.port)
        listener.wake_by(self._bell)
        started = self.starter.start(listener.port)
        wanted = self.wanted or len(started)
        until, early = time.monotonic() + self.seconds, []
        while len(self._agents) < wanted and time.monotonic() < until:
            if set(self.starter.ended()) & started.keys() and len(started) == wanted:
                break
            listener.wait(BEAT_SECONDS)
            early += self._take_in()
            for agent in self._agents.values():
                if agent.line:
                    agent.line.send(BEAT)
        names = self._number(started)
        self._early = [(agent.node, message) for agent, message in early]
        if len(self._agents) < wanted:
            there = [*self._agents.values()]
            known = {expected_as(agent.who.name, self.expected) for agent in there}
            indexes = {agent.who.index for agent in there}
            self.missing = tuple(name for name in self.expected if name not in known)
            if not self.expected and None not in indexes:
                self.missing = tuple(f"task {index}" for index in range(wanted) if index not in indexes)
            self.strangers = tuple(sorted(listener.strangers({agent.address for agent in there})))
        return names

    def _number(self, started: Mapping[int, str]) -> dict[int, str]:
        """By index; those without one as they are expected, and by name. Where several hosts have one name, with what
        tells them apart."""
        there = {agent.who.index for agent in self._agents.values()}
        agents = [*self._agents.values()]
        agents += [_Agent(DialIn(name, index)) for index, name in started.items() if index not in there]
        place = {name: number for number, name in enumerate(self.expected)}

        def key(agent: _Agent) -> tuple[object, ...]:
            who = agent.who
            known = place.get(expected_as(who.name, self.expected) or "", len(place))
            return (who.index is None, who.index or 0, known, natural(who.name))

        self._nodes = sorted(agents, key=key)
        hosts = Counter(agent.who.name for agent in agents)
        places = Counter((agent.who.name, agent.address) for agent in agents)
        names = {}
        for node, agent in enumerate(self._nodes):
            agent.node, index, name = node, agent.who.index, agent.who.name
            if index is not None and index in self.starter.own:
                self.own[node] = index
            apart = agent.address if places[name, agent.address] == 1 else node + 1
            names[node] = name if hosts[name] == 1 else f"{name} ({apart})"
        return names

    def _take_in(self) -> list[tuple[_Agent, bytes]]:
        """The messages that have come, with who sent them; those that dial in are noted."""
        assert self._listener is not None
        found = []
        for name, frame, address in self._listener.receive(self._agents):
            known = self._agents.get(name)
            line = known.line if known and known.line else Line(partial(self._listener.send, name))
            message = line.take(frame)
            if known and message is not None:
                found.append((known, message))
            elif message is not None:
                self._dialled_in(name, line, message, address)
        return found

    def _dialled_in(self, name: bytes, line: Line, message: bytes, address: str) -> None:
        with suppress(ValueError):  # else it is no agent
            who = codec.unpacked(message, DialIn)
            doubled = who.index is not None and any(agent.who.index == who.index for agent in self._agents.values())
            if self.only_expected and expected_as(who.name, self.expected) is None:
                line.send(NOT_NEEDED)
            elif self._nodes or doubled:
                line.send(TOO_LATE)
            else:
                self._agents[name] = _Agent(who, line, address)
                line.send(BEAT)

    # ------------------------------------------------------------ messages

    def send(self, node: int, message: bytes) -> None:
        """Never blocks and never raises: that a node is gone shows in `receive`, or in its silence."""
        self._unsent.append((node, message))
        with suppress(BlockingIOError):  # it is awake by then
            os.eventfd_write(self._bell, 1)

    def receive(self, timeout: float) -> list[Event]:
        """What has come from any node, as soon as anything has; [] after `timeout` seconds."""
        assert self._listener is not None
        if not self._early and not self._unsent:
            self._listener.wait(timeout)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._unsent:
            node, message = self._unsent.popleft()
            if line := self._nodes[node].line:
                line.send(message)
        ended = self.starter.ended()  # asked first: what it sent before it ended comes before its end
        events, self._early = self._early, []
        events += [(agent.node, message) for agent, message in self._take_in()]
        for node, index in self.own.items():
            if index in ended and node not in self._gone:
                self._gone.add(node)
                events.append((node, ended[index]))
        return events

    def close(self, timeout: float) -> dict[int, str]:
        """Those of its own agents that could not be ended, and why."""
        left = self.starter.close(timeout)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            os.close(self._bell)
        return {node: left[index] for node, index in self.own.items() if index in left}
