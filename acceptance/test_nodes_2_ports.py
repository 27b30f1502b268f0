"""The network's ports after all nodes have used them together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from pytest_gpufleet import Judge, LiveMachine, Measurement, Place, expect_none, not_applicable, not_judged
from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.machine.network_ports import NETWORK_PORTS, Port
from pytest_gpufleet.model.gpu import Missing
from pytest_gpufleet.model.place import Where

pytestmark = [
    pytest.mark.chapter("Ports", "Did the network between the nodes stay free of errors?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
    pytest.mark.at_the_end,
]


class Ports(NamedTuple):
    """A node's machine, and its ports when the run began and now; Missing if it does not answer any more."""

    machine: Machine
    before: list[Port]
    now: list[Port] | Missing


@pytest.fixture
def ports(machine: LiveMachine) -> list[Ports]:
    """Of each node that takes part."""
    name = NETWORK_PORTS.name
    return [
        Ports(node.machine, network_ports.ports_of(node.machine.host), NETWORK_PORTS.of({name: node.now(name)}))
        for node in machine.nodes
        if node.machine
    ]


def require_answers(ports: Iterable[Ports]) -> None:
    if silent := [f"node {each.machine.node}: {each.now}" for each in ports if isinstance(each.now, Missing)]:
        not_judged("\n".join(silent))


def test_ports_stayed_clean(ports: list[Ports]) -> None:
    """No network port went down or counted more errors than a healthy one while all nodes worked together

    A cable, transceiver or switch port that is bad shows under load: errors are sent again and cost bandwidth, until
    the link goes down and takes a job with it. Look at cable, transceiver and switch port of the one that is named:
    `ibstat`, `perfquery`, `mlxlink -d mlx5_0 -c -e`; exchange the cable first.
    """
    if not any(port.errors for each in ports for port in network_ports.active(each.before)):
        not_applicable("no active network port of these nodes counts errors")
    expect_none(
        fault.changed(subjects=(Place(each.machine.node, "node"),))
        for each in ports
        if not isinstance(each.now, Missing)
        for fault in network_ports.port_errors(each.before, each.now, each.machine.seconds_ago)
    )
    require_answers(ports)


def test_ports_have_the_mtu_of_their_peers(ports: list[Ports]) -> None:
    """Network ports have the same MTU on all nodes

    A port drops packets that are larger than its MTU, and one with a smaller MTU makes its rail slow for all nodes. Of
    the ports at the highest rate each is held against the port of that name of the other nodes: `ip link`. Set the MTU
    in the configuration of that node's network.
    """
    nodes = {each.machine.node: each.before for each in ports}
    if sum(any(port.mtu for port in network_ports.fastest_ports(each)) for each in nodes.values()) < 2:
        not_applicable("fewer than two nodes have an active RoCE port with a network interface, which has the MTU")
    expect_none(network_ports.mtu_between_nodes(nodes))


def test_rails_are_in_the_subnets_of_their_peers(ports: list[Ports]) -> None:
    """Each rail is in the same subnet on all nodes

    Network adapters of one rail belong into one IPv4 subnet (RoCE) or one subnet of InfiniBand (by the prefix of its
    addresses). One in another subnet reaches its peers over a router, or not at all: its address is wrong, or its cable
    is in the switch of another rail. `ip -4 addr`, `ibv_devinfo -v` (GID). A node of which all rails differ is behind
    other switches, and is left as it is.
    """
    nodes = {each.machine.node: each.before for each in ports}
    if sum(any(port.subnet for port in network_ports.fastest_ports(each)) for each in nodes.values()) < 2:
        not_applicable("fewer than two nodes have an active port of which the subnet is known")
    expect_none(network_ports.subnets_between_nodes(nodes))


@pytest.mark.figures("port_events")
def test_what_ports_waited_for(judge: Judge, ports: list[Ports]) -> None:
    """How often network ports had to wait, discard or send again, by node

    For information: congestion makes these grow as well as a fault does. One node or one kind of counter far above the
    others points to a slow receiver, a missing route, or, with RoCE, to a network that is not lossless as it should be
    (PFC and ECN of switches and adapters).
    """
    grown: dict[Where, dict[str, int]] = {
        Place(each.machine.node, "node"): network_ports.port_traffic(each.before, each.now)
        for each in ports
        if not isinstance(each.now, Missing)
    }
    names = sorted({name for counters in grown.values() for name in counters})
    if not names:
        not_applicable("no active network port of these nodes counts what it waits for")
    for name in names:
        values = {place: counters[name] for place, counters in grown.items() if name in counters}
        judge(Measurement("port_events", values, {"counter": name}), required=False)
