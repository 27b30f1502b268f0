"""InfiniBand, RoCE and EFA ports as the system describes them: state, rate, PCIe link, network; and what is wrong."""

import errno
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.kernel_log import FLAPPING, FLAPS, FLAPS_EXCUSED, FLAPS_WITHIN
from pytest_gpufleet.machine.pcie import PCI_DEVICES
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.place import Gpu, Missing, grouped

ADAPTERS = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
PCI_DEVICES_OF_THE_SYSTEM = Path("/sys/bus/pci/devices")
ROUTES = Path("/proc/net/route")
NVIDIA, NETWORK_CLASS = "0x15b3", "0x02"  # Mellanox: the vendor of a PCI device; of include/linux/pci_ids.h
# Of the standard's port counters those that a bad cable, transceiver or adapter makes grow, and how many of them a day
# are still healthy: the thresholds of ibcheckerrs (infiniband-diags), which are for all since the counters were
# cleared. A link that goes down while a run lasts is one too many.
ERRORS_A_DAY = {
    "link_downed": 0, "link_error_recovery": 10, "symbol_error": 10, "port_rcv_errors": 10,
    "local_link_integrity_errors": 10, "excessive_buffer_overrun_errors": 10,
}  # fmt: skip
# What also grows where nothing is broken, by traffic that meets: shown, and not judged. The second are what a
# lossless network never needs much of: RoCE's of the kernel's mlx5 and bnxt_re drivers, the last two EFA's.
TRAFFIC = ("port_xmit_wait", "port_xmit_discards")
ROCE = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans",
    "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "rx_icrc_encapsulated",
    "tx_cnp_pkts", "rx_cnp_pkts", "rx_ecn_marked_pkts", "retrans_pkts", "retrans_timeout_events",
)  # fmt: skip
# Priority flow control by `ethtool -S`: mlx5 (en_stats.c, pport_per_prio_pfc_stats_desc), bnxt_en (bnxt_port_stats_arr)
PAUSES = re.compile(r"^ *([rt]x)_(?:prio\d_pause|pfc_ena_frames_pri\d): (\d+)$", re.MULTILINE)
# Of mlx5 (port and queues) and of bnxt_re (hw_counters.c). One lost packet makes several of them grow.
PACKETS = (
    ("counters/port_xmit_packets", "hw_counters/tx_pkts"),
    ("hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err", "hw_counters/seq_err_naks_rcvd",
     "hw_counters/to_retransmits"),
    ("counters/port_rcv_packets", "hw_counters/rx_pkts"),
    ("hw_counters/out_of_sequence", "hw_counters/oos_drop_count"),
)  # fmt: skip
GIDS, IPV4 = 32, "0000:0000:0000:0000:0000:ffff:"  # how many are looked at; the kernel has two for each address
NOT_COUNTED = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)
# Of the bits on a PCIe link those that are payload, from generation 3 on; of these, without headers of 256 byte packets
PAYLOAD, MESSAGES = 128 / 130, 0.88
# Gbit/s of a port of boards that come with one speed, by the name of their settings (PSID; /sys: board_id), with part
# number. A model comes in several speeds: a ConnectX-7 with 200 and with 400, which only its board shows.
BOARDS = {
    "MT_0000000223": 200,  # ConnectX-6 MCX653105A-HDAT
    "MT_0000000834": 200,  # ConnectX-7 MCX755106AS-HEAT, two ports
    "MT_0000000838": 400,  # ConnectX-7 MCX75310AAS-NEAT
    "MT_0000000884": 200,  # BlueField-3 B3220 900-9D3B6-00CV-AA0, two ports
    "MT_0000001069": 400,  # BlueField-3 B3140H 900-9D3D4-00EN-HA0
}
# Virtual functions, which show neither cable nor board: drivers/net/ethernet/mellanox/mlx5/core/main.c, in decimal.
VIRTUAL_FUNCTIONS = ("MT4116", "MT4118", "MT4120", "MT4122", "MT4124", "MT4126")
# Gbit/s, up to which an Ethernet adapter may be there for management, which needs less than it can.
OF_MANAGEMENT = 100


class PcieLink(msgspec.Struct, frozen=True):
    """Lanes and GT/s: as it runs, and as the adapter and the port above it can. 0: the system does not show it."""

    lanes: float = 0.0
    lanes_able: float = 0.0
    lanes_of_port: float = 0.0
    speed: float = 0.0
    speed_able: float = 0.0
    speed_of_port: float = 0.0

    @property
    def gigabits(self) -> float:
        """What it carries in a second, in one direction."""
        return self.lanes * self.speed * PAYLOAD


class Packets(msgspec.Struct, frozen=True):
    """`resent`: that had to be sent again; `out_of_order`: received ones, before which some were missing."""

    sent: int
    resent: int
    received: int
    out_of_order: int


class Port(msgspec.Struct, frozen=True):
    """`port`: "mlx5_0/1". `state`: "unknown" where the adapter does not answer. `function`: of the PCI device, by which
    ports of one adapter differ. `errors`, and `traffic` that is no error by itself: counts by name, None for one that
    cannot be read; that a link came or went is an error too. `mtu` and `subnet` ("10.0.3.0/24") are those of its
    network `interface`; of InfiniBand there is no `mtu` (it is one of IP alone, and changes when the interface comes
    up), and `subnet` is the prefix of its addresses. `gid_index`: of the first address for RoCE v2 over IPv4."""

    port: str
    state: str = "unknown"
    rate: str | None = None
    link_layer: str | None = None
    adapter: str | None = None
    firmware: str | None = None
    guid: str | None = None
    board: str | None = None
    function: str = ""
    pcie: PcieLink = PcieLink()
    errors: Mapping[str, int | None] = {}
    traffic: Mapping[str, int | None] = {}
    mtu: int | None = None
    subnet: str | None = None
    interface: str | None = None
    gid_index: int | None = None
    pkeys: tuple[str, ...] = ()
    packets: Packets | None = None

    @property
    def device(self) -> str:
        return self.port.partition("/")[0]

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state

    @property
    def gigabits(self) -> float:
        """Of "400 Gb/sec (4X NDR)". Of bonded ports that of one, as a connection of NCCL uses (NVIDIA/nccl#1015)."""
        found = re.match(r"[0-9.]+", self.rate or "")
        return float(found[0]) if found else 0.0


def read() -> list[Port]:
    """Raises Unreadable where there is none, and an NVIDIA adapter on the PCI bus without a driver for RDMA."""
    ports = [_port(port) for port in sorted(ADAPTERS.glob("*/ports/*"))]
    of_nvidia = (each for each in PCI_DEVICES_OF_THE_SYSTEM.glob("*") if tools.text(each / "vendor") == NVIDIA)
    there = (each.name for each in of_nvidia if (tools.text(each / "class") or "").startswith(NETWORK_CLASS))
    if not ports and (names := ", ".join(sorted(there))):
        why = f"network adapters of NVIDIA are there ({names}), and no RDMA driver has them"
        raise Unreadable(why, "modprobe mlx5_ib")
    return ports


def _port(port: Path) -> Port:
    adapter, device = port.parents[1], (port.parents[1] / "device").resolve()
    interfaces = sorted(device.glob("net/*"))
    interface = interfaces[0] if len(interfaces) == 1 else None
    changes = [tools.whole(path) or 0 for path in device.glob("net/*/carrier_changes")]
    about = tools.texts(port, rate="rate", link_layer="link_layer")
    about |= tools.texts(adapter, adapter="hca_type", firmware="fw_ver", guid="node_guid", board="board_id")
    infiniband, ethernet = (about["link_layer"] == layer for layer in ("InfiniBand", "Ethernet"))
    gid = (tools.text(port / "gids/0") or "").split(":")  # its own address, of which the first half is the subnet's
    prefix = ":".join(gid[:4]) if len(gid) == 8 else None
    # Documentation/ABI/stable/sysfs-class-infiniband; an IPv4 address begins with ::ffff.
    ipv4 = (index for index in range(GIDS) if (tools.text(port / f"gids/{index}") or "").startswith(IPV4))
    packets = [[count for path in paths if (count := tools.whole(port / path)) is not None] for paths in PACKETS]
    pauses = _pauses(interface.name) if interface and ethernet else {}
    pkeys = (tools.text(port / f"pkeys/{index}") for index in range(len(list(port.glob("pkeys/*")))))
    # A virtual function does not show its lanes.
    ways = (device, "current"), (device, "max"), (device.parent, "max")
    lanes = [tools.lanes(folder / f"{which}_link_width") or 0.0 for folder, which in ways]
    return Port(
        port=f"{adapter.name}/{port.name}",
        state=tools.text(port / "state") or "unknown",
        **about,
        function=device.name.rpartition(".")[2],
        pcie=PcieLink(*lanes, *[tools.number(folder / f"{which}_link_speed") or 0.0 for folder, which in ways]),
        errors=_counts(port / "counters", ERRORS_A_DAY) | ({"carrier_changes": sum(changes)} if changes else {}),
        traffic=_counts(port / "counters", TRAFFIC) | _counts(port / "hw_counters", ROCE) | pauses,
        mtu=tools.whole(interface / "mtu") if interface and not infiniband else None,
        subnet=prefix if infiniband else _ip_subnet({path.name for path in interfaces}),
        interface=interface.name if interface else None,
        gid_index=next((index for index in ipv4 if tools.text(port / f"gid_attrs/types/{index}") == "RoCE v2"), None),
        pkeys=tuple(key for key in pkeys if key and key != "0x0000") if infiniband else (),
        packets=Packets(*map(max, packets)) if all(packets) else None,
    )


def _pauses(interface: str) -> dict[str, int | None]:
    """Frames of priority flow control received and sent, over all priorities, where ethtool is there to say."""
    counts = Counter[str]()
    with suppress(Unreadable):
        for way, count in PAUSES.findall(tools.output("ethtool", "-S", interface)):
            counts[f"{way}_pfc"] += int(count)
    return {**counts}


def _ip_subnet(interfaces: set[str]) -> str | None:
    """By the kernel's routes: hexadecimal, as in memory (net/ipv4/fib_trie.c, fib_route_seq_show). None if several."""
    rows = [line.split() for line in (tools.text(ROUTES) or "").splitlines()[1:]]
    subnets = {(row[1], row[7]) for row in rows if row[0] in interfaces and int(row[2], 16) == 0 != int(row[7], 16)}
    if len(subnets) != 1:
        return None
    ((network, mask),) = subnets
    return f"{'.'.join(map(str, reversed(bytes.fromhex(network))))}/{int(mask, 16).bit_count()}"


def _counts(counters: Path, names: Iterable[str]) -> dict[str, int | None]:
    """What the adapter does not count, or a virtual one may not show, is left out."""
    counts: dict[str, int | None] = {}
    for name in names:
        try:
            counts[name] = int((counters / name).read_text())
        except (OSError, ValueError) as error:
            if not (isinstance(error, OSError) and error.errno in NOT_COUNTED):
                counts[name] = None
    return counts


NETWORK_PORTS = HostFact("network_ports", list[Port], read, subject="network")

# What systemd-networkd writes into the journal: "1749680792.504812 gf1 systemd-networkd[1587]: ib0: Lost carrier". The
# kernel has such lines of Ethernet alone. Azure's health checks (azure_ib_link_flapping.nhc) and Meta's (gcm) look for
# the same. How often is too often, and what is excused, as in the kernel log.
CARRIER = re.compile(r"^(\d+)\.\d+ .*\]: ([\w.@-]+): (Lost|Gained) carrier$", re.MULTILINE)


def read_flaps(run: tools.RunTool = tools.output) -> dict[str, int | None]:
    """How often the link of each active InfiniBand port went down in a day; None if unknown, and more than once."""
    if not (ports := [port for port in active(read()) if port.link_layer == "InfiniBand"]):
        raise Absent("no InfiniBand port is active")
    began, logged = time.time() - min(FLAPS_WITHIN, time.monotonic() - FLAPS_EXCUSED), ""
    with suppress(Unreadable):
        logged = run("journalctl", "-q", "--system", "-b", "-o", "short-unix", "-t", "systemd-networkd")
    lines = CARRIER.findall(logged)
    found = dict[str, int | None]()
    for port in ports:
        own = [(int(at), what) for at, interface, what in lines if interface == port.interface]
        found[port.port] = sum(what == "Lost" and at >= began for at, what in own) if own else None
        if not own and (downs := port.errors.get("link_downed")) is not None and downs < FLAPS:
            found[port.port] = downs
    return found


LINK_FLAPS = HostFact("link_flaps", dict[str, int | None], read_flaps, subject="flaps", on_request=True)


def flapping(ports: Mapping[str, int | None]) -> list[Fault]:
    text = "{}: its link went down {} times within 24 hours, by the system log"
    often = ((port, times) for port, times in ports.items() if times is not None and times >= FLAPS)
    return [node_fault(FLAPPING, text.format(*each)) for each in often]


def ports_of(host: Mapping[str, Any]) -> list[Port]:
    return [] if isinstance(ports := NETWORK_PORTS.of(host), Missing) else ports


def any_active() -> bool:
    with suppress(Unreadable):
        return bool(active(read()))
    return False


def carried(port: str) -> tuple[int, int] | None:
    """Bytes that a port ("mlx5_0/1") or a network interface ("lo") has sent and received; None where nobody counts."""
    device, slash, number = port.partition("/")
    counters = ADAPTERS / device / "ports" / number / "counters" if slash else INTERFACES / port / "statistics"
    names, size = (("port_xmit_data", "port_rcv_data"), 4) if slash else (("tx_bytes", "rx_bytes"), 1)
    with suppress(OSError, ValueError):
        sent, received = (size * int((counters / name).read_text()) for name in names)
        return sent, received
    return None


def nearest(device: Path) -> list[str]:
    """The adapters ("mlx5_3") that share most of their way over PCIe with this device; none if all of several do."""
    shared = {}  # how many steps from the root of a PCIe hierarchy ("pci0000:15") on they have in common
    for each in sorted(ADAPTERS.glob("*")):
        common = Path(os.path.commonpath([device, (each / "device").resolve()])).parts
        shared[each.name] = sum(part.startswith("pci") or bool(tools.PCI_STEP.fullmatch(part)) for part in common)
    most = max(shared.values(), default=0)
    near = [name for name, steps in shared.items() if steps == most]
    return near if most and (len(near) < len(shared) or len(near) == 1) else []


def active(ports: Iterable[Port]) -> list[Port]:
    return [port for port in ports if port.is_active]


def fastest_ports(ports: Iterable[Port]) -> list[Port]:
    """The active InfiniBand and RoCE ports at the highest rate: slower ones are for storage and management."""
    rdma = _rdma(ports)
    most = max((port.gigabits for port in rdma), default=0)
    return [port for port in rdma if port.gigabits == most]


def line_rate(ports: Sequence[Port]) -> int:
    """Gbit/s of ports of one rate, or what their slots carry where all of them carry less; 0 if nobody says."""
    rate = max((int(port.gigabits) for port in ports), default=0)
    return min(rate, max((int(port.pcie.gigabits) for port in ports), default=0) or rate)


def of_gpus(ports: Sequence[Port], gpus: Sequence[Gpu]) -> list[Port]:
    """Those at the highest rate, and those of one kind and rate of which each of several GPUs has one."""
    least, fastest = max(2, len(gpus)), fastest_ports(ports)
    alike = _kinds(_rdma(ports), gpus, "rate")
    return [port for kind in alike for port in kind if len(kind) >= least or port in fastest]


def _rdma(ports: Iterable[Port]) -> list[Port]:
    return [port for port in active(ports) if port.link_layer in ("InfiniBand", "Ethernet") and port.gigabits]


def adapters_near(gpus: Sequence[Gpu]) -> set[str]:
    """The adapters next to these GPUs; none where that is not known of each of them, as in many virtual machines."""
    near = [gpu.get("network_adapters") or () for gpu in gpus]
    return set[str]().union(*near) if all(near) else set()


def gigabits_for_each_gpu(gpus: Sequence[Gpu], host: Mapping[str, Any]) -> float:
    """Gbit/s, one way, that each GPU has of the network if all send; 0 if no port says. Ports of a GPU are added up,
    and GPUs share what are fewer; not those for storage and management: not next to a GPU, or of another kind than
    those by which a GPU has most. Where PCIe links of all ports, or of older GPUs, carry less, that counts."""
    used, devices = [port for port in active(ports_of(host)) if port.gigabits], PCI_DEVICES.of(host)
    near, present = adapters_near(gpus), len(gpus)
    if next_to := [port for port in used if port.device in near]:
        used = next_to
    elif not isinstance(devices, Missing):  # of several ports for each, some may be those of GPUs that take no part
        present = max(present, sum(each.kind == "gpu" for each in devices.values()))
    each = 0.0
    for ports in grouped(((port.adapter, port.link_layer, port.gigabits), port) for port in used).values():
        # Those of one adapter, which are functions of one PCI device, share its slot.
        slot = MESSAGES * max(port.pcie.gigabits for port in ports) / len({port.function for port in ports})
        of_one = len(ports) // present or min(1, len(ports) / len(gpus)) if gpus else 0
        each = max(each, min(ports[0].gigabits, slot or math.inf) * of_one)
    for gpu in gpus:  # from PCIe 5 on they may stand behind their adapters, and show another link
        generation, lanes = gpu.get("pcie_generation_max") or 0, gpu.get("pcie_width_max") or 0
        if generation in (3, 4) and lanes >= 8:
            each = min(each, MESSAGES * PAYLOAD * lanes * 2.0**generation)
    rate = float(f"{each:.4g}")
    return int(rate) if rate.is_integer() else rate


def not_up(ports: Sequence[Port], gpus: Sequence[Gpu], needed: bool) -> list[Fault]:
    """Ports that are down, or not as fast as most, where others of their kind are up. And if the network is `needed`
    those of a kind of which none is up, and which GPUs need: no other is up, or none next to the GPUs; where that is
    unknown, there is one for each GPU, and fewer others are up. What else is down, nobody may have plugged in."""
    up, near, wrong = active(ports), _next_to(gpus), list[Port]()
    cut_off = not any(port.device in near for port in up)
    for kind in _kinds(ports, gpus):
        rates = [port.rate for port in active(kind)]
        usual = max(rates, key=rates.count, default=None)
        of_gpus = cut_off and any(port.device in near for port in kind) if near else len(kind) >= len(gpus) > len(up)
        if rates or (needed and (not up or of_gpus)):
            wrong += [port for port in kind if port.rate != usual or not port.is_active]
    return [node_fault("network_port_unlike_others", f"{port.port} is {port.state} at {port.rate}") for port in wrong]


def _kinds(ports: Iterable[Port], gpus: Sequence[Gpu], *more: str) -> Iterable[list[Port]]:
    """By adapter model, link layer, place on the adapter, whether next to a GPU, and `more` of their fields."""
    near, kind = _next_to(gpus), attrgetter("adapter", "link_layer", "function", *more)
    return grouped(((*kind(port), port.device in near), port) for port in ports).values()


def _next_to(gpus: Sequence[Gpu]) -> set[str]:
    return adapters_near(gpus) if len(gpus) > 1 else set()


def ports_behind_slow_pcie(ports: Iterable[Port]) -> Iterator[Fault]:
    """Active ports whose PCIe link runs with less than adapter and slot can, or than the port needs, unless all of them
    do: with fewer lanes than the adapter has, or slower than that of another port."""
    links = [(port, port.pcie) for port in active(ports) if port.pcie.gigabits]
    fastest = max((link.gigabits for _, link in links), default=0.0)
    for port, link in links:
        lanes = min(filter(None, (link.lanes_able, link.lanes_of_port)), default=link.lanes)
        speed = min(filter(None, (link.speed_able, link.speed_of_port)), default=link.speed)
        runs = f"{port.port}: its PCIe link runs at {link.speed:g} GT/s on {link.lanes:g} lanes"
        if link.lanes < lanes or link.speed < speed:
            yield node_fault("nic_pcie_slow", f"{runs}, adapter and slot can {speed:g} GT/s on {lanes:g}")
        elif link.gigabits < port.gigabits and (link.lanes < link.lanes_able or link.gigabits < fastest):
            yield node_fault("nic_pcie_slow", f"{runs}, too little for its {port.gigabits:g} Gbit/s")


def below_their_board(ports: Iterable[Port], able: Mapping[str, float]) -> Iterator[Fault]:
    """Ports that run at half the rate of their board or less. `able`: Gbit/s of ports that are known otherwise."""
    for port in ports:
        most = rate_of_board(port, able)
        least = 0 if port.link_layer == "InfiniBand" else OF_MANAGEMENT
        if 0 < 2 * port.gigabits <= most > least:
            yield node_fault("nic_rate_low", f"{port.port}: runs at {port.rate}, and its board can {most:g} Gbit/s")


def rate_of_board(port: Port, able: Mapping[str, float]) -> float:
    return able.get(port.port) or BOARDS.get(port.board or "", 0)


def other_mtu(ports: Sequence[Port], gpus: Sequence[Gpu]) -> Iterator[Fault]:
    """One active port whose MTU is not that of three or more others of its kind and rate."""
    for role in _kinds((port for port in active(ports) if port.mtu), gpus, "rate"):
        mtus = grouped((port.mtu, port) for port in role)
        alone = [each[0] for each in mtus.values() if len(each) == 1]
        if len(mtus) == 2 and len(alone) == 1 and len(role) > 3:
            (usual,) = mtus.keys() - {alone[0].mtu}
            what = f"{alone[0].port}: its MTU is {alone[0].mtu}, that of {len(role) - 1} others like it {usual}"
            yield node_fault("mtu_mismatch", what)


def port_errors(before: Iterable[Port], now: Iterable[Port], seconds: float) -> list[Fault]:
    """Ports that were active and have counted more errors than healthy ones since, are gone, or cannot be read."""
    later, wrong = {port.port: port.errors for port in now}, list[str]()
    for port in active(before):
        counted = later.get(port.port)
        wrong += [f"{port.port}: it is gone"] if counted is None else []
        for name, more in tools.grown(port.errors, counted or {}).items():
            allowed = ERRORS_A_DAY.get(name, 0) * max(1, seconds / 86_400)
            if more > allowed:
                grew = f"grew by {more} in {seconds:.0f} s, a healthy port has at most {allowed:.0f}"
                wrong.append(f"{port.port}: {name} {grew}")
        unread = [name for name in port.errors if counted is not None and counted.get(name) is None]
        wrong += [f"{port.port}: {name} cannot be read" for name in unread]
    return [node_fault("network_port_errors", what) for what in wrong]


def port_traffic(before: Iterable[Port], now: Iterable[Port]) -> dict[str, int]:
    """What grew on active ports between two readings and is no error by itself, by name, over all of them."""
    later, grown = {port.port: port.traffic for port in now}, Counter[str]()
    for port in active(before):
        grown.update(tools.grown(port.traffic, later.get(port.port, {})))
    return dict(grown)
