"""Network ports as /sys describes them, in a folder in its place, and what is wrong with them."""

import os
import shutil
from contextlib import nullcontext

import pytest

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.network_ports import Packets, PcieLink, Port
from pytest_gpufleet.machine.rdma import between, lost_packets, read_switches, read_tcp, wired_otherwise
from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import Gpu
from pytest_gpufleet.verdict.fleet.equality import ports_unlike
from tests.machine.trees import written

COUNTERS = {
    "link_downed": "1\n", "link_error_recovery": "0\n", "symbol_error": "17\n", "port_rcv_errors": "14\n",
    "local_link_integrity_errors": "0\n", "excessive_buffer_overrun_errors": "15\n", "port_xmit_discards": "99\n",
}  # fmt: skip
SPEEDS = "current_link_speed", "max_link_speed"


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """A ConnectX-7 in a slot of eight lanes, with one port."""
    slot, mlx5_0 = "0000:15:01.0", "infiniband/mlx5_0"
    device, port = f"{slot}/0000:1b:00.0", f"{mlx5_0}/ports/1"
    contents = {
        port: {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
        f"{port}/counters": COUNTERS,
        f"{port}/hw_counters": {"out_of_sequence": "3", "packet_seq_err": "2", "lifespan": "10"},
        f"{port}/gids": {
            "0": "fe80:0000:0000:0000:0c42:a103:0065:a1b2",
            "3": f"{':'.join(['0000'] * 5)}:ffff:0a00:0305",
        },
        f"{port}/gid_attrs/types": {"2": "IB/RoCE v1", "3": "RoCE v2"},
        f"{port}/pkeys": {"0": "0xffff", "1": "0x8001", "2": "0x0000"},
        mlx5_0: {"hca_type": "MT4129", "fw_ver": "28.39.1002", "board_id": "MT_0000000838"},
        f"{device}/net/ib0": {"carrier_changes": "2", "mtu": "2044"},
        device: {"current_link_width": "8", "max_link_width": "16", **dict.fromkeys(SPEEDS, "32.0 GT/s PCIe")},
        slot: {"max_link_width": "8", "max_link_speed": "32.0 GT/s PCIe"},
    }
    files = {f"{folder}/{name}": text for folder, each in contents.items() for name, text in each.items()}
    written(tmp_path, {**files, f"{mlx5_0}/device": tmp_path / device})
    for name, path in (("ADAPTERS", "infiniband"), ("PCI_DEVICES_OF_THE_SYSTEM", "bus"), ("ROUTES", "route")):
        monkeypatch.setattr(network_ports, name, tmp_path / path)
    return tmp_path / port


LOST = "{:.6f} gf1 systemd-networkd[1587]: {}: Lost carrier\n"
GAINED = LOST.replace("Lost", "Gained")
HOURS, START = 3600, 1_749_680_000.0


@pytest.mark.parametrize(("up", "interface", "downs", "at", "times"), [
    (48 * HOURS, "ib0", "9", (40 * HOURS, 41 * HOURS), 2),
    (48 * HOURS, "ib0", "9", (40 * HOURS,), 1),
    (48 * HOURS, "ib0", "0", (40 * HOURS, 41 * HOURS), 2),  # somebody has cleared the counter
    (48 * HOURS, "ib0", "9", (10 * HOURS, 11 * HOURS), 0),  # in a long uptime
    (600, "ib0", "9", (60, 120, 180), 0),  # while the machine starts
    (48 * HOURS, "ib1", "9", (40 * HOURS, 41 * HOURS), None),  # another link
    (48 * HOURS, "ib1", "1", (40 * HOURS, 41 * HOURS), 1),
    (48 * HOURS, None, "2", (), None),  # nobody knows when
    (48 * HOURS, None, "1", (), 1),
])  # fmt: skip
def test_how_often_an_infiniband_link_went_down_within_a_day(adapter, monkeypatch, up, interface, downs, at, times):
    (adapter / "counters/link_downed").write_text(downs)
    monkeypatch.setattr(network_ports.time, "time", lambda: START + up)
    monkeypatch.setattr(network_ports.time, "monotonic", lambda: float(up))

    def journal(*command):
        assert command[:1] + command[-1:] == ("journalctl", "systemd-networkd")
        if interface is None:
            raise Unreadable("journalctl is not installed")
        lines = [line.format(START + each, interface) for each in (60, *at) for line in (LOST, GAINED)]
        lines[-1] = f"{START:.6f} gf1 systemd-networkd[1587]: Enumeration completed\n"  # it has not come back yet
        return "".join(lines)

    found = network_ports.read_flaps(journal)
    assert found == {"mlx5_0/1": times}
    assert [fault.name for fault in network_ports.flapping(found)] == ["network_link_flaps"] * (times == 2)


def test_what_is_read_of_a_port(adapter):
    (port,) = network_ports.read()
    assert (port.port, port.adapter, port.function, port.device) == ("mlx5_0/1", "MT4129", "0", "mlx5_0")
    assert port.pcie == PcieLink(16 / 2, 16, 8, 32, 32, 32)
    errors = {name: int(text) for name, text in COUNTERS.items() if name != "port_xmit_discards"}
    assert port.errors == {**errors, "carrier_changes": 2}
    assert port.traffic == {"port_xmit_discards": 99, "out_of_sequence": 3, "packet_seq_err": 2}
    assert (port.interface, port.pkeys, port.packets) == ("ib0", ("0xffff", "0x8001"), None)
    assert (port.firmware, port.board, port.mtu) == ("28.39.1002", "MT_0000000838", None)
    assert port.subnet == "fe80:0000:0000:0000"
    assert network_ports.ports_of({"network_ports": codec.plain([port])}) == [port]


# Of the interface, and of the host behind a gateway: the default route is of every interface.
ROUTE = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
ib0	00000000	010011AC	0003	0	0	0	00000000	0	0	0
ib0	0003000A	00000000	0001	0	0	0	00FFFFFF	0	0	0
eth0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
"""


def test_the_subnet_of_roce_is_that_of_its_interface(adapter):
    (adapter / "link_layer").write_text("Ethernet")
    assert network_ports.read()[0].subnet is None
    network_ports.ROUTES.write_text(ROUTE)
    written(adapter / "counters", {"port_xmit_packets": "7000", "port_rcv_packets": "9000"})
    (port,) = network_ports.read()
    assert (port.subnet, port.mtu, port.gid_index, port.pkeys) == ("10.0.3.0/24", 2044, 3, ())
    assert port.packets == Packets(sent=7000, resent=2, received=9000, out_of_order=3)


PAUSES = """NIC statistics:
     rx_prio0_pause: 4
     rx_prio3_pause: 50
     rx_prio3_pause_duration: 9
     tx_pfc_ena_frames_pri3: 6
     rx_packets_phy: 8
"""


def test_pauses_are_those_of_all_priorities(monkeypatch):
    monkeypatch.setattr(network_ports.tools, "output", lambda *command: PAUSES)
    assert network_ports._pauses("ens1np0") == {"rx_pfc": 54, "tx_pfc": 6}


def test_a_virtual_adapter_shows_neither_link_nor_errors(adapter):
    device = (adapter.parents[1] / "device").resolve()
    written(device, {"current_link_width": "255", "current_link_speed": "Unknown"})
    shutil.rmtree(adapter / "counters")
    (device / "net/ib0/carrier_changes").unlink()
    (port,) = network_ports.read()
    assert (port.pcie.lanes, port.pcie.speed, port.errors) == (0, 0, {})


def test_what_cannot_be_read_is_no_zero_and_a_port_that_does_not_answer_is_not_active(adapter):
    """A counter is None where reading fails, left out where the adapter does not count. Reading the state fails where
    the driver cannot ask the port (drivers/infiniband/core/sysfs.c, state_show)."""
    (adapter / "counters" / "symbol_error").write_text("nonsense")
    for path in (adapter / "counters" / "link_downed", adapter / "state"):
        path.unlink()
        os.mkdir(path)
    (port,) = network_ports.read()
    assert [port.errors[name] for name in ("symbol_error", "link_downed", "port_rcv_errors")] == [None, None, 14]
    assert (port.state, network_ports.active([port])) == ("unknown", [])


def test_an_adapter_without_a_driver_is_unreadable_and_another_card_is_none(adapter, tmp_path):
    shutil.rmtree(network_ports.ADAPTERS)
    for name, kind in (("0000:1b:00.0", "0x020700"), ("0000:1c:00.0", "0x010802")):
        written(network_ports.PCI_DEVICES_OF_THE_SYSTEM / name, {"vendor": "0x15b3", "class": kind})
    with pytest.raises(Unreadable, match=r"0000:1b:00\.0") as why:
        network_ports.read()
    assert why.value.remedy == "modprobe mlx5_ib"
    (network_ports.PCI_DEVICES_OF_THE_SYSTEM / "0000:1b:00.0/vendor").write_text("0x8086")
    assert network_ports.read() == []


SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"  # a root port, and the switch behind it


@pytest.mark.parametrize(("places", "near"), [
    ({"mlx5_0": f"{SWITCH}/0000:17:00.0/0000:18:00.0", "mlx5_1": "pci0000:37/0000:38:00.0"}, ["mlx5_0"]),
    ({"mlx5_0": f"{SWITCH}/0000:17:00.0", "mlx5_1": "pci0000:15/0000:15:02.0"}, ["mlx5_0"]),
    ({"mlx5_0": f"{SWITCH}/0000:17:00.0", "mlx5_1": f"{SWITCH}/0000:17:00.1", "mlx5_2": "pci0000:37"},
     ["mlx5_0", "mlx5_1"]),
    ({"mlx5_0": "pci0000:15/0000:18:00.0"}, ["mlx5_0"]),
    ({"mlx5_0": "pci0000:15/0000:18:00.0", "mlx5_1": "pci0000:15/0000:19:00.0"}, []),  # in a virtual machine
    ({"mlx5_0": "pci0000:37/0000:38:00.0"}, []),
    ({}, []),
])  # fmt: skip
def test_the_adapter_next_to_a_device_shares_most_of_its_way(tmp_path, monkeypatch, places, near):
    for name, place in places.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        written(tmp_path, {f"infiniband/{name}/device": tmp_path / place})
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path / "infiniband")
    assert network_ports.nearest(tmp_path / SWITCH / "0000:19:00.0") == near


ERRORS = {"link_downed": 1, "symbol_error": 17, "carrier_changes": 2}
TRAFFIC = {"port_xmit_wait": 1_000, "out_of_sequence": 3}


def counting(name="mlx5_0/1", state="4: ACTIVE", **changed):
    counts = {**ERRORS, **TRAFFIC, **changed}
    errors, traffic = ({name: counts[name] for name in kind} for kind in (ERRORS, TRAFFIC))
    return Port(name, state, errors=errors, traffic=traffic)


OF_BEFORE = Port("mlx5_0/1", "4: ACTIVE", errors={"link_downed": 1})  # without an interface


@pytest.mark.parametrize(("before", "now", "faults"), [
    (counting(), {}, []),
    (counting(), {"port_xmit_wait": 10**9, "out_of_sequence": 10**6}, []),  # congestion
    (counting(), {"symbol_error": 27}, []),
    (counting(), {"symbol_error": 28}, ["symbol_error"]),
    (counting(symbol_error=500), {"symbol_error": 28}, ["symbol_error"]),  # the adapter was reset in between
    (counting(symbol_error=500), {"symbol_error": 9}, []),
    (counting(), {"carrier_changes": 4}, ["carrier_changes"]),
    (counting(), {"carrier_changes": 4, "link_downed": 2}, ["link_downed", "carrier_changes"]),
    (counting(state="1: DOWN"), {"carrier_changes": 9}, []),  # without a cable
    (OF_BEFORE, {"carrier_changes": 9}, []),
])  # fmt: skip
def test_errors_of_a_port_are_faults_and_congestion_is_none(before, now, faults):
    found = network_ports.port_errors([before], [counting(**now)], 600.0)
    assert [fault.what.split()[1] for fault in found] == faults
    assert {fault.name for fault in found} <= {"network_port_errors"}


def test_what_grew_on_the_ports_in_use_is_shown():
    names = [("mlx5_0/1", "4: ACTIVE"), ("mlx5_1/1", "4: ACTIVE"), ("mlx5_2/1", "1: DOWN")]
    changed = [{"port_xmit_wait": 1_500}, {"out_of_sequence": 10}, {"port_xmit_wait": 9_999}]
    now = [counting(*name, **each) for name, each in zip(names, changed, strict=True)]
    grown = network_ports.port_traffic([counting(*name) for name in names], now)
    assert grown == {"port_xmit_wait": 500, "out_of_sequence": 7}
    assert network_ports.port_traffic([OF_BEFORE], [counting()]) == {}


NEAR = [Gpu(index, {"network_adapters": [f"mlx5_{index}"]}) for index in range(8)]
NEAT, HEAT = "MT_0000000838", "MT_0000000834"  # ConnectX-7 of 400 and of 200 Gbit/s


def ports(count=8, rate=400, board=NEAT, first=0, **more):
    """Each in a subnet of its own."""
    usual = {"state": "4: ACTIVE", "rate": f"{rate} Gb/sec (4X)", "link_layer": "Ethernet", "board": board, "mtu": 4200}
    numbers = range(first, first + count)
    return [Port(f"mlx5_{each}/1", **{**usual, "subnet": f"10.0.{each}.0/24", **more}) for each in numbers]


@pytest.mark.parametrize(("there", "able", "count"), [
    (ports(), {}, 0),
    (ports(rate=200), {}, 8),
    (ports(rate=200, board=HEAT), {}, 0),  # the same adapter model with a lower speed
    (ports(rate=200, board="DEL0000000041"), {}, 0),  # nobody knows
    (ports(rate=200, board="DEL0000000041"), {"mlx5_3/1": 400.0}, 1),
    (ports() + ports(2, 100, first=8), {}, 0),  # for storage
    (ports(rate=200) + ports(2, 400, first=8), {}, 8),  # storage that is faster
    (ports(rate=400, board="MT_0000001069"), {"mlx5_0/1": 200.0}, 0),
    (ports(1, 10, board="MT_0000000547"), {"mlx5_0/1": 25.0}, 0),  # for management: a ConnectX-6 Lx
    (ports(1, 100, board="MT_0000000223", link_layer="InfiniBand"), {}, 1),
])  # fmt: skip
def test_adapters_at_half_the_rate_of_their_board(there, able, count):
    assert len([*network_ports.below_their_board(network_ports.of_gpus(there, NEAR), able)]) == count


@pytest.mark.parametrize(("there", "gpus", "odd"), [
    (ports(), [], []),
    (ports(7) + ports(1, first=7, mtu=1500), [], ["mlx5_7/1"]),
    (ports(7) + ports(1, first=7, mtu=None), [], []),  # its interface is in a container
    (ports() + ports(1, first=8, mtu=1500), NEAR, []),  # for storage, of the same kind and rate
    (ports() + ports(2, first=8, mtu=9000), [], []),
    (ports() + ports(1, 100, first=8, mtu=1500), [], []),  # for management
    (ports(1) + ports(1, first=1, mtu=1500), [], []),
])  # fmt: skip
def test_a_port_with_another_mtu(there, gpus, odd):
    assert [fault.what.partition(":")[0] for fault in network_ports.other_mtu(there, gpus)] == odd


# ---------------------------------------------------------------- what the network shows only to several nodes together
def wired(subnet, order=range(8)):
    return [ports(1, first=number, subnet=subnet.format(place))[0] for number, place in enumerate(order)]


def swapped(one, other):
    places = {one: other, other: one}
    return wired("10.0.{}.0/24", [places.get(number, number) for number in range(8)])


def pairwise(order):
    """Two ports in each switch, in this order."""
    return wired("leaf-{}", [number // 2 for number in order])


ELSEWHERE, ROUTED = wired("10.9.{}.0/24"), [wired(f"10.{node}.{{}}.0/31") for node in range(4)]


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
    assert sorted([(fault.subjects[0].node, fault.what.partition(":")[0]) for fault in faults]) == odd


def node(there=None, gpus=NEAR, vendor="Dell"):
    return gpus, {"network_ports": codec.plain(there or ports()), "dmi": {"vendor": vendor, "product": "XE9680"}}


def named(port=3, **differing):
    usual = {"adapter": "MT4129", "gid_index": 3, "pkeys": ("0xffff",)}
    own = [{**usual, "interface": f"ens{each}np0", **(differing if each == port else {})} for each in range(8)]
    return [ports(1, first=number, **each)[0] for number, each in enumerate(own)]


def alike(*last):
    return [node(named())] * 3 + [*last]


ODD_GPU = [*NEAR[:2], Gpu(2, {"network_adapters": ["mlx5_5"]}), *NEAR[3:]]


@pytest.mark.parametrize(("nodes", "odd"), [
    (alike(node(named(rate="200 Gb/sec (2X NDR)"))), [("network_port_unlike_others", [3])]),
    (alike(node(named(gid_index=5))), [("port_set_up_otherwise", [3])]),
    (alike(node(named(pkeys=("0x7fff",)))), [("port_set_up_otherwise", [3])]),
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
    ("Ethernet", LLDP, "leaf-3"),
    ("InfiniBand", NODE_INFO.format(kind="Switch"), "0xb8cef60300fb1234"),
    ("InfiniBand", NODE_INFO.format(kind="Channel Adapter"), None),  # another node, without a switch between
    ("Ethernet", "", None),
])  # fmt: skip
def test_the_switch_at_the_other_end_of_a_cable(monkeypatch, layer, text, found):
    monkeypatch.setattr(network_ports, "read", lambda: ports(1, first=3, interface="ens3np0", link_layer=layer))
    with nullcontext() if found else pytest.raises(Unreadable):
        assert read_switches(lambda *command: text) == {"mlx5_3/1": found}


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
    ({(0, "TCP"): Packets(20, 1, 12_000, 0), (1, "TCP"): Packets(12_000, 0, 20, 0)}, set()),  # too few to say so
    ({}, set()),
])  # fmt: skip
def test_who_loses_packets(counted, named):
    assert {fault.subjects[0].node for fault in lost_packets(counted)} == named


@pytest.mark.parametrize("now", [None, Packets(10**6, 0, 50, 0), Packets(9_000, 900, 900, 0)])
def test_counters_that_are_not_there_began_anew_or_counted_too_little_say_nothing(now):
    assert between(Packets(0, 0, 100, 0), now) is None
