"""How fast network adapters write to themselves, by ib_write_bw of perftest, server and client on this host. Both ends
are the same port, so what is measured is the adapter and its way to memory, without cable or another machine. The two
find each other over TCP, which is kept to 127.0.0.1."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from pytest_gpufleet.machine import network_ports, tools
from pytest_gpufleet.machine.network_ports import port_fault
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.measurement import Measurement

PROGRAM = "ib_write_bw"
# As Azure's health checks write (azure_ib_write_bw_gdr.nhc). A thousand of them take 0.2 s at 400 Gb/s.
NBYTES, WRITES = 8 << 20, 1000
SECONDS = 20  # for one port; 8 GB take 7 s at 10 Gb/s
NEEDED = ("--out_json", "--bind_source_ip")  # of perftest from 23.07 on
LOOPBACK = "127.0.0.1"
DEVICE_FILES, REMEDY = Path("/dev/infiniband"), "a container needs `--device /dev/infiniband --ulimit memlock=-1`"
LISTENING = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp writes it
POLL_SECONDS = 0.02
SLOW = 0.9  # of the fastest beside it: the tolerance of the metric


class Write(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a port wrote to itself: `gigabits` a second in writes of so many `bytes`; if it could not, `why`."""

    port: str
    bytes: int = 0
    gigabits: float = 0.0
    why: str = ""


def read() -> list[Write]:
    """Of each active InfiniBand or RoCE port at the highest rate of this host. Raises Absent where there is no such
    port, Unreadable where perftest is not installed or too old, no port could, or a container has not all of them."""
    ports = network_ports.fastest_ports(network_ports.read())
    if not ports:
        raise Absent("no InfiniBand or RoCE port is active")
    options = tools.output(PROGRAM, "--help", statuses=(0, 1))
    if missing := [option for option in NEEDED if option not in options]:
        raise Unreadable(f"this {PROGRAM} has no {' and no '.join(missing)}", "install perftest 23.07 or later")
    hidden = []
    for port in ports:
        verbs = (network_ports.ADAPTERS / port.device).glob("device/infiniband_verbs/uverbs*")
        hidden += [] if all((DEVICE_FILES / each.name).exists() for each in verbs) else [port.port]
    if hidden:
        raise Unreadable(f"{', '.join(hidden)} have no device file here", REMEDY)
    with TemporaryDirectory() as folder:
        found = [_write(port.port, Path(folder, "report.json")) for port in ports]
    if all(each.why for each in found):
        raise Unreadable(f"{PROGRAM} reaches no adapter: {found[0].why}", REMEDY)
    return found


def _write(port: str, report: Path) -> Write:
    device, number = port.split("/")
    report.unlink(missing_ok=True)  # that of the port before
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        service = int(probe.getsockname()[1])
    how = ("-s", str(NBYTES), "-n", str(WRITES), "-F", "--report_gbits", f"--bind_source_ip={LOOPBACK}")
    command = (PROGRAM, "-d", device, "-i", number, "-p", str(service), *how)
    # `timeout` ends the server even if this process is killed.
    server = subprocess.Popen(
        ("timeout", str(SECONDS), *command),
        env={**os.environ, **tools.ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await(server, service)
        tools.output(*command, "--out_json", f"--out_json_file={report}", LOOPBACK, seconds=SECONDS)
        return Write(port, NBYTES, float(json.loads(report.read_text())["results"]["BW_average"]))
    except Unreadable as why:
        return Write(port, why=str(why))
    except (OSError, ValueError, KeyError, TypeError):
        return Write(port, why=f"{PROGRAM} wrote no report")
    finally:
        server.terminate()
        server.wait()


def _await(server: subprocess.Popen[bytes], service: int) -> None:
    """Until the server listens, as the kernel's table of sockets says: a client that comes too early gives up."""
    until = time.monotonic() + SECONDS
    while True:
        lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if any(line[1].endswith(f":{service:04X}") and line[3] == LISTENING for line in lines):
            return
        if server.poll() is not None:
            raise Unreadable(f"the server of {PROGRAM} ended with status {server.returncode}")
        if time.monotonic() > until:
            raise Unreadable(f"the server of {PROGRAM} did not listen within {SECONDS} s")
        time.sleep(POLL_SECONDS)


RDMA_WRITES = HostFact("rdma_writes", list[Write], read, subject="rdma", on_request=True)


def adapters_that_fail(failed: Mapping[str, str]) -> list[Fault]:
    """Ports ("mlx5_0/1") through which nothing could be sent, each with why."""
    return [port_fault("network_adapter_fails", port, why) for port, why in failed.items()]


def slow_adapters(measurement: Measurement) -> list[Fault]:
    """Those that are slower than the fastest beside them, by their names, which stand in the measurement's details; all
    of them where they are equally slow, or there is only one."""
    values = measurement.values
    best = max(values.values(), default=0.0)
    slow = {place: value for place, value in values.items() if value < SLOW * best} or values
    named = ((place, measurement.details[str(place)], value) for place, value in slow.items())
    text = "{} sends {:.3g} GB/s to itself, the fastest {:.3g}"
    return [Fault("network_adapter_slow", (place,), text.format(name, value, best)) for place, name, value in named]
