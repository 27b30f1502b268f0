"""What carries messages between the controller and the agents of all nodes."""

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.nodes import agent_process
from pytest_gpufleet.nodes.agent_process import AgentProcess, AgentSettings
from pytest_gpufleet.world.engines import processes
from pytest_gpufleet.world.engines.channel import Garbled


@dataclass(frozen=True)
class Arrived:
    """A message of a node (messages.FromAgent, packed)."""

    node: int
    message: bytes


@dataclass(frozen=True)
class Gone:
    """Nothing comes from this node any more, and nothing goes there: its agent has ended, or what carries messages says
    so. `why` goes on where "node 3 is lost" ends: ": its agent died by SIGKILL"."""

    node: int
    why: str


class Transport(Protocol):
    """Starts an agent on each node and carries messages, each once and in their order. It judges no silence: presence
    and deadlines are the controller's. Any thread may send; one receives."""

    name: str  # "local", or "ray" with its version
    secured: Secured  # how it keeps strangers out, once it has started

    def start(self) -> Mapping[int, str]:
        """Start an agent on every node, without waiting for it to say Hello. The nodes by number, with their names.
        Refused if there is nothing to start agents on."""

    def send(self, node: int, message: bytes, later: bool = False) -> None:
        """Never blocks for long and never raises: that a node is gone shows in `receive`. `later`: it may wait for a
        second, if it is cheaper to carry it with something else; messages that follow may not overtake it."""

    def receive(self, timeout: float) -> list[Arrived | Gone]:
        """What has come from any node, as soon as anything has; [] after `timeout` seconds. Gone is told once."""

    def close(self, timeout: float) -> dict[int, str]:
        """End all agents, by force after `timeout` seconds. Those of which nobody knows whether they ended, and why."""


EXIT_SECONDS = 0.2  # the connection of a dying process closes a moment before its exit status is there
KILL_SECONDS = 2.0  # of the time to close
TURN_SECONDS = 0.005  # between two looks at what is still alive


class LocalTransport:
    """An agent for each of these settings, with one end of a socket pair, which is its lifeline too: an agent whose
    controller is gone reads the end of it. `begin` starts one."""

    name = "local"
    secured: Secured = "loopback"  # nothing listens anywhere

    def __init__(
        self, agents: Sequence[AgentSettings], begin: Callable[[AgentSettings], AgentProcess] = agent_process.start
    ) -> None:
        self._settings = agents
        self._begin = begin
        self._agents: dict[int, AgentProcess] = {}
        self._closed: set[int] = set()
        self._sending = threading.Lock()  # of all connections' sending halves, and of the selector
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def start(self) -> Mapping[int, str]:
        for node, settings in enumerate(self._settings):
            agent = self._agents[node] = self._begin(settings)
            self._selector.register(agent.connection, selectors.EVENT_READ, node)
        return {node: settings.name or f"node {node}" for node, settings in enumerate(self._settings)}

    def send(self, node: int, message: bytes, later: bool = False) -> None:
        with self._sending:
            if node in self._closed or node not in self._agents:
                return
            connection = self._agents[node].connection
            waiting = connection.has_unsent
            connection.send(message)
            if connection.has_unsent and not waiting:
                self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, node)
                with suppress(BlockingIOError):  # it is awake by then
                    os.write(self._wake, b".")

    def receive(self, timeout: float) -> list[Arrived | Gone]:
        events: list[Arrived | Gone] = []
        for key, ready in self._selector.select(max(0.0, timeout)):
            if key.fd == self._woken:
                os.read(self._woken, 4096)
                continue
            if ready & selectors.EVENT_WRITE:
                self._flush(key.data)
            if ready & selectors.EVENT_READ:
                events += self._read(key.data)
        return events

    def _flush(self, node: int) -> None:
        with self._sending:
            connection = self._agents[node].connection
            connection.flush()
            if not connection.has_unsent:
                self._selector.modify(connection, selectors.EVENT_READ, node)

    def _read(self, node: int) -> list[Arrived | Gone]:
        agent = self._agents[node]
        try:
            return [Arrived(node, message) for message in agent.connection.receive()]
        except EOFError:
            why = _how_it_ended(agent.process)
        except Garbled as garbled:
            why = str(garbled)
        with self._sending:
            if node in self._closed:  # by another thread
                return []
            self._closed.add(node)
            self._selector.unregister(agent.connection)
            agent.connection.close()
        return [Gone(node, why)]

    def close(self, timeout: float) -> dict[int, str]:
        until = time.monotonic() + timeout
        for agent in self._agents.values():
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(0.0, until - time.monotonic() - KILL_SECONDS))
        started: set[int] = set()
        for agent in self._agents.values():
            if agent.process.poll() is None:
                started |= {*processes.descendants(agent.process.pid), agent.process.pid}
        processes.kill(started)
        while any(map(processes.look, started)) and time.monotonic() < until:
            time.sleep(TURN_SECONDS)
        with self._sending:
            for node in self._agents.keys() - self._closed:
                self._closed.add(node)
                self._agents[node].connection.close()
        left = {node: agent.process.pid for node, agent in self._agents.items() if agent.process.poll() is None}
        return {node: f"process {pid} {processes.trouble(pid)}".rstrip() for node, pid in left.items()}


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"its agent died {processes.exit_summary(process.wait(EXIT_SECONDS))}"
    except subprocess.TimeoutExpired:
        return "its agent closed its connection and lives on"
