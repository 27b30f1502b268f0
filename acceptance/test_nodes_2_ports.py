"""The network's ports after all nodes have used them together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from pytest_gpufleet import Judge, LiveMachine, Measurement, Place, expect_none, not_applicable, not_judged
from pytest_gpufleet.machine import network_ports, rdma
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.machine.network_ports import NETWORK_PORTS, Port
from pytest_gpufleet.machine.rdma import SWITCH_PORTS, TCP
from pytest_gpufleet.model.place import Missing, Where
from pytest_gpufleet.verdict.fleet import equality

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
    """Network ports between nodes: no link down, few errors under load

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
    """Network ports have the same rate, MTU, names and settings on all nodes

    A port with a smaller MTU drops what others send, or makes its rail slow for all. Jobs name adapters, interfaces,
    the index of the address for RoCE (GID) and of the partition (PKey) alike on all nodes: where they differ, one node
    uses another network, or none. Each port at the highest rate is compared with that of its name on the other nodes,
    and so is the adapter next to each GPU. Names may differ between machines of different models. `ip link`, `rdma
    link`, `show_gids`, `nvidia-smi topo -m`.
    """
    nodes = {each.machine.node: (each.machine.gpus, each.machine.host) for each in ports}
    if sum(bool(network_ports.fastest_ports(each.before)) for each in ports) < 2:
        not_applicable("fewer than two nodes have an active InfiniBand or RoCE port")
    expect_none(equality.ports_unlike(nodes))


def test_rails_are_in_the_subnets_of_their_peers(ports: list[Ports]) -> None:
    """Each rail is in the same subnet on all nodes

    Network adapters of one rail belong into one IPv4 subnet (RoCE) or one subnet of InfiniBand (by the prefix of its
    addresses). One in another subnet reaches its peers over a router, or not at all: its address is wrong, or its cable
    is in the switch of another rail. `ip -4 addr`, `ibv_devinfo -v` (GID). A node whose rails all differ is behind
    other switches: no fault.
    """
    nodes = {
        each.machine.node: {port.port: port.subnet for port in network_ports.fastest_ports(each.before) if port.subnet}
        for each in ports
    }
    if sum(map(bool, nodes.values())) < 2:
        not_applicable("fewer than two nodes have an active port of which the subnet is known")
    expect_none(rdma.wired_otherwise("subnet_mismatch", nodes))


def test_cables_are_in_the_switches_of_their_peers(machine: LiveMachine) -> None:
    """Each rail's cable is in the same switch on all nodes

    Two cables that are swapped between rails work at both ends, and send the traffic of two rails over other switches.
    The switches themselves say which port is where: over LLDP (`lldpctl`), of InfiniBand over the cable (`smpquery`, as
    root). Swap the cables of the two ports that are named. A node where most cables differ was built like this: no
    fault.
    """
    name = SWITCH_PORTS.name
    found = {node.number: SWITCH_PORTS.of({name: node.now(name)}) for node in machine.nodes if node.machine}
    read = {node: ports for node, ports in found.items() if not isinstance(ports, Missing)}
    known = {node: {port: switch for port, switch in ports.items() if switch} for node, ports in read.items()}
    expect_none(rdma.wired_otherwise("cable_swapped", known))
    missing = {node: ports for node, ports in found.items() if isinstance(ports, Missing)}
    if not read and all(each.absent for each in missing.values()):
        not_applicable("\n".join(f"node {node}: {why}" for node, why in missing.items()))
    silent = {node: ", ".join(port for port, switch in ports.items() if not switch) for node, ports in read.items()}
    why = [f"node {node}: {each}" for node, each in missing.items()]
    why += [f"node {node}: no switch answers at {ports}" for node, ports in silent.items() if ports]
    if why:
        not_judged("\n".join(why))


def test_few_packets_are_lost(machine: LiveMachine, ports: list[Ports]) -> None:
    """Packet loss between nodes under load is low

    A network that loses 1 % of its packets works, and is many times slower: each has to be sent again. Counted are TCP
    (`nstat`) and RDMA (`rdma statistic`), what a node sends again and what reaches it out of order, since the run
    began; 0.2 % are allowed. Look at cable, transceiver and switch port of the node that is named, and at PFC and ECN.
    """
    tcp = {
        (node.number, "TCP"): rdma.between(TCP.of(node.machine.host), TCP.of({TCP.name: node.now(TCP.name)}))
        for node in machine.nodes
        if node.machine
    }
    of_ports = {
        (each.machine.node, port.port): rdma.between(port.packets, now.packets)
        for each in ports
        if not isinstance(each.now, Missing)
        for port in each.before
        for now in each.now
        if now.port == port.port
    }
    counted = [{at: each for at, each in medium.items() if each} for medium in (tcp, of_ports)]
    if not any(counted):
        not_applicable("no node sent enough packets to see how many are lost")
    expect_none(fault for each in counted for fault in rdma.lost_packets(each))
    require_answers(ports)


@pytest.mark.figures("port_events")
def test_what_ports_waited_for(judge: Judge, ports: list[Ports]) -> None:
    """Network port waits, discards and retransmissions, by node

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
