"""What runs on each node of a Ray cluster: an actor that starts the agent in a process of its own, and relays.

Messages are numbered from 0 in either direction. Ray may lose a call or its answer, and says then that the actor is
unavailable: whoever repeats the call neither doubles nor loses a message.
"""

import itertools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.transport import Arrived, Gone, LocalTransport

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


TAKE_SECONDS = 1.0  # that a call waits on its node for a message: it brings the Beat with it when it is made
AGAIN_SECONDS = 0.2  # before a call is repeated that Ray has lost
NEVER = float("inf")
MOST_TOLD = 200  # characters of what Ray says


class Line:
    """Its user sees to it that one thread at a time calls it. `report`: for any thread, of a call that has ended,
    for `ended`. `lost`: what Ray raises where it does not know whether a call was run."""

    def __init__(
        self,
        node: int,
        actor: Any,
        report: "Callable[[tuple[Line, Any, bool]], None]",
        lost: type[Exception],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.actor = actor
        self.again_at = NEVER  # a call was lost: when those to come are made
        self.over = False  # nothing comes any more
        self.agent_has_ended = False
        self._report = report
        self._lost = lost
        self._clock = clock
        self._unconfirmed: deque[bytes] = deque()  # by the actor
        self._first = 0  # the number of the first of these
        self._next = 0  # of the first that no call carries
        self._taken = 0  # so many have come from there
        self._taking = False  # a call waits there for more

    def send(self, message: bytes, later: bool) -> None:
        if not self.over:
            self._unconfirmed.append(message)
            if not later and self.again_at == NEVER:
                self._give()

    def go_on(self) -> None:
        """Make the calls that are due: at the begin, and whenever one has ended or was lost."""
        self.again_at = NEVER
        if not self._taking:
            self._taking = True
            self._call(self.actor.take.remote(self._taken, TAKE_SECONDS, *self._batch()), taking=True)
        self._give()

    def ended(self, call: Any, taking: bool) -> list[Arrived | Gone]:
        """What a call that has ended brings."""
        self._taking = self._taking and not taking
        error = call.exception()
        if self.over:
            return []
        if isinstance(error, self._lost):
            self._next = self._first
            self.again_at = self._clock() + AGAIN_SECONDS
            return []
        if error is not None:
            self.over = True
            return [Gone(self.node, f"Ray says of its agent: {in_short(error)}")]
        if not taking:
            self._confirm(call.result())
            return []
        return self._take_in(call.result())

    def _take_in(self, taken: Taken) -> list[Arrived | Gone]:
        self._confirm(taken.heard)
        new = taken.messages[max(0, self._taken - taken.first) :]
        self._taken = max(self._taken, taken.first + len(taken.messages))
        events: list[Arrived | Gone] = [Arrived(self.node, message) for message in new]
        if taken.why:
            self.over = self.agent_has_ended = True
            events.append(Gone(self.node, taken.why))
        elif self.again_at == NEVER:
            self.go_on()
        return events

    def _give(self) -> None:
        while self._next < self._first + len(self._unconfirmed):
            self._call(self.actor.give.remote(*self._batch()), taking=False)

    def _batch(self) -> tuple[int, list[bytes]]:
        """What the next call carries: the number of its first message, and all of them."""
        first = self._next
        messages = a_call_full(itertools.islice(self._unconfirmed, first - self._first, None))
        self._next += len(messages)
        return first, messages

    def _confirm(self, heard: int) -> None:
        while self._first < heard:
            self._unconfirmed.popleft()
            self._first += 1
        self._next = max(self._next, self._first)

    def _call(self, reference: Any, taking: bool) -> None:
        reference.future().add_done_callback(lambda call: self._report((self, call, taking)))


def in_short(error: BaseException) -> str:
    """Ray writes many lines, in colours, and says in the last one what it was, and what it may have been."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return shorten(lines[-1], MOST_TOLD, placeholder=" ...") if lines else type(error).__name__
