"""How fast network adapters write by RDMA, by ib_write_bw and ib_write_lat of perftest: server and client on one port
of this host, which leaves cable and other machines out, or on two nodes. They find each other over TCP."""

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
from tempfile import TemporaryDirectory, TemporaryFile

import msgspec

from pytest_gpufleet.machine import network_ports, tools
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import Gpu


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
    if not (ports := network_ports.fastest_ports(network_ports.read())):
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
    """Whether what perftest has said is about the port at this end alone."""
    return any(re.search(pattern, said) for pattern, _ in OWN_STEPS)


def read_between_nodes() -> list[str]:
    """The same for writing to other nodes, which is tried where perftest is installed: Absent where it is not."""
    if shutil.which(BANDWIDTH.program) is None:
        raise Absent(f"{BANDWIDTH.program} is not installed")
    return read_ports()


RDMA_PORTS = HostFact("rdma_ports", list[str], read_between_nodes, subject="rdma", on_request=True)
RDMA_WRITES = HostFact("rdma_writes", list[Write], read, subject="rdma", on_request=True)


def adapters_that_fail(failed: Mapping[str, str]) -> list[Fault]:
    """Ports ("mlx5_0/1") through which nothing could be sent, each with why."""
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
    fastest = Counter(port.port for ports in nodes for port in network_ports.fastest_ports(ports))
    everywhere = set.intersection(*({port.port for port in ports} for ports in nodes))
    near = network_ports.adapters_near(gpus)
    next_to = {adapter: gpu.index for gpu in reversed(gpus) for adapter in gpu.get("network_adapters") or ()}
    found, others = dict[int, str](), itertools.count(len(gpus))
    for name in sorted(name for name, times in fastest.items() if name in everywhere and 2 * times >= len(nodes)):
        index = next_to.get(device := name.partition("/")[0])
        if not near or device in near:
            found[next(others) if index is None or index in found else index] = name
    return found
