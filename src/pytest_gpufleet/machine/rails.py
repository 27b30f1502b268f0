"""What the network shows only to several nodes together: a cable in the switch of another rail, and lost packets."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from msgspec.structs import astuple

from pytest_gpufleet.machine import network_ports, tools
from pytest_gpufleet.machine.network_ports import VIRTUAL_FUNCTIONS, Packets, Port, fastest_ports
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Missing, Place, grouped


def read_switches(run: tools.RunTool = tools.output) -> dict[str, str]:
    """In which cables of ports at the highest rate end, by name or GUID, "" if silent: by LLDP, or over the cable."""
    ports = [port for port in fastest_ports(network_ports.read()) if port.adapter not in VIRTUAL_FUNCTIONS]
    if not ports:
        raise Absent("no network adapter with its own cable has an active port")
    found = {port.port: switch for port in ports if (switch := _switch(port, run)) is not None}
    if not any(found.values()):
        raise Unreadable("no switch says which of its ports is connected", "turn LLDP on in the switches")
    return found


def _switch(port: Port, run: tools.RunTool) -> str | None:
    """Of lldpctl(8): "lldp.ens1np0.chassis.name=leaf-3". Of InfiniBand the other end of the cable, by a direct route of
    one step (smpquery(8)): "NodeType:.......Switch"; None of a cable to another node."""
    if port.link_layer == "Ethernet":
        lines = run("lldpctl", "-f", "keyvalue", port.interface).splitlines() if port.interface else []
        about = dict(line.removeprefix(f"lldp.{port.interface}.").partition("=")[::2] for line in lines)
        return about.get("chassis.name") or about.get("chassis.mac") or ""
    number = port.port.partition("/")[2]
    lines = run("smpquery", "-C", port.device, "-P", number, "-D", "nodeinfo", f"0,{number}").splitlines()
    about = {name: text.lstrip(".") for name, _, text in (line.partition(":") for line in lines)}
    return about["Guid"] if about.get("NodeType") == "Switch" else None


def read_tcp(root: Path = Path("/")) -> Packets:
    """Of this host since it started (Documentation/networking/snmp_counter.rst)."""
    counts: dict[str, str] = {}
    for name in ("snmp", "netstat"):
        lines = [line.split() for line in (root / "proc/net" / name).read_text().splitlines()]
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            counts.update(zip(names, values, strict=True))
    return Packets(*(int(counts[name]) for name in ("OutSegs", "RetransSegs", "InSegs", "TCPOFOQueue")))


SWITCH_PORTS = HostFact("switch_ports", dict[str, str], read_switches, subject="cabling", on_request=True)
TCP = HostFact("tcp", Packets, read_tcp, subject="network")


def wired_otherwise(code: str, nodes: Mapping[int, Mapping[str, str]]) -> list[Fault]:
    """Ports in a network (subnet or switch) in which at least as many nodes have another port, or alone in one;
    `nodes`: the networks of their ports. Not of a node of which that is true of most: it was built so, or is the only
    one behind its switches. Where nobody can say which of two nodes it is, both are named."""
    inside = grouped((network, (node, port)) for node, ports in nodes.items() for port, network in ports.items())
    odd: dict[int, list[Fault]] = {}
    for network, members in inside.items():
        ports, present = Counter(port for _, port in members), len({node for node, _ in members})
        for node, port in members:
            others = [each for each, _ in ports.most_common() if each != port]
            if present == 1 or 2 * ports[port] <= present:
                what = f"{port}: it is in {network}, where other nodes have {others[0] if others else 'no port'}"
                odd.setdefault(node, []).append(Fault(code, (Place(node, "node"),), what))
    return [fault for node, faults in odd.items() if 2 * len(faults) <= len(nodes[node]) for fault in faults]


# Of all packets that are sent again. Healthy Ethernet loses up to some 0.01 %, and a network for RoCE or InfiniBand
# less; 1 % is to be found, also where half of what a node sends are acknowledgements. A judgement of this project.
LOST = 0.002
LEAST_PACKETS = 10_000  # in which one can see it


def between(before: Packets | Missing | None, now: Packets | Missing | None) -> Packets | None:
    """What was counted between two readings; None where nobody counts, or too few to judge, or anew from zero."""
    if not isinstance(before, Packets) or not isinstance(now, Packets):
        return None
    counted = Packets(*(new - old for new, old in zip(astuple(now), astuple(before), strict=True)))
    return counted if min(astuple(counted)) >= 0 and counted.sent + counted.received >= LEAST_PACKETS else None


def lost_packets(places: Mapping[tuple[int, str], Packets]) -> list[Fault]:
    """Of nodes and what counts there ("TCP", or a port). What is lost on the way out a place sends again itself; what
    is lost on the way in others send again, and it comes out of order: so each place has its share of all that was sent
    again. Named is who loses more than is usual; where nobody does, all that lose much."""
    again = sum(each.resent for each in places.values())
    part = again / max(1, sum(each.out_of_order for each in places.values()))
    shares = {
        "sent": {at: each.resent / max(each.sent, LEAST_PACKETS) for at, each in places.items()},
        "received": {at: part * each.out_of_order / max(each.received, LEAST_PACKETS) for at, each in places.items()},
    }
    usual = {way: median(lost.values()) for way, lost in shares.items() if lost}
    much = [(at, way, share) for way, lost in shares.items() for at, share in lost.items() if share > LOST]
    alone = [each for each in much if each[2] - usual[each[1]] > LOST]
    text = "{}: {:.2%} of the packets that it {} were lost"
    named = ((Place(node, "node"), text.format(what, share, way)) for (node, what), way, share in alone or much)
    return [Fault("packets_lost", (node,), what) for node, what in named]
