"""The controller's end of one agent, for tests of the agent alone."""

import itertools
import os
import time
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
        settings = msgspec.structs.replace(settings, index=0)
        starter = OwnAgents("local", "loopback", os.urandom(wire.KEY_BYTES), [settings])
        self.transport = Transport(starter, seconds=PATIENCE)
        self.transport.start()
        self.process, self.dialled = starter._processes[0], self.transport.dialled[0]
        self.pid, self.heard, self._numbers = self.process.pid, [], itertools.count()

    def tell(self, message):
        self.transport.send(0, message if isinstance(message, bytes) else codec.packed(message))
        self.take_in(0.0)

    def let_go(self):
        """As if this process had died."""
        self.process.stdin.close()

    def hear(self, kind):
        """The next message of this kind; a Beat is sent while it is waited for. EOFError if the agent is gone."""
        until = time.monotonic() + PATIENCE
        while not (found := [message for message in self.heard if isinstance(message, kind)]):
            assert time.monotonic() < until, f"no {kind}, but {self.heard}"
            self.tell(messages.Beat())
            self.take_in(0.1)
        self.heard.remove(found[0])
        return found[0]

    def take_in(self, timeout):
        events = [message for _, message in self.transport.receive(timeout)]
        new = [codec.unpacked(each, messages.FromAgent) for each in events if not isinstance(each, str)]
        self.heard += new
        if events and not new:  # but that it is gone
            raise EOFError

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
