"""How fast network adapters write by RDMA, by ib_write_bw and ib_write_lat of perftest: server and client on one port
of this host, which leaves cable and other machines out, or on two nodes. They find each other over TCP. And what only
several nodes together show: a cable in the switch of another rail, and lost packets."""

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile

import msgspec
from msgspec.structs import astuple

from pytest_gpufleet.machine import network_ports, tools
from pytest_gpufleet.machine.network_ports import VIRTUAL_FUNCTIONS, Packets, Port, fastest_ports
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import Gpu, Missing, Place, grouped


class Perftest(msgspec.Struct, frozen=True):
    """A program with its options, and which figure of its report (REPORT_FMT_JSON of perftest_parameters.h) counts."""

    program: str
    options: tuple[str, ...]
    figure: str


# As Azure's health checks write (azure_ib_write_bw_gdr.nhc). A thousand of them take 0.2 s at 400 Gb/s.
NBYTES, WRITES = 8 << 20, 1000
BANDWIDTH = Perftest("ib_write_bw", ("-s", str(NBYTES), "-n", str(WRITES), "--report_gbits"), "BW_average")
LATENCY = Perftest("ib_write_lat", ("-s", "2", "-n", "1000"), "t_typical")  # the median, of one way
REACH = Perftest("ib_write_bw", ("-s", "65536", "-n", "100", "--report_gbits"), "BW_average")  # some packets of any MTU
SECONDS = 20  # for one port; 8 GB take 7 s at 10 Gb/s
SERVER_SECONDS = 120  # as long as a server waits for its client, who may have many
NEEDED = ("--out_json", "--bind_source_ip")  # of perftest from 23.07 on
LOOPBACK = "127.0.0.1"
DEVICE_FILES, REMEDY = Path("/dev/infiniband"), "a container needs `--device /dev/infiniband --ulimit memlock=-1`"
LISTENING = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp writes it
SLOW = 0.9  # of the fastest beside it: the tolerance of the metric
# What perftest writes when it gives up (perftest_resources.c, _parameters.c, _communication.c of 26.07; of before 25.10
# "Failed status 12"), and what to do. The first rows are about the port at this end, whatever the other one does.
OWN_STEPS = (
    (r"Port number \d+ state is", "look at its cable and switch port: `ibstat`, `rdma link`"),
    (r"allocate (?:MR|PD)|create (?:MR|CQ|IB resources)|init memory", "raise locked memory: `ulimit -l unlimited`"),
    (r"Infiniband/RoCE device|IB device|get context|modify QP to INIT", "look at `ibv_devices` and /dev/infiniband"),
)
STEPS = (
    *OWN_STEPS,
    (r"to RTR|GID types", "compare GIDs and subnets of both ends: `show_gids`, NCCL_IB_GID_INDEX"),
    (r"retry counter exceeded|status 12\b", "nothing comes back: look at the cable's switch, VLAN or partition (PKey), "
     "routes, MTU of the switch, PFC and access lists"),
    (r"Couldn't connect to", "a firewall may close the TCP port by which perftest begins"),
    (r"not compatible|exchange|remote address", "the other end gave up: look there, and at the versions of perftest"),
)  # fmt: skip


class Write(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a port wrote to itself, in writes of NBYTES: `gigabits` a second; if it could not, `why`."""

    port: str
    gigabits: float = 0.0
    why: str = ""


def read_ports() -> list[str]:
    """The active ports at the highest rate. Absent, or Unreadable without a fit perftest or a device file of each."""
    if not (ports := fastest_ports(network_ports.read())):
        raise Absent("no InfiniBand or RoCE port is active")
    options = tools.output(BANDWIDTH.program, "--help", statuses=(0, 1))
    if missing := [option for option in NEEDED if option not in options]:
        why = f"this {BANDWIDTH.program} has no {' and no '.join(missing)}"
        raise Unreadable(why, "install perftest 23.07 or later")
    folders = {port.port: network_ports.ADAPTERS / port.device / "device/infiniband_verbs" for port in ports}
    verbs = {port: folder.glob("uverbs*") for port, folder in folders.items()}
    hidden = [port for port, files in verbs.items() if not all((DEVICE_FILES / each.name).exists() for each in files)]
    if hidden:
        raise Unreadable(f"{', '.join(hidden)} have no device file here", REMEDY)
    return [*verbs]


def read() -> list[Write]:
    """Of each of these ports. Raises as read_ports, and Unreadable where none could."""
    ports = read_ports()
    try:
        return tools.asked(ports, _to_itself, lambda port, why: Write(port, why=why.removeprefix(f"{port}: ")))
    except Unreadable as why:
        raise Unreadable(f"{BANDWIDTH.program} reaches no adapter: {why}", REMEDY) from None


def _to_itself(port: str) -> Write:
    with socket.create_server((LOOPBACK, 0)) as probe:
        service = int(probe.getsockname()[1])
    server = serve(BANDWIDTH, port, LOOPBACK, service)
    try:
        return Write(port, write(BANDWIDTH, port, LOOPBACK, LOOPBACK, service))
    finally:
        tools.end(server)


def _command(test: Perftest, port: str, address: str, service: int) -> tuple[str, ...]:
    """With the index of the address for RoCE that NCCL is told to take; else perftest chooses as NCCL does."""
    device, number = port.split("/")
    layer = tools.text(network_ports.ADAPTERS / device / "ports" / number / "link_layer")
    gid = os.environ.get("NCCL_IB_GID_INDEX", "") if layer == "Ethernet" else ""
    more = [*(["-x", gid] if gid.isdecimal() else []), *(["--ipv6-addr"] if ":" in address else [])]
    ends = ("-d", device, "-i", number, "-p", str(service), f"--bind_source_ip={address}")
    return (test.program, *ends, "-F", *test.options, *more)


def serve(test: Perftest, port: str, address: str, service: int) -> "subprocess.Popen[bytes]":
    """A server for one client at this TCP port. `timeout` ends it even if this process is killed. Unreadable if it does
    not listen, by the kernel's table of sockets: a client that comes too early gives up."""
    null, around = subprocess.DEVNULL, {**os.environ, **tools.ENVIRONMENT}
    command = ("timeout", str(SERVER_SECONDS), *_command(test, port, address, service))
    table, until = Path("/proc/net/tcp6" if ":" in address else "/proc/net/tcp"), time.monotonic() + SECONDS
    with TemporaryFile() as errors:  # a pipe that nobody reads would end it
        server = subprocess.Popen(command, env=around, stdin=null, stdout=null, stderr=errors)
        while server.poll() is None and time.monotonic() < until:
            lines = (line.split() for line in table.read_text().splitlines()[1:])
            if any(line[1].endswith(f":{service:04X}") and line[3] == LISTENING for line in lines):
                return server
            time.sleep(0.02)
        errors.seek(0)
        said = explained(errors.read().decode(errors="replace"))
    why = f"did not listen within {SECONDS} s" if server.poll() is None else f"ended: {said}"
    tools.end(server)
    raise Unreadable(f"the server of {test.program} {why}")


def write(test: Perftest, port: str, address: str, to: str, service: int) -> float:
    """What a port reaches that writes to the server at this address. Unreadable if it could not."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = (*_command(test, port, address, service), "--out_json", f"--out_json_file={report}", to)
        status, out, errors = tools.ended(*command, seconds=SECONDS)
        if status:
            raise Unreadable(f"{test.program} failed: {explained(errors or out)}")
        try:
            return float(json.loads(report.read_text())["results"][test.figure])
        except (OSError, ValueError, KeyError, TypeError):
            raise Unreadable(f"{test.program} wrote no report") from None


def explained(said: str) -> str:
    """The line that decides, and the next step; all where none is known, but for what libibverbs misses of others."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and "ibverbs: Warn" not in line]
    for pattern, step in STEPS:
        if line := next((line for line in lines if re.search(pattern, line)), ""):
            return f"{line} ({step})"
    return "; ".join(lines) or "it does not say why"


def is_own(said: str) -> bool:
    return any(re.search(pattern, said) for pattern, _ in OWN_STEPS)


def read_between_nodes() -> list[str]:
    """The same for writing to other nodes, which is tried where perftest is installed: Absent where it is not."""
    if shutil.which(BANDWIDTH.program) is None:
        raise Absent(f"{BANDWIDTH.program} is not installed")
    return read_ports()


RDMA_PORTS = HostFact("rdma_ports", list[str], read_between_nodes, subject="rdma", on_request=True)
RDMA_WRITES = HostFact("rdma_writes", list[Write], read, subject="rdma", on_request=True)


def adapters_that_fail(failed: Mapping[str, str]) -> list[Fault]:
    return [node_fault("network_adapter_fails", f"{port}: {why}") for port, why in failed.items()]


def slow_adapters(measurement: Measurement) -> list[Fault]:
    """Those slower than the fastest beside them, by their names in the measurement's details; all if equally slow."""
    values = measurement.values
    best = max(values.values(), default=0.0)
    slow = {place: value for place, value in values.items() if value < SLOW * best} or values
    named = ((place, measurement.details[str(place)], value) for place, value in slow.items())
    text = "{} sends {:.3g} GB/s to itself, the fastest {:.3g}"
    return [Fault("network_adapter_slow", (place,), text.format(name, value, best)) for place, name, value in named]


@dataclass(frozen=True)
class Written:
    """What a port reached that wrote to that of another node, or `why` not; `alone`: the one of the two that cannot."""

    figure: float = 0.0
    why: str = ""
    alone: int | None = None


def rails(nodes: Sequence[Sequence[Port]], gpus: Sequence[Gpu]) -> dict[int, str]:
    """The ports by which nodes reach each other, by the number of the GPU that each is next to, or behind these: that
    all nodes have, at the highest rate on half of them, and next to GPUs where any is."""
    fastest = Counter(port.port for ports in nodes for port in fastest_ports(ports))
    everywhere = set.intersection(*({port.port for port in ports} for ports in nodes))
    near = network_ports.adapters_near(gpus)
    next_to = {adapter: gpu.index for gpu in reversed(gpus) for adapter in gpu.get("network_adapters") or ()}
    found, others = dict[int, str](), itertools.count(len(gpus))
    for name in sorted(name for name, times in fastest.items() if name in everywhere and 2 * times >= len(nodes)):
        index = next_to.get(device := name.partition("/")[0])
        if not near or device in near:
            found[next(others) if index is None or index in found else index] = name
    return found


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
