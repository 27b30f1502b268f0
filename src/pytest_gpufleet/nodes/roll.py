"""Which nodes take part in a run, which are lost or left out, and what is known of each."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes.messages import Greeting, Hello, Pulse


@dataclass(frozen=True)
class Lost:
    """A node that the run goes on without. `why` goes on where "gf1 is lost" ends: ": its agent died by SIGKILL"."""

    name: str
    why: str


@dataclass
class Roll:
    """All by the number of the node.

    `names`: every node on which an agent was started. `strangers`: lost ones whose first message this version cannot
    read. `clocks_ahead`: by how many seconds a node's clock is ahead of this one's. `left_out`: why. `fenced`: lost and
    back, or left out: an agent is there that takes no part. `gone`: nothing reaches them any more.
    """

    names: dict[int, str] = field(default_factory=dict)
    hellos: dict[int, Hello] = field(default_factory=dict)
    strangers: dict[int, Greeting] = field(default_factory=dict)
    pulses: dict[int, Pulse] = field(default_factory=dict)
    clocks_ahead: dict[int, float] = field(default_factory=dict)
    lost: dict[int, Lost] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def takes_part(self, node: int) -> bool:
        return node in self.names and node not in self.lost and node not in self.left_out

    @property
    def alive(self) -> tuple[int, ...]:
        """Those that take part and have said Hello."""
        return tuple(sorted(filter(self.takes_part, self.hellos)))

    @property
    def starting(self) -> set[int]:
        """Those of which nothing is known yet."""
        return self.names.keys() - self.hellos.keys() - self.lost.keys()

    @property
    def listening(self) -> set[int]:
        """Those whose agent hears what it is told, as far as one knows."""
        return self.names.keys() - self.gone - (self.lost.keys() - self.fenced)

    def lose(self, node: int, why: str) -> Lost | None:
        """None if it took no part any more."""
        if not self.takes_part(node):
            return None
        self.lost[node] = Lost(self.names[node], why)
        return self.lost[node]

    def hello(self, node: int, hello: Hello) -> None:
        self.hellos[node] = hello

    def stranger(self, node: int, message: bytes) -> None:
        """What it sent cannot be read. If that was its Hello, note what it says in every version."""
        with suppress(ValueError):
            self.strangers[node] = codec.unpacked(message, Greeting)

    def pulse(self, node: int, pulse: Pulse) -> None:
        """The longer a pulse is on its way, the more its clock seems to be behind: the fastest one counts."""
        self.pulses[node] = pulse
        self.clocks_ahead[node] = max(self.clocks_ahead.get(node, float("-inf")), pulse.clock - time.time())
