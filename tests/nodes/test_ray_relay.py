"""Messages between the controller and an agent by calls of which Ray may lose any: each comes once, in its order."""

import queue
import random

import pytest

from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.ray_actor import MOST_BYTES, Line, Relay, a_call_full, in_short
from pytest_gpufleet.nodes.transport import Arrived, Gone
from tests.nodes.fake_ray import Actor, Missing

LONG = 30.0


class Agent:
    """In the place of LocalTransport, on the node: what it was told, and what it says."""

    def __init__(self, settings: list[AgentSettings]) -> None:
        self.told: list[bytes] = []
        self._says: queue.SimpleQueue = queue.SimpleQueue()

    def start(self) -> None:
        pass

    def send(self, node: int, message: bytes) -> None:
        self.told.append(message)

    def says(self, *events: bytes | Gone) -> None:
        self._says.put([Arrived(0, event) if isinstance(event, bytes) else event for event in events])

    def receive(self, timeout: float) -> list:
        return self._says.get()

    def close(self, timeout: float) -> dict[int, str]:
        return {}


@pytest.fixture
def relay():
    return Relay(AgentSettings("."), carrier=Agent, alone_seconds=float("inf"))  # else it would end this process


def numbers(first: int, last: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, last)]


def test_the_end_of_the_agent_is_told_behind_all_that_it_has_said(relay):
    large = bytes(MOST_BYTES)
    relay._agent.says(b"a", large, Gone(0, "its agent died by SIGKILL"))
    first = relay.take(0, LONG, 0, [])
    assert (first.messages, first.why) == ((b"a",), "")
    second = relay.take(1, LONG, 0, [])
    assert (len(second.messages), second.why) == (1, "its agent died by SIGKILL")
    assert relay.take(2, LONG, 0, []).why == "its agent died by SIGKILL"


@pytest.mark.parametrize(
    ("sizes", "carried"),
    [([], 0), ([1, 2, 3], 3), ([MOST_BYTES + 1, 1], 1), ([1, MOST_BYTES], 1), ([1, MOST_BYTES - 1, 1], 2)],
)
def test_a_call_carries_no_more_than_an_object_store_takes_unless_one_message_is_larger(sizes, carried):
    assert len(a_call_full([bytes(size) for size in sizes])) == carried


class Talk:
    """A controller and an agent, with a line between them of which `now` is the clock."""

    def __init__(self, relay: Relay) -> None:
        self.now = 0.0
        self.actor = Actor(relay)
        self.ended: list[tuple] = []
        self.events: list[Arrived | Gone] = []
        self.line = Line(7, self.actor, lambda call: self.ended.append(call), Missing, clock=lambda: self.now)
        self.line.go_on()

    def hear(self) -> None:
        while self.ended:
            line, call, taking = self.ended.pop(0)
            self.events += line.ended(call, taking)
        if self.line.again_at <= self.now:
            self.line.go_on()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_calls_are_lost_or_overtake_others_each_message_comes_once(relay, seed):
    chance = random.Random(seed)
    talk = Talk(relay)
    to_agent, to_controller = numbers(0, 60), numbers(100, 160)
    waiting_there = list(to_controller)
    sent = 0
    for _ in range(3000):
        what = chance.random()
        if what < 0.1 and sent < len(to_agent):
            talk.line.send(to_agent[sent], later=chance.random() < 0.3)
            sent += 1
        elif what < 0.2 and waiting_there:
            relay._agent.says(waiting_there.pop(0))
        elif talk.actor.calls:
            call = chance.randrange(len(talk.actor.calls))
            if chance.random() < 0.3:
                talk.actor.lose(call, run=chance.random() < 0.5)
            else:
                talk.actor.run(call)
        talk.now += 0.1
        talk.hear()
        if sent == 60 and len(relay._agent.told) == 60 and len(talk.events) == 60:
            break
    assert relay._agent.told == to_agent
    assert talk.events == [Arrived(7, message) for message in to_controller]
    assert [call.name for call in talk.actor.calls].count("take") <= 1


def test_one_call_waits_for_messages_at_a_time_also_after_calls_were_lost(relay):
    talk = Talk(relay)
    for _ in range(5):
        talk.line.send(b"x", later=False)
        talk.actor.lose(len(talk.actor.calls) - 1, run=False)  # one that gives
        talk.hear()
        talk.now += 1.0
        talk.hear()
        assert [call.name for call in talk.actor.calls].count("take") == 1


def test_a_message_that_may_wait_goes_along_with_the_next_call(relay):
    talk = Talk(relay)
    talk.line.send(b"beat", later=True)
    assert len(talk.actor.calls) == 1
    talk.actor.run(0)
    talk.hear()
    talk.actor.run(0)
    assert relay._agent.told == [b"beat"]
    talk.line.send(b"beat", later=True)
    talk.line.send(b"now", later=False)
    talk.actor.run(len(talk.actor.calls) - 1)
    assert relay._agent.told == [b"beat", b"beat", b"now"]


def test_an_actor_that_is_dead_ends_the_line_once(relay):
    talk = Talk(relay)
    talk.line.send(b"x", later=False)
    for call in talk.actor.calls:
        call.answer.set_exception(RuntimeError("The actor died.\n\tpid: 7\n\x1b[36mIts node is dead\x1b[39m\n"))
    talk.hear()
    assert talk.events == [Gone(7, "Ray says of its agent: Its node is dead")]
    assert not talk.line.agent_has_ended  # nobody knows
    talk.actor.calls.clear()
    talk.line.send(b"y", later=False)
    assert talk.actor.calls == []


def test_an_agent_that_has_ended_is_told_from_one_of_which_nobody_knows(relay):
    talk = Talk(relay)
    relay._agent.says(b"last", Gone(0, "its agent died with exit status 0"))
    while not talk.events:
        talk.actor.run(0)
        talk.hear()
    assert talk.events == [Arrived(7, b"last"), Gone(7, "its agent died with exit status 0")]
    assert talk.line.agent_has_ended


def test_what_ray_says_is_cut_to_a_line():
    assert in_short(ValueError()) == "ValueError"
    assert len(in_short(ValueError("a\n" + "b " * 500))) <= 200
