"""By which address and interface a node is reached, and who reaches whom: connections on loopback, agents that are
asked, and what nodes are named for."""

import socket
import threading
import urllib.parse
from collections import Counter
from contextlib import contextmanager

import pytest

from pytest_gpufleet.nodes import network
from pytest_gpufleet.nodes.launchers import AgentSettings
from pytest_gpufleet.nodes.messages import Connect, Door, Listen
from pytest_gpufleet.nodes.network import MESSAGE_BYTES, Interface, connect, for_ranks, listen, of_traffic
from tests.nodes.controller import controlled
from tests.nodes.fake_transport import running
from tests.nodes.test_cluster_engine import AnsweringTransport

TOKEN = b"of node 1"
LOOPBACK = Interface("127.0.0.1", "lo")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(network, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(network, "LISTEN_SECONDS", 10.0)


@contextmanager
def somebody(answer=None):
    """A door behind which is not what listens there: it takes connections and does `answer`, or does not take any."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if answer is not None:
            threading.Thread(target=lambda: answer(listener.accept()[0]), daemon=True).start()
        yield Door("lo", "127.0.0.1", listener.getsockname()[1], TOKEN)


def in_small_parts(guest):
    """As a node that is busy."""
    with guest:
        network._receive(guest)
        for byte in TOKEN.ljust(MESSAGE_BYTES, b" ")[:64]:
            guest.sendall(bytes([byte]))
        guest.sendall(TOKEN.ljust(MESSAGE_BYTES)[64:])


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["::1"]], ids=len)
def test_a_node_is_reached_on_each_of_its_interfaces(addresses):
    try:
        doors = listen([Interface(address, f"if{index}") for index, address in enumerate(addresses)], TOKEN)
    except OSError:
        pytest.skip(f"this machine has no {addresses}")
    assert [(door.address, door.interface) for door in doors] == [(a, f"if{i}") for i, a in enumerate(addresses)]
    assert connect({1: doors, 2: doors}) == {}


def test_a_slow_node_is_reached_and_a_port_that_nobody_has_is_refused():
    with somebody(in_small_parts) as door:
        assert connect({1: [door]}) == {}
    with somebody() as door:
        pass
    assert "refused" in connect({2: [door]})[2]


@pytest.mark.parametrize(("answer", "why"), [
    (None, "timed out"),
    (lambda guest: guest.close(), "no data"),
    (lambda guest: guest.sendall(bytes(MESSAGE_BYTES)), "another node has this address"),
], ids=["does not accept", "closes", "is another"])  # fmt: skip
def test_who_is_not_reached_is_named_with_address_port_and_interface(answer, why):
    (fine,) = listen([LOOPBACK], TOKEN)
    with somebody(answer) as door:
        found = connect({1: [fine], 2: [door]})
    assert found.keys() == {2}
    assert all(text in found[2] for text in (why, "from 127.0.0.1", str(door.port), "of 127.0.0.1 (lo)"))


@pytest.mark.parametrize("environment", [
    {},
    {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": ""},
    {"NCCL_SOCKET_IFNAME": "l", "GLOO_SOCKET_IFNAME": "lo"},
    {"NCCL_SOCKET_IFNAME": "ib0,lo"},
])  # fmt: skip
def test_interfaces_are_those_that_nccl_and_gloo_are_told(environment):
    assert of_traffic(LOOPBACK, environment) == (LOOPBACK,)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        with pytest.raises(OSError, match="no interface ib7"):
            of_traffic(LOOPBACK, {**environment, variable: "ib7"})


# ---------------------------------------------------------------- as the controller asks
def doors_of(node, question):
    return listen([LOOPBACK], question.token)


def three_nodes(**answers):
    """Three agents, whose doors and connections are real."""
    usual = {"Listen": doors_of, "Connect": lambda node, question: connect(question.nodes)}
    return running(AnsweringTransport(3, **usual | answers))


PAIRS = [(0, 1), (0, 2), (1, 2)]
ASKED = Counter()


def at_the_second_time(node, question):
    ASKED[node] += 1
    return {} if ASKED[node] > 1 else dict.fromkeys(question.nodes, "timed out")


def behind_a_closed_door(node, question):
    with somebody() as closed:
        pass
    return (closed,) if node == 2 else doors_of(node, question)


@pytest.mark.parametrize(("answers", "apart", "why"), [
    ({}, [], ""),
    ({"Connect": at_the_second_time}, [], ""),
    ({"Listen": behind_a_closed_door}, [(0, 2), (1, 2)], " to gf2: from 127.0.0.1 to port"),  # one direction is enough
    ({"Listen": lambda node, question: "trouble: no ib0" if node == 1 else doors_of(node, question)},
     [(0, 1), (1, 2)], " to gf1: trouble: no ib0"),
], ids=["all", "second time", "closed door", "no interface"])  # fmt: skip
def test_nodes_that_do_not_reach_each_other_are_named_with_the_direction(answers, apart, why):
    with three_nodes(**answers) as cluster:
        found = network.reached(cluster, PAIRS)
    assert [pair for pair in PAIRS if found[pair]] == apart
    assert all(why in found[pair] and "; " not in found[pair] for pair in apart)


def test_nothing_is_said_of_a_node_that_is_left_out():
    with three_nodes(Connect=lambda node, question: "trouble" if node else connect(question.nodes)) as cluster:
        cluster.leave_out(1, "it is slow")
        assert {pair for pair, why in network.reached(cluster, PAIRS).items() if why} == {(0, 2)}


def test_an_agent_listens_and_connects(tmp_path):
    with controlled(AgentSettings(str(tmp_path), rehearse=1, keep_in=str(tmp_path))) as agent:
        doors = agent.ask(Listen(TOKEN))
        assert (connect({1: doors}), agent.ask(Connect({1: doors}))) == ({}, {})


# ---------------------------------------------------------------- addresses and interfaces
def towards(address):
    try:
        return network.towards(address)
    except OSError:
        pytest.skip(f"this machine has no way to {address}")


def test_towards_another_node_it_is_the_interface_of_the_route():
    found = towards("192.0.2.1")  # for documentation (RFC 5737): nothing is sent there
    assert found.name in dict(socket.if_nameindex()).values()
    assert found.name != "lo"
    assert network.towards(found.address) == found  # the controller's own node asks for itself


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_on_one_machine_it_is_loopback_and_ranks_meet_at_a_port_that_can_be_had(address):
    assert towards(address) == Interface(address, "lo")
    met = urllib.parse.urlparse(network.free_rendezvous(address))
    assert (met.scheme, met.hostname) == ("tcp", address)
    with socket.create_server((address, met.port), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
        pass


@pytest.mark.parametrize(("environment", "nccl", "gloo"), [
    ({}, "=eth0", ["eth0", "eth0", "eth0"]),
    ({"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0"}, "ib", ["ib0", "ib0", "ib0"]),
    ({"GLOO_SOCKET_IFNAME": "rail0,rail1"}, "=eth0", ["rail0", "rail1", "rail0"]),
    ({"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": ""}, "=eth0", ["eth0", "eth0", "eth0"]),
])  # fmt: skip
def test_ranks_talk_on_the_interface_of_their_node_unless_somebody_chose_others(environment, nccl, gloo):
    found = [for_ranks("eth0", index, environment) for index in range(3)]
    assert found == [{"NCCL_SOCKET_IFNAME": nccl, "GLOO_SOCKET_IFNAME": name} for name in gloo]
    assert for_ranks("", 0, environment) == {}  # where none is known
