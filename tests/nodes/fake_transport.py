"""A transport without agents or time: what comes from nodes, and when, is told to it."""

import queue
import threading

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.nodes.messages import End, Hello, Message, ToAgent
from pytest_gpufleet.nodes.transport import Event

LONG = 30.0  # seconds; nothing here lasts for so long, unless it is broken


def hello(node: int = 0, **other: object) -> Hello:
    usual = Hello(None, 1000 + node, "eth0", GpuTopology(()), (), HostFound())
    return msgspec.structs.replace(usual, **other)


class FakeTransport:
    """`greeting`: the nodes that say Hello when they are started. `deaf`: those that do not end when they are told to.
    `now`: the clock."""

    name = "fake"
    secured = "loopback"
    own = missing = strangers = ()

    def __init__(self, nodes: int = 3, greeting: range | tuple[int, ...] | None = None, deaf: tuple[int, ...] = ()):
        self.own = self.names = {node: f"gf{node}" for node in range(nodes)}
        self.sent: list[tuple[int, ToAgent]] = []
        self.now = 0.0
        self._deaf = deaf
        self._greeting = range(nodes) if greeting is None else greeting
        self._steps: queue.SimpleQueue[tuple[float, list[Event]]] = queue.SimpleQueue()
        self._happened = self._entered = 0
        self._turned = threading.Condition()
        self._ending = False

    def clock(self) -> float:
        return self.now

    def start(self) -> dict[int, str]:
        for node in self._greeting:
            self._steps.put((0.0, [(node, codec.packed(hello(node)))]))
            self._happened += 1
        return self.names

    def send(self, node: int, message: bytes) -> None:
        self.sent.append((node, codec.unpacked(message, ToAgent)))
        if isinstance(self.sent[-1][1], End):
            self._ending = True
            self._steps.put((0.0, [] if node in self._deaf else [(node, "its agent ended")]))

    def receive(self, timeout: float) -> list[Event]:
        with self._turned:
            self._entered += 1
            self._turned.notify_all()
        try:
            seconds, events = self._steps.get(timeout=0.01 if self._ending else LONG)
        except queue.Empty:
            return []
        self.now += seconds
        return events

    def happens(self, *said: tuple[int, Message] | Event, after: float = 0.0) -> None:
        """This comes from nodes after so many seconds, and the controller has taken it in."""
        events = [(node, what if isinstance(what, bytes | str) else codec.packed(what)) for node, what in said]
        self._happened += 1
        self._steps.put((after, events))
        with self._turned:
            assert self._turned.wait_for(lambda: self._entered > self._happened, LONG)

    def told(self, node: int, kind: type) -> list[ToAgent]:
        return [message for to, message in self.sent if to == node and isinstance(message, kind)]

    def close(self, timeout: float) -> dict[int, str]:
        return dict.fromkeys(self._deaf, "it does not end")
