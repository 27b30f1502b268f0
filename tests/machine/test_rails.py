"""What the network shows only to several nodes together."""

import pytest

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.network_ports import Packets
from pytest_gpufleet.machine.rails import SwitchPort, between, lost_packets, read_switches, read_tcp, wired_otherwise
from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.verdict.fleet.equality import ports_unlike
from tests.machine.test_network_ports import NEAR, ports
from tests.machine.trees import written


def swapped(one, other):
    """The same ports with the subnets of two of them exchanged."""
    found = ports()
    subnets = [port.subnet for port in found]
    subnets[one], subnets[other] = subnets[other], subnets[one]
    return [ports(1, first=number, subnet=subnet)[0] for number, subnet in enumerate(subnets)]


def pairwise(order):
    """Two ports in each switch, in this order."""
    return [ports(1, first=number, subnet=f"leaf-{order[number] // 2}")[0] for number in range(8)]


ELSEWHERE = [ports(1, first=number, subnet=f"10.9.{number}.0/24")[0] for number in range(8)]
ROUTED = [[ports(1, first=rail, subnet=f"10.{node}.{rail}.0/31")[0] for rail in range(8)] for node in range(4)]


@pytest.mark.parametrize(("nodes", "odd"), [
    ([ports()] * 4, []),
    ([*[ports()] * 3, swapped(2, 5)], [(3, "mlx5_2/1"), (3, "mlx5_5/1")]),
    ([ports(), swapped(2, 5)], [(0, "mlx5_2/1"), (0, "mlx5_5/1"), (1, "mlx5_2/1"), (1, "mlx5_5/1")]),
    ([*[ports(7) + ports(1, first=7, subnet="10.0.99.0/24")], *[ports()] * 2], [(0, "mlx5_7/1")]),
    ([*[ports()] * 3, ELSEWHERE], []),  # a node of another part of the cluster
    ([ports()] * 2 + [ELSEWHERE] * 2, []),
    (ROUTED, []),  # a link of its own to the switch for each port
    ([ports(subnet="10.0.0.0/16")] * 3, []),  # all rails in one
    ([ports(subnet="fe80:0000:0000:0000", link_layer="InfiniBand")] * 2, []),
    ([ports(), ports(subnet=None)], []),
    ([pairwise((0, 1, 2, 3, 4, 5, 6, 7))] * 3, []),  # a switch for two rails
    ([*[pairwise((0, 1, 2, 3, 4, 5, 6, 7))] * 3, pairwise((0, 2, 1, 3, 4, 5, 6, 7))],
     [(3, "mlx5_1/1"), (3, "mlx5_2/1")]),
    ([ports(), ports()] + [ELSEWHERE] * 3 + [swapped(0, 1)], [(5, "mlx5_0/1"), (5, "mlx5_1/1")]),
    ([pairwise(range(8)), pairwise((2, 3, 0, 1, 6, 7, 4, 5))] * 2, []),  # every other node by design
])  # fmt: skip
def test_rails_in_another_subnet_than_those_of_other_nodes(nodes, odd):
    subnets = {node: {port.port: port.subnet for port in each if port.subnet} for node, each in enumerate(nodes)}
    faults = wired_otherwise("subnet_mismatch", subnets)
    found = [(fault.subjects[0].node, fault.what.partition(":")[0]) for fault in faults]
    assert sorted(found) == odd


def node(there=None, gpus=NEAR, vendor="Dell"):
    return gpus, {"network_ports": codec.plain(there or ports()), "dmi": {"vendor": vendor, "product": "XE9680"}}


def named(port=3, **differing):
    """Ports of which one has something else."""
    usual = {"adapter": "MT4129", "gid_index": 3, "pkeys": ("0xffff",)}
    own = [{**usual, "interface": f"ens{each}np0", **(differing if each == port else {})} for each in range(8)]
    return [ports(1, first=number, **each)[0] for number, each in enumerate(own)]


def alike(*last):
    return [node(named())] * 3 + [*last]


ODD_GPU = [*NEAR[:2], Gpu(2, {"network_adapters": ["mlx5_5"]}), *NEAR[3:]]


@pytest.mark.parametrize(("nodes", "odd"), [
    (alike(node(named())), []),
    (alike(node(named(interface="eth3"))), [("port_set_up_otherwise", [3])]),
    (alike(node(named(rate="200 Gb/sec (2X NDR)"))), [("network_port_unlike_others", [3])]),
    (alike(node(named(gid_index=5))), [("port_set_up_otherwise", [3])]),
    (alike(node(named(pkeys=("0x7fff",)))), [("port_set_up_otherwise", [3])]),
    (alike(node(named(mtu=1500))), [("mtu_mismatch", [3])]),
    (alike(node(named(), gpus=ODD_GPU)), [("nic_misplaced", [3])]),
    (alike(node(named(gid_index=None, interface=None, mtu=None))), []),  # its interface is in a container
    (alike(node(named()[:7])), []),  # a port less, of which its own run says so
    (alike(*[node(named(interface="enp9s0"), vendor="Supermicro", gpus=ODD_GPU)] * 2), []),
    (alike(node(named(mtu=1500), vendor="Supermicro")), [("mtu_mismatch", [3])]),
    ([node(named()), node(named(mtu=1500))], [("mtu_mismatch", [0, 1])]),  # nobody can say which of the two
    ([node(named()), node(named() + ports(1, 100, first=8, mtu=1500))], []),  # for management
])  # fmt: skip
def test_ports_that_are_set_up_otherwise_than_on_other_nodes(nodes, odd):
    faults = ports_unlike(dict(enumerate(nodes)))
    assert [(fault.name, [each.node for each in fault.subjects]) for fault in faults] == odd


LLDP = """lldp.ens3np0.via=LLDP
lldp.ens3np0.chassis.mac=b8:ce:f6:03:00:01
lldp.ens3np0.chassis.name=leaf-3
"""
NODE_INFO = """# Node info: DR path slid 65535; dlid 65535; 0,1
NodeType:........................{kind}
Guid:............................0xb8cef60300fb1234
"""


@pytest.mark.parametrize(("layer", "text", "found"), [
    ("Ethernet", LLDP, SwitchPort("mlx5_3/1", "leaf-3")),
    ("InfiniBand", NODE_INFO.format(kind="Switch"), SwitchPort("mlx5_3/1", "0xb8cef60300fb1234")),
    ("InfiniBand", NODE_INFO.format(kind="Channel Adapter"), None),  # another node, without a switch between
    ("Ethernet", "", None),
])  # fmt: skip
def test_the_switch_at_the_other_end_of_a_cable(monkeypatch, layer, text, found):
    monkeypatch.setattr(network_ports, "read", lambda: ports(1, first=3, interface="ens3np0", link_layer=layer))
    if found:
        assert read_switches(lambda *command: text) == [found]
    else:
        with pytest.raises(Unreadable):
            read_switches(lambda *command: text)


def test_packets_of_tcp_are_counted_by_the_kernel(tmp_path):
    files = {
        "snmp": "Ip: InReceives\nIp: 5\nTcp: InSegs OutSegs RetransSegs\nTcp: 90 70 2\n",
        "netstat": "TcpExt: TCPTimeouts TCPOFOQueue\nTcpExt: 1 3\n",
    }
    written(tmp_path, {f"proc/net/{name}": text for name, text in files.items()})
    assert read_tcp(tmp_path) == Packets(sent=70, resent=2, received=90, out_of_order=3)


def sent(nodes, lost=lambda one, other: 0.0001, ring=False, reordered=0.0, packets=200_000):
    """What nodes count that send to each other: to all, or each to the next. After a lost packet a window of others
    comes out of order."""
    counts = {node: [0, 0, 0, 0] for node in range(nodes)}
    for one in counts:
        to = [(one + 1) % nodes] if ring else [other for other in counts if other != one]
        for other in to:
            data, again = packets // len(to), round(packets / len(to) * lost(one, other))
            of_one, of_other = counts[one], counts[other]
            of_one[0] += data + data // 4  # a quarter acknowledges
            of_one[1] += again
            of_other[2] += data + data // 4
            of_other[3] += 40 * again + round(data * reordered)
    return {(node, "TCP"): Packets(*each) for node, each in counts.items()}


@pytest.mark.parametrize("nodes", [3, 4, 16, 100])
def test_a_node_that_loses_one_packet_of_a_hundred_is_named(nodes):
    into, out = (lambda one, other: 0.01 if other == 1 else 0.0001), (lambda one, other: 0.01 if one == 1 else 0.0001)
    for lost in (into, out):
        assert {fault.subjects[0].node for fault in lost_packets(sent(nodes, lost))} == {1}


@pytest.mark.parametrize(("counted", "named"), [
    (sent(4), set()),  # 0.01 %
    (sent(4, reordered=0.05), set()),  # out of order, and not lost
    (sent(2, lambda one, other: 0.01 * one), {0, 1}),  # between the two
    (sent(8, lambda one, other: 0.01), set(range(8))),  # what is between all of them
    (sent(8, lambda one, other: 0.01 if one == 3 else 0.0, ring=True), {3, 4}),
    ({(0, "mlx5_0/1"): Packets(10**9, 10**7, 10**9, 0), (1, "mlx5_0/1"): Packets(10**9, 9, 10**9, 9)}, {0, 1}),
    ({}, set()),
])  # fmt: skip
def test_who_loses_packets(counted, named):
    assert {fault.subjects[0].node for fault in lost_packets(counted)} == named


@pytest.mark.parametrize("now", [None, Packets(10**6, 0, 50, 0), Packets(9_000, 900, 900, 0)])
def test_counters_that_are_not_there_began_anew_or_counted_too_little_say_nothing(now):
    assert between(Packets(0, 0, 100, 0), now) is None
