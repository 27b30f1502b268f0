"""Agents that dial in, over ZeroMQ on loopback: which stop, come late, and know another secret."""

import os
import signal
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.nodes import launchers, wire
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.nodes.launchers import AgentSettings, OwnAgents
from pytest_gpufleet.nodes.messages import OVER, DialIn, Rendezvous, Submit
from pytest_gpufleet.nodes.wire import Transport
from pytest_gpufleet.world.engines import processes

LONG = 30.0
SECRET = bytes(wire.KEY_BYTES)


@pytest.fixture
def cluster(tmp_path):
    settings = [AgentSettings(str(tmp_path), rehearse=1, keep_in=str(tmp_path), index=index) for index in range(2)]
    made = Cluster(Transport(OwnAgents("local", "loopback", SECRET, settings)), lost_after=5.0)
    made.start(LONG)
    assert made.alive == (0, 1)
    yield made
    agents, lost = [hello.pid for hello in made.hellos.values()], made.lost
    assert (made.close(5.0), made.lost) == ({}, lost)
    assert not any(map(processes.look, agents))


def test_a_frozen_agent_is_lost_fenced_when_it_wakes_and_answers_then(cluster):
    os.kill(cluster.hellos[0].pid, signal.SIGSTOP)
    cluster.send(0, Submit((), bytes(5_000_000)))  # more than a socket holds: nobody waits for it
    ((node, lost),) = cluster.take(cluster.rank_news, LONG)
    assert (node, cluster.alive) == (0, (1,))
    assert "nothing was heard" in lost
    os.kill(cluster.hellos[0].pid, signal.SIGCONT)
    answers, _ = cluster.ask_each(dict.fromkeys((0, 1), Rendezvous()), LONG, also_lost=True)
    assert answers.keys() == {0, 1}
    assert cluster.alive == (1,)
    assert cluster.take(cluster.rank_news, 0) == []


def test_nothing_is_left_of_a_frozen_agent(cluster):
    os.kill(cluster.hellos[0].pid, signal.SIGSTOP)


# ---------------------------------------------------------------- who has dialled in
def launched(dial, own=(), names=(), died=()):
    """A Starter of nobody but the nodes `own`, on whose host the head is. `dial`: what happens then."""

    def start(port):
        dial(port)
        return dict(names)

    known = {"name": "srun", "secured": "secret", "secret": SECRET, "own": own}
    return SimpleNamespace(**known, start=start, ended=lambda: dict(died), close=lambda timeout: {})


def dialling(*who, secret=SECRET, run="7.0"):
    made = []

    def dial(port):
        for name, index in who:
            made.append(wire.Dialled(secret, run, f"127.0.0.1:{port}"))
            made[-1].line.send(codec.packed(DialIn(name, index)))

    return made, launched(dial)


def hear(transport, agent, words):
    told = []
    while not any(words in message for message in told):
        transport.receive(0.1)
        told += agent.receive()


def close(transport, *agents):
    for agent in agents:
        agent.close()
    transport.close(0.0)


@pytest.mark.parametrize(("who", "expected", "names", "missing"), [
    ([("gf1", 1), ("gf0", 0), ("gf2", 2)], (), ["gf0", "gf1", "gf2"], ()),
    ([("gf10", None), ("gf9", None), ("gf2", 0)], (), ["gf2", "gf9", "gf10"], ()),
    ([("b", None), ("a", None), ("x", None)], ("x", "b", "a"), ["x", "b", "a"], ()),  # the order of the file
    ([("vm", 0), ("vm", 1), ("gf2", 2)], (), ["vm (1)", "vm (2)", "gf2"], ()),
    ([("gf0.example", 0), ("gf2", 2)], ("gf0", "gf1", "gf2"), ["gf0.example", "gf2"], ("gf1",)),
    ([("gf0.example", 0), ("gf2", 2)], (), ["gf0.example", "gf2"], ("task 1",)),
])  # fmt: skip
def test_nodes_have_the_numbers_of_their_launcher_or_the_order_of_their_names(who, expected, names, missing):
    agents, starter = dialling(*who)
    transport = Transport(starter, 3, LONG if len(who) == 3 else 1.0, expected, run="7.0")
    assert (transport.start(), transport.missing) == (dict(enumerate(names)), missing)
    close(transport, *agents)


@pytest.mark.parametrize("other", [{"secret": b"x" * wire.KEY_BYTES}, {"run": "8.0"}], ids=["secret", "run"])
def test_one_with_another_secret_or_of_another_run_is_told_by_address_and_knows_it(other):
    agents, starter = dialling(("gf0", 0), **other)
    transport = Transport(starter, 1, 2.0, run="7.0")
    assert transport.start() == {}
    assert (transport.strangers, transport.missing) == (("127.0.0.1",), ("task 0",))
    agents[0].receive()
    assert agents[0].connected_at
    assert agents[0].was_refused
    close(transport, *agents)


def test_an_agent_with_another_secret_says_so_and_ends_well(tmp_path, monkeypatch, capfd):
    soon = launchers.BOOT.replace("agent.main", "agent.REFUSED_SECONDS = 3.0; agent.main")
    monkeypatch.setattr(launchers, "BOOT", soon)

    def dial(port):
        settings = AgentSettings(str(tmp_path), rehearse=1, keep_in=str(tmp_path), head=f"127.0.0.1:{port}")
        agent = launchers.with_secret(launchers.command(settings), b"x" * wire.KEY_BYTES)
        assert agent.wait(2 * 60) == 0

    transport = Transport(launched(dial), 1, 0.0)
    assert transport.start() == {}
    assert "another secret" in capfd.readouterr().err
    close(transport)


def test_a_second_one_of_an_index_and_one_that_comes_too_late_are_told_to_end_and_why():
    agents, starter = dialling(("gf0", 0), ("gf1", 0), ("gf2", 2))
    transport = Transport(starter, 2, LONG, run="7.0")
    transport.start()
    late = wire.Dialled(SECRET, "7.0", f"127.0.0.1:{transport.port}")
    late.line.send(codec.packed(DialIn("gf3", 3)))
    hear(transport, late, b"without it")
    doubled = next(agents[node] for node in (0, 1) if node != int(transport.dialled[0].name[2]))
    hear(transport, doubled, b"another process has come as number 0")
    close(transport, *agents, late)


def test_where_an_agent_of_this_machine_dies_early_the_others_are_waited_for():
    agents, starter = dialling(("gf1", 1))
    died = {0: "its agent died by SIGKILL"}
    starter = launched(starter.start, own=(0, 1), names={0: "gf0", 1: "gf1"}, died=died)
    transport = Transport(starter, seconds=LONG, run="7.0")
    assert (transport.start(), [*transport.dialled]) == ({0: "gf0", 1: "gf1"}, [1])
    close(transport, *agents)


def test_of_those_that_dial_in_only_expected_ones_are_taken_where_that_is_asked_for():
    """The others end well, also where they come first."""
    agents, starter = dialling(("gf0", 0), ("gf1", 1), ("gf2.example", 2), ("gf3", 3))
    transport = Transport(starter, 2, LONG, ("gf0", "gf2"), run="7.0", only_expected=True)
    assert transport.start() == {0: "gf0", 1: "gf2.example"}
    for other in (agents[1], agents[3]):
        hear(transport, other, OVER.encode())
    close(transport, *agents)


def test_a_port_that_somebody_else_has_is_refused():
    (first := Transport(launched(lambda port: None), 1, 0.0)).start()
    with pytest.raises(Refused, match="--fleet-head HOST:PORT"):
        Transport(launched(lambda port: None), port=first.port).start()
    close(first)


# ---------------------------------------------------------------- messages are there once, and in their order
class Cable:
    """Two lines, between which frames are lost while it is out."""

    def __init__(self):
        self.out, self.arrived = False, ([], [])
        self.ends = tuple(wire.Line(lambda frame, to=1 - end: self.carry(to, frame)) for end in (0, 1))

    def carry(self, to, frame):
        if not self.out and (message := self.ends[to].take(frame)) is not None:
            self.arrived[to].append(message)


def test_what_was_on_its_way_when_a_connection_broke_comes_once_and_in_its_order():
    cable = Cable()
    near, far = cable.ends
    near.send(b"0")
    cable.out = True
    near.send(b"1")
    far.send(b"a")
    cable.out = False
    near.send(b"2")  # before anybody knows that something was lost
    assert cable.arrived == ([], [b"0"])
    near.connected_again()
    far.send(b"b")
    assert cable.arrived == ([b"a", b"b"], [b"0", b"1", b"2"])
    near.connected_again()
    assert cable.arrived == ([b"a", b"b"], [b"0", b"1", b"2"])


@pytest.mark.parametrize("frame", [b"", b"short", wire.HEADER.pack(9, 99), wire.HEADER.pack(0, 1 << 40)])
def test_a_frame_of_nobody_breaks_nothing(frame):
    line = wire.Line(lambda frame: None)
    line.send(b"x")
    line.take(frame)
    assert line.take(wire.HEADER.pack(int(len(frame) > 8 and frame[:8] == bytes(8)), 0) + b"y") == b"y"


# ---------------------------------------------------------------- the secret
def test_a_secret_comes_from_a_file_or_the_variable_and_a_short_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("s" * 32 + "\n")
    monkeypatch.setenv(wire.SECRET, "s" * 32)
    assert wire.secret(None) == wire.secret(tmp_path / "secret") != b""
    assert wire.SECRET not in os.environ
    assert wire.secret(None, needed=False) == b""
    with pytest.raises(Refused, match="nodes on several hosts need a secret"):
        wire.secret(None)
    (tmp_path / "secret").write_text("s" * 31)
    monkeypatch.setenv(wire.SECRET, "short")
    for given in (None, tmp_path / "secret", tmp_path / "none"):
        with pytest.raises(Refused):
            wire.secret(given)
