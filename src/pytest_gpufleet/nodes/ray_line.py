"""The calls to the actor of one node: which messages they carry, and what becomes of calls that Ray loses."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable
from textwrap import shorten
from typing import Any

from pytest_gpufleet.nodes.ray_actor import Taken, a_call_full
from pytest_gpufleet.nodes.transport import Arrived, Gone

TAKE_SECONDS = 1.0  # that a call waits on its node for a message: it brings the Beat with it when it is made
AGAIN_SECONDS = 0.2  # before a call is repeated that Ray has lost
NEVER = float("inf")
MOST_TOLD = 200  # characters of what Ray says


class Line:
    """Its user sees to it that one thread at a time calls it. `told`: called by any thread with a call that has ended,
    for `ended`. `lost`: what Ray raises where it does not know whether a call was run."""

    def __init__(
        self,
        node: int,
        actor: Any,
        told: Callable[[Line, Any, bool], None],
        lost: type[Exception],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.actor = actor
        self.again_at = NEVER  # a call was lost: when those to come are made
        self.over = False  # nothing comes any more
        self.agent_has_ended = False
        self._told = told
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
        reference.future().add_done_callback(lambda call: self._told(self, call, taking))


def in_short(error: BaseException) -> str:
    """Ray writes many lines, in colours, and says in the last one what it was, and what it may have been."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return shorten(lines[-1], MOST_TOLD, placeholder=" ...") if lines else type(error).__name__
