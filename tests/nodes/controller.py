"""The controller's end of one agent, for tests of the agent alone."""

import itertools
import os
import select
import time
from collections import deque
from contextlib import contextmanager, suppress

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes import agent_process, messages
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.world.engines import processes
from tests.forked import is_nursery

PATIENCE = 300.0  # seconds: far more than anything here takes


class Controller:
    """`heard`: what has come and nobody has asked for yet."""

    def __init__(self, settings: AgentSettings, environment=None):
        self.agent = agent_process.start(settings, environment)
        self.heard: deque = deque()
        self._numbers = itertools.count()

    @property
    def pid(self) -> int:
        return self.agent.process.pid

    def tell(self, message: messages.Message) -> None:
        self.agent.connection.send(codec.packed(message))

    def hear(self, kind: type):
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

    def take_in(self, timeout: float) -> None:
        connection = self.agent.connection
        select.select([connection], [connection] if connection.has_unsent else [], [], timeout)
        connection.flush()
        self.heard.extend(codec.unpacked(message, messages.FromAgent) for message in connection.receive())

    def listen_until_its_end(self) -> None:
        """Without a word."""
        with suppress(EOFError):
            while True:
                self.take_in(1.0)
        self.agent.process.wait(PATIENCE)

    def ask(self, question: messages.Asked):
        """Its answer, as its type, or a Reply with trouble."""
        number = next(self._numbers)
        self.tell(messages.Ask(number, question))
        while (reply := self.hear(messages.Reply)).number != number:
            pass
        return reply if reply.trouble else codec.unpacked(reply.answer, messages.ANSWERS[type(question)])


@contextmanager
def controlled(settings: AgentSettings, environment=None):
    """An agent that has said Hello. Nothing that it has started is left when the block ends."""
    controller = Controller(settings, environment)
    try:
        yield controller
    finally:
        controller.agent.connection.close()
        controller.agent.process.wait(PATIENCE)


def started_by(controller: Controller) -> set[int]:
    """All processes below an agent."""
    return {pid for pid in processes.descendants(controller.pid) if not is_nursery(pid)}


def wait_until_gone(pids) -> None:
    until = time.monotonic() + PATIENCE
    while left := {pid for pid in pids if processes.look(pid)}:
        assert time.monotonic() < until, f"{left} live on"
        os.sched_yield()
