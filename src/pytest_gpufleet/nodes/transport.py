"""What carries messages between the controller and the agents of all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pytest_gpufleet.model.event_values import Secured


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
