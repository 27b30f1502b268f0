"""A transport without agents or time: what comes from nodes, and when, is told to it."""

import queue
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.place import GpuTopology
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.nodes.messages import End, Hello, ToAgent

LONG = 30.0  # seconds; nothing here lasts for so long, unless it is broken


def hello(node=0, **other):
    usual = Hello(None, 1000 + node, "eth0", GpuTopology(()), (), HostFound())
    return msgspec.structs.replace(usual, **other)


class FakeTransport:
    """`greeting`: the nodes that say Hello when they are started. `deaf`: those that do not end when they are told to.
    `now`: the clock."""

    def __init__(self, nodes=3, greeting=None, deaf=()):
        self.names = {node: f"gf{node}" for node in range(nodes)}
        self.starter = SimpleNamespace(own=(*self.names,))
        self.sent = []
        self.now = 0.0
        self._deaf = deaf
        self._greeting = range(nodes) if greeting is None else greeting
        self._steps = queue.SimpleQueue()
        self._happened = self._entered = 0
        self._turned = threading.Condition()
        self._ending = False

    def clock(self):
        return self.now

    def start(self):
        for node in self._greeting:
            self._steps.put((0.0, [(node, codec.packed(hello(node)))]))
            self._happened += 1
        return self.names

    def send(self, node, message):
        self.sent.append((node, codec.unpacked(message, ToAgent)))
        if isinstance(self.sent[-1][1], End):
            self._ending = True
            self._steps.put((0.0, [] if node in self._deaf else [(node, "its agent ended")]))

    def receive(self, timeout):
        with self._turned:
            self._entered += 1
            self._turned.notify_all()
        try:
            seconds, events = self._steps.get(timeout=0.01 if self._ending else LONG)
        except queue.Empty:
            return []
        self.now += seconds
        return events

    def happens(self, *said, after=0.0):
        """This comes from nodes after so many seconds, and the controller has taken it in."""
        events = [(node, what if isinstance(what, bytes | str) else codec.packed(what)) for node, what in said]
        self._happened += 1
        self._steps.put((after, events))
        with self._turned:
            assert self._turned.wait_for(lambda: self._entered > self._happened, LONG)

    def told(self, node, kind):
        return [message for to, message in self.sent if to == node and isinstance(message, kind)]

    def close(self, timeout):
        return dict.fromkeys(self._deaf, "it does not end")


@contextmanager
def running(transport, timeout=LONG):
    cluster = Cluster(transport, lost_after=10.0, clock=transport.clock)
    try:
        cluster.start(timeout)
        yield cluster
    finally:
        cluster.close(1.0)
