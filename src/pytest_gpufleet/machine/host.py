"""The facts of the host around the GPUs, one table of them all, and how they are read for evidence."""

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import (
    bmc,
    dcgm,
    disks,
    gpudirect,
    memory,
    network_ports,
    nvlink_domain,
    optics,
    pcie,
    processors,
    rdma,
    software,
    tools,
)
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, HostFact, Unreadable, output
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.redaction import one_line, throughout


def own_name() -> str:
    return one_line(socket.gethostname())


def _nccl_net_plugin() -> str:
    """The library by which NCCL reaches other nodes: the file that the loader finds (ldconfig(8)) under the name that
    NCCL asks for (its manual, NCCL_NET_PLUGIN); "none" if there is none."""
    if (wanted := os.environ.get("NCCL_NET_PLUGIN", "")) == "none":
        return "none"
    name = wanted if wanted.endswith(".so") else f"libnccl-net{wanted and f'-{wanted}'}.so"
    there = (Path(folder, name) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    if found := next((path for path in there if path.exists()), None):
        return str(found.resolve())
    lines = (line.split(" => ") for line in output("/sbin/ldconfig", "-p").splitlines() if " => " in line)
    return next((path.strip() for about, path in lines if about.split()[0] == name), "none")


@dataclass(frozen=True)
class Dmi:
    """By the firmware (drivers/firmware/dmi-id.c). None: it does not say, or only to root, as serial numbers."""

    vendor: str | None = None
    product: str | None = None
    board: str | None = None
    bios_version: str | None = None
    bios_date: str | None = None
    serial: str | None = None
    board_serial: str | None = None
    chassis_serial: str | None = None


NAMED = {"vendor": "sys_vendor", "product": "product_name", "board": "board_name", "serial": "product_serial"}


def read_dmi(root: Path = Path("/")) -> Dmi:
    found = [tools.text(root / tools.DMI / NAMED.get(each.name, each.name)) for each in fields(Dmi)]
    if not any(found):
        why = "this system does not show what its firmware says of the machine (/sys/class/dmi/id)"
        raise tools.why_missing(root, why, why)
    return Dmi(*found)


DMI = HostFact("dmi", Dmi, read_dmi)
KERNEL = HostFact("kernel", str, platform.release)
SYSTEM = HostFact("system", str, lambda: platform.freedesktop_os_release()["PRETTY_NAME"])
MEMORY_BYTES = HostFact("memory_bytes", int, lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
OWN = (
    DMI, KERNEL, SYSTEM, MEMORY_BYTES,
    HostFact("name", str, own_name),
    HostFact("boot_id", str, lambda: Path("/proc/sys/kernel/random/boot_id").read_text()),  # random(4): of this start
    HostFact("processors", int | None, os.cpu_count),
    HostFact("processors_allowed", int, lambda: len(os.sched_getaffinity(0))),
    HostFact("numa_nodes", int, lambda: len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
    # Whether it runs; the kernel cuts names of processes to 15 characters.
    HostFact("fabric_manager", bool, lambda: "nv-fabricmanage" in map(tools.text, Path("/proc").glob("[0-9]*/comm"))),
    HostFact("nccl_net_plugin", str, _nccl_net_plugin),
)  # fmt: skip
# What a slice has as a HostFact is a fact of the host.
SLICES = (
    processors, tools, network_ports, memory, disks, bmc, pcie, gpudirect, software, optics, rdma, nvlink_domain,
)  # fmt: skip
FACTS: dict[str, HostFact[Any]] = {
    fact.name: fact
    for values in (OWN, *(vars(each).values() for each in SLICES))
    for fact in values
    if isinstance(fact, HostFact)
}
# What --fleet-without can name. DCGM's diagnostic is a fact of its level.
SUBJECTS = sorted({fact.subject for fact in (*FACTS.values(), dcgm.diagnostic(2)) if fact.subject})


def serial() -> str | None:
    """That of this machine by its firmware (DMI), which only root may read."""
    return one_line(tools.text(Path("/", tools.DMI, "product_serial")) or "") or None


def read(names: Sequence[str] | None = None) -> dict[str, Any]:
    """Facts by name as evidence holds them; without names, all that cost little. KeyError for a name without a fact."""
    wanted = [name for name, fact in FACTS.items() if not fact.on_request] if names is None else names
    return {name: plain(FACTS[name]) for name in wanted}


def left_out(subject: str) -> Missing:
    return Missing(f"left out by --fleet-without {subject}", absent=True)


def plain(fact: HostFact[Any]) -> Any:
    """A fact as JSON, or Missing. All texts are made one clean line each: names are what somebody chose."""
    try:
        return throughout(codec.plain(fact.read()), one_line)
    except Absent as why:
        return Missing(one_line(str(why)), absent=True)
    except Unreadable as why:
        return Missing(one_line(why.why), remedy=one_line(why.remedy))
    except FileNotFoundError as error:
        return Missing(f"this system has no {error.filename}", absent=True)
    except PermissionError as error:
        return Missing(f"only root may read {error.filename}", remedy=AS_ROOT)
    except Exception as error:  # no run ends for what firmware or a program has written in a form that nobody knows
        found = one_line(f"{type(error).__name__}: {error}")
        return Missing(f"the {fact.name.replace('_', ' ')} of this system cannot be read ({found})")
