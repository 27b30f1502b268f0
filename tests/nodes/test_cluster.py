"""The cluster as its controller has it, over a transport without agents or time."""

import threading
from contextlib import contextmanager

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes import messages
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.world.call import Answer, Death
from tests.nodes.fake_transport import LONG, FakeTransport, hello, running

PULSE = messages.Pulse(clock=0.0)


@pytest.fixture
def fake():
    return FakeTransport()


@pytest.fixture
def cluster(fake):
    with running(fake) as cluster:
        yield cluster


def silence(fake, of, seconds):
    for _ in range(seconds):
        fake.happens(*((node, PULSE) for node in fake.names if node != of), after=1.0)


@contextmanager
def in_the_background(function, *arguments):
    """What it returns, in a list, when the block has ended."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function(*arguments)))
    thread.start()
    yield result
    thread.join(LONG)


def asked(fake, node):
    """The number of the last question that a node was asked, once it was."""
    while not (found := fake.told(node, messages.Ask)):
        threading.Event().wait(0.001)
    return found[-1].number


@pytest.mark.parametrize(("says", "why"), [
    ([], "not started"),
    ([(1, "its agent died by SIGSEGV")], "its agent died by SIGSEGV"),
    ([(1, codec.packed({"is": "hello", "new": 1}))], "what this version cannot read"),
])  # fmt: skip
def test_a_node_that_does_not_say_our_hello_is_lost_and_the_others_are_there(says, why):
    fake = FakeTransport(greeting=(0, 2))
    if says:
        fake._steps.put((0.0, says))
        fake._happened += 1
    with running(fake, LONG if says else 0.2) as cluster:
        assert cluster.hellos == {0: hello(0), 2: hello(2)}
        assert (cluster.alive, list(cluster.lost)) == ((0, 2), [1])
        assert why in cluster.lost[1]


def test_a_cable_that_is_put_back_in_time_costs_nothing_and_a_silent_node_is_lost_and_named(fake, cluster):
    for _ in range(3):
        silence(fake, of=1, seconds=8)
        fake.happens((1, PULSE), (1, Answer(0, b"late")))
    assert cluster.alive == (0, 1, 2)
    assert [len(fake.told(node, messages.Beat)) for node in fake.names] == [25] * 3  # one a second
    assert [news.parcel for _, news in cluster.take(cluster.rank_news, 0)] == [b"late"] * 3
    silence(fake, of=1, seconds=9)
    assert cluster.alive == (0, 1, 2)
    silence(fake, of=1, seconds=2)
    assert cluster.alive == (0, 2)
    assert cluster.take(cluster.rank_news, 0) == cluster.take(cluster.suite_news, 0) == [(1, cluster.lost[1])]
    assert cluster.take(cluster.rank_news, 0) == []


def test_a_controller_that_was_frozen_loses_nobody(fake, cluster):
    fake.happens(after=600.0)
    assert cluster.listening.seconds <= 1.0  # nor is a run hung that was not heard meanwhile
    silence(fake, of=-1, seconds=3)
    silence(fake, of=1, seconds=9)
    assert cluster.alive == (0, 1, 2)
    silence(fake, of=1, seconds=2)
    assert list(cluster.lost) == [1]


def test_a_lost_node_hears_no_beat_until_it_comes_back_to_be_fenced(fake, cluster):
    silence(fake, of=1, seconds=11)
    cluster.take(cluster.rank_news, 0)
    before = len(fake.told(1, messages.Beat))
    silence(fake, of=1, seconds=3)
    assert len(fake.told(1, messages.Beat)) == before
    cluster.send(1, messages.Submit((0,), b"nothing"))
    own = [messages.CheckEnded("a", "passed", 1.0), messages.SuiteEnded(0, "", "run", {})]
    fake.happens((1, Answer(0, b"too late")), (1, messages.Pulse(ended=tuple(own))))
    silence(fake, of=-1, seconds=3)
    assert cluster.alive == (0, 2)
    assert cluster.take(cluster.rank_news, 0) == []
    assert cluster.take(cluster.suite_news, 0) == [(1, cluster.lost[1]), *((1, each) for each in own)]  # which goes on
    assert [type(told.question) for told in fake.told(1, messages.Ask)] == [messages.KillRanks]
    assert len(fake.told(1, messages.Beat)) > before  # or its agent would end before its files are read
    assert fake.told(1, messages.Submit) == []
    assert len(cluster.lost) == 1


def test_files_of_a_node_that_is_back_can_be_read(fake, cluster):
    silence(fake, of=1, seconds=11)
    fake.happens((1, PULSE))
    fence = asked(fake, 1)
    question = {1: messages.ReadFile("evidence.jsonl", 0, 10)}
    with in_the_background(cluster.ask_each, question, LONG, True) as answers:
        while (number := asked(fake, 1)) == fence:
            pass
        fake.happens((1, messages.Reply(fence, codec.packed({}))), (1, messages.Reply(number, codec.packed(b"{}"))))
    assert answers == [({1: b"{}"}, {})]


def test_a_node_that_is_left_out_is_fenced_and_not_lost(fake, cluster):
    cluster.leave_out(2, "its own run is REJECTED")
    silence(fake, of=2, seconds=15)
    fake.happens((2, Death(0, "by SIGKILL")))
    assert (cluster.alive, cluster.lost, cluster.left_out) == ((0, 1), {}, {2: "its own run is REJECTED"})
    assert cluster.take(cluster.rank_news, 0) == []
    assert [type(told.question) for told in fake.told(2, messages.Ask)] == [messages.KillRanks]


@pytest.mark.parametrize(("event", "why"), [
    ((1, "its agent died by SIGKILL"), "its agent died by SIGKILL"),
    ((1, messages.End("no controller for 30 s")), "its agent ended: no controller for 30 s"),
    ((1, b"\xc1"), "its agent sent what this version cannot read"),
])  # fmt: skip
def test_a_node_whose_agent_is_gone_is_lost_at_once(event, why, fake, cluster):
    fake.happens((1, Answer(0, b"before")), event)
    assert cluster.lost[1].startswith(why)
    assert cluster.take(cluster.rank_news, 0) == [(1, Answer(0, b"before")), (1, cluster.lost[1])]


def test_what_each_node_says_comes_to_those_who_wait_for_it_in_its_order():
    fake = FakeTransport()
    first, second = (messages.CheckEnded(name, "passed", 1.0) for name in "ab")
    ended = messages.SuiteEnded(0, "", "run", {})
    with running(fake) as cluster:
        pulse = messages.Pulse(check="b", ended=(first, second))
        fake.happens((0, pulse), (2, Answer(1, b"a")), (2, Death(0, "x")))
        fake.happens((0, messages.Pulse(ended=(ended,))), (1, PULSE))
        assert cluster.take(cluster.suite_news, 0) == [(0, first), (0, second), (0, ended)]
        assert cluster.take(cluster.rank_news, 0) == [(2, Answer(1, b"a")), (2, Death(0, "x"))]
        assert cluster.pulses == {0: messages.Pulse(ended=(ended,)), 1: PULSE}


def test_questions_are_answered_by_those_that_can():
    fake = FakeTransport(5)
    with running(fake) as cluster:
        with in_the_background(cluster.ask_each, dict.fromkeys(range(5), messages.Rendezvous()), 1.0) as answers:
            number = [asked(fake, node) for node in fake.names]
            fake.happens((0, messages.Reply(number[0], codec.packed("tcp://10.0.0.10:1"))))
            fake.happens(
                (1, messages.Reply(number[1], trouble="no port is free")),
                (2, messages.Reply(number[2], codec.packed([7]))),
            )
            fake.happens((3, "its agent died by SIGKILL"))
        found, troubles = answers[0]
        assert found == {0: "tcp://10.0.0.10:1"}
        assert {node: why.partition(":")[0] for node, why in troubles.items()} == {
            1: "no port is free", 2: "it answered what is no answer", 3: "it is lost", 4: "no answer within 1 s",
        }  # fmt: skip
        fake.happens((4, messages.Reply(number[4], codec.packed("late"))))  # for nobody
        assert cluster.alive == (0, 1, 2, 4)
        assert "SIGKILL" in cluster.ask_each({3: messages.Rendezvous()})[1][3]


def test_how_far_clocks_differ_is_seen_by_the_pulse_that_came_fastest(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    fake = FakeTransport(1)
    with running(fake) as cluster:
        for clock in (1000.1, 1000.25, 999.0):
            fake.happens((0, messages.Pulse(clock=clock)))
        assert cluster.clocks_ahead == {0: pytest.approx(0.25)}


def test_all_are_told_to_end_and_those_that_do_not_are_named():
    fake = FakeTransport(deaf=(1,))
    cluster = Cluster(fake, clock=fake.clock)
    cluster.start(LONG)
    assert cluster.close(0.5) == {1: "it does not end"}
    assert [len(fake.told(node, messages.End)) for node in fake.names] == [1, 1, 1]
    assert cluster.lost == {}
    assert not cluster._thread.is_alive()


def test_a_transport_that_breaks_loses_all_nodes_and_lets_nobody_wait(fake, cluster):
    with in_the_background(cluster.ask_each, dict.fromkeys(range(3), messages.Rendezvous()), LONG) as answers:
        asked(fake, 2)
        fake._steps.put((0.0, None))
    assert [[*each] for each in answers[0]] == [[], [0, 1, 2]]
    assert (cluster.alive, list(cluster.lost)) == ((), [0, 1, 2])
