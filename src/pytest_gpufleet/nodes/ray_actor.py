"""What runs on each node of a Ray cluster: an actor that starts the agent in a process of its own, and relays.

Messages are numbered from 0 in either direction. Ray may lose a call or its answer, and says then that the actor is
unavailable: whoever repeats the call neither doubles nor loses a message.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.local_transport import LocalTransport
from pytest_gpufleet.nodes.transport import Gone

LOOK_SECONDS = 1.0  # between two looks at whether anybody calls
ALONE_SECONDS = 60.0  # without a call: the controller is gone, and the agent has ended by itself before
END_SECONDS = 5.0
# Of what one call carries, unless a single message is larger: an answer passes through the object store of the node,
# which may have 75 MiB, the least that Ray takes.
MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Taken:
    """`heard`: so many messages have come here from the controller. `messages` of the agent, of which the first has
    the number `first`. `why` nothing comes behind them; "" if more may."""

    heard: int
    first: int
    messages: tuple[bytes, ...]
    why: str


def a_call_full(messages: Iterable[bytes]) -> list[bytes]:
    """The first of these messages, at least one if there is any, and no more than MOST_BYTES if there are several."""
    full: list[bytes] = []
    size = 0
    for message in messages:
        size += len(message)
        if full and size > MOST_BYTES:
            break
        full.append(message)
    return full


class Relay:
    """Ray runs its methods in threads, several at a time. Nothing of it needs Ray."""

    def __init__(
        self,
        settings: AgentSettings,
        carrier: type[LocalTransport] = LocalTransport,
        alone_seconds: float = ALONE_SECONDS,
    ) -> None:
        self._agent = carrier([settings])
        self._alone_seconds = alone_seconds
        self._agent.start()
        self._changed = threading.Condition()  # guards what follows
        self._early: dict[int, bytes] = {}  # from the controller, before those that come before them
        self._heard = 0
        self._said: deque[bytes] = deque()  # by the agent, and not yet confirmed by the controller
        self._first = 0  # the number of the first of these
        self._why = ""
        self._called = time.monotonic()
        threading.Thread(target=self._listen, name="gpufleet relay", daemon=True).start()

    def give(self, first: int, messages: list[bytes]) -> int:
        """Pass messages on to the agent, of which the first has this number. How many have come here by now."""
        with self._changed:
            self._called = time.monotonic()
            for number, message in enumerate(messages, first):
                if number >= self._heard:
                    self._early[number] = message
            while (next_one := self._early.pop(self._heard, None)) is not None:
                self._agent.send(0, next_one)
                self._heard += 1
            return self._heard

    def take(self, confirmed: int, seconds: float, first: int, messages: list[bytes]) -> Taken:
        """What the agent has said, from message `confirmed` on, as soon as there is any; nothing after `seconds`. What
        comes before it has arrived at the controller. Messages to the agent come along, as in `give`."""
        heard = self.give(first, messages)
        with self._changed:
            while self._first < confirmed:
                self._said.popleft()
                self._first += 1
            self._changed.wait_for(lambda: self._said or self._why, seconds)
            taken = a_call_full(self._said)
            return Taken(heard, self._first, tuple(taken), self._why if len(taken) == len(self._said) else "")

    def end(self, seconds: float) -> dict[int, str]:
        """End the agent and all that it has started, by force if it does not end by itself; see Transport.close."""
        return self._agent.close(seconds)

    def _listen(self) -> None:
        while time.monotonic() - self._called < self._alone_seconds:
            if self._why:
                time.sleep(LOOK_SECONDS)
                continue
            events = self._agent.receive(LOOK_SECONDS)
            with self._changed:
                for event in events:
                    if isinstance(event, Gone):
                        self._why = event.why
                    else:
                        self._said.append(event.message)
                self._changed.notify_all()
        self._agent.close(END_SECONDS)
        os._exit(0)  # Ray leaves the actors of a lost head alive for minutes
