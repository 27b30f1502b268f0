"""The controller's end of one agent, for tests of the agent alone."""

import itertools
import os
import time
from collections import deque
from contextlib import contextmanager, suppress

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes import messages, wire
from pytest_gpufleet.nodes.launchers import OwnAgents
from pytest_gpufleet.nodes.wire import Transport
from pytest_gpufleet.world.engines import processes
from tests.forked import is_nursery

PATIENCE = 300.0  # seconds: far more than anything here takes


class Controller:
    """`heard`: what has come and nobody has asked for yet. `process`: the agent. `dialled`: its first message."""

    def __init__(self, settings):
        settings, secret = msgspec.structs.replace(settings, index=0), os.urandom(wire.KEY_BYTES)
        starter = OwnAgents("local", "loopback", secret, [settings])
        self.transport = Transport(starter, seconds=PATIENCE)
        self.transport.start()
        self.process, self.dialled = starter._processes[0], self.transport.dialled[0]
        self.heard, self._gone = deque(), False
        self._numbers = itertools.count()

    @property
    def pid(self):
        return self.process.pid

    def tell(self, message):
        self.send(codec.packed(message))

    def send(self, message):
        self.transport.send(0, message)
        self.take_in(0.0)

    def let_go(self):
        """As if this process had died."""
        self.process.stdin.close()

    def hear(self, kind):
        """The next message of this kind; a Beat is sent while it is waited for. EOFError if the agent is gone."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for message in list(self.heard):
                if isinstance(message, kind):
                    self.heard.remove(message)
                    return message
            self.tell(messages.Beat())
            self.take_in(0.1)
        raise AssertionError(f"no {kind.__name__}, but {list(self.heard)}")

    def take_in(self, timeout):
        if self._gone:
            raise EOFError
        for _, message in self.transport.receive(timeout):
            if isinstance(message, str):
                self._gone = True
            else:
                self.heard.append(codec.unpacked(message, messages.FromAgent))

    def listen_until_its_end(self):
        with suppress(EOFError):
            while True:
                self.take_in(1.0)

    def ask(self, question):
        """Its answer, as its type, or a Reply with trouble."""
        number = next(self._numbers)
        self.tell(messages.Ask(number, question))
        while (reply := self.hear(messages.Reply)).number != number:
            pass
        return reply if reply.trouble else codec.unpacked(reply.answer, question.answer)


@contextmanager
def controlled(settings):
    """An agent that has dialled in. Nothing that it has started is left when the block ends."""
    controller = Controller(settings)
    try:
        yield controller
    finally:
        controller.let_go()
        controller.process.wait(PATIENCE)
        controller.transport.close(0.0)


def started_by(controller):
    """All processes below an agent."""
    return {pid for pid in processes.descendants(controller.pid) if not is_nursery(pid)}
