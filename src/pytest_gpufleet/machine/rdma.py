"""By which way network adapters reach the memory of GPUs, and how fast each writes to itself.

By ib_write_bw of perftest, server and client on this host.

Both ends are the same port, so no cable and no other machine takes part: what is measured is the adapter and its way to
memory. The two find each other over TCP, which is kept to 127.0.0.1.
"""

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytest_gpufleet.machine import network_ports, tools
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import Absent, Unreadable
from pytest_gpufleet.model.machine import fastest_ports

# Modules by which an adapter's driver asks NVIDIA's for memory: the driver's own, the one before it, and that of EFA.
MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")


def read_gpudirect(root: Path = Path("/")) -> dict[str, Any]:
    """`peer_module`: the one of MODULES that is loaded, None if none is. `open_modules`: whether NVIDIA's driver is the
    open one, which alone gives memory away as a DMA-BUF; None where no driver is loaded."""
    version = tools.text(root / "proc/driver/nvidia/version")
    return {
        "peer_module": next((name for name in MODULES if (root / "sys/module" / name).exists()), None),
        "open_modules": None if version is None else "Open Kernel Module" in version.splitlines()[0],
    }


PROGRAM = "ib_write_bw"
# As Azure's health checks write (azure_ib_write_bw_gdr.nhc). A thousand of them take 0.2 s at 400 Gb/s.
NBYTES, WRITES = 8 << 20, 1000
SECONDS = 20  # for one port; 8 GB take 7 s at 10 Gb/s
NEEDED = ("--out_json", "--bind_source_ip")  # of perftest from 23.07 on
LOOPBACK = "127.0.0.1"
LISTENING = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp writes it
TURN_SECONDS = 0.02


def read() -> list[dict[str, Any]]:
    """Of each active InfiniBand or RoCE port at the highest rate of this host its `port` ("mlx5_0/1") and what it wrote
    to itself, `gigabits` a second in writes of so many `bytes`; of one that could not `why`. Absent where there is no
    such port, Unreadable where perftest is not installed or too old, or no port could."""
    ports = fastest_ports(network_ports.read())
    if not ports:
        raise Absent("no InfiniBand or RoCE port is active")
    told = tools.output(PROGRAM, "--help", statuses=(0, 1))
    if missing := [option for option in NEEDED if option not in told]:
        raise Unreadable(f"this {PROGRAM} has no {' and no '.join(missing)}", "install perftest 23.07 or later")
    found = [_port(port["port"]) for port in ports]
    if all("why" in port for port in found):
        raise Unreadable(f"{PROGRAM} reaches no adapter: {found[0]['why']}")
    return found


def _port(name: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        try:
            return {"port": name, "bytes": NBYTES, "gigabits": _written(name, Path(folder, "report.json"))}
        except Unreadable as why:
            return {"port": name, "why": str(why)}


def _written(name: str, report: Path) -> float:
    device, number = name.split("/")
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
        return float(json.loads(report.read_text())["results"]["BW_average"])
    except (OSError, ValueError, KeyError, TypeError):
        raise Unreadable(f"{PROGRAM} wrote no report") from None
    finally:
        server.terminate()
        server.wait()


def _await(server: subprocess.Popen[bytes], service: int) -> None:
    """Until the server listens, as the kernel's table of sockets says: a client that comes too early gives up."""
    until = time.monotonic() + SECONDS
    while not _listens(service):
        if server.poll() is not None:
            raise Unreadable(f"the server of {PROGRAM} ended with status {server.returncode}")
        if time.monotonic() > until:
            raise Unreadable(f"the server of {PROGRAM} did not listen within {SECONDS} s")
        time.sleep(TURN_SECONDS)


def _listens(service: int) -> bool:
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(line[1].endswith(f":{service:04X}") and line[3] == LISTENING for line in lines)


GPUDIRECT = HostFact("gpudirect", dict[str, Any], read_gpudirect)
RDMA_WRITES = HostFact("rdma_writes", list[dict[str, Any]], read, subject="rdma", on_request=True)
