"""What the host around the GPUs is like: limits, memory, processor, network ports."""

import os
import platform
import re
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import (
    acs,
    bmc,
    disks,
    gpudirect,
    memory,
    network_ports,
    optics,
    pcie,
    processors,
    rdma,
    software,
    tools,
)
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, Unreadable, output
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.gpu import Missing
from pytest_gpufleet.redaction import one_line, throughout

# Names of processes, hosts, drives and memory modules are what somebody chose: all facts are made one clean line each.


def own_name() -> str:
    """Of this host, as it calls itself."""
    return one_line(socket.gethostname())


CAP_IPC_LOCK = 14  # linux/capability.h


def _shared_memory() -> int:
    state = os.statvfs("/dev/shm")
    return state.f_blocks * state.f_frsize


def _limit(which: int, hard: bool = False) -> int | str:
    limit = resource.getrlimit(which)[hard]
    return "unlimited" if limit == resource.RLIM_INFINITY else limit


def _locked_memory() -> int | str:
    """The limit of RLIMIT_MEMLOCK, which does not bind a process with CAP_IPC_LOCK, as root on bare metal has it."""
    capabilities = re.search(r"^CapEff:\s*(\w+)", _text("/proc/self/status"), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1:
        return "unlimited"
    return _limit(resource.RLIMIT_MEMLOCK)


def _text(path: str | Path) -> str:
    return Path(path).read_text().strip()


def _governor() -> str:
    try:
        return _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    except FileNotFoundError:
        why = "this system leaves the clock of its processors to the BIOS, or to the host of the virtual machine"
        raise Absent(why) from None


def _energy_preference() -> str:
    return _text("/sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference")


def _fabric_manager() -> bool:
    """Whether nvidia-fabricmanager runs; the kernel cuts names of processes to 15 characters."""
    names = (tools.text(process / "comm") or "" for process in Path("/proc").glob("[0-9]*"))
    return any(name.startswith("nv-fabricmanage") for name in names)


CGROUP = Path("/sys/fs/cgroup")


def _memory_limit() -> int | str:
    limit = _text(CGROUP / "memory.max")
    return "unlimited" if limit == "max" else int(limit)


def short_of(processors: int, memory: int) -> str:
    """What the container does not leave a process that uses so many processors and so many bytes of memory all the
    time; "" if it does, or nobody tells."""
    with suppress(OSError, ValueError):
        quota, period = _text(CGROUP / "cpu.max").split()
        if quota != "max" and int(quota) < processors * int(period):
            return f"the container has the time of {int(quota) / int(period):g} processors, and {processors} to run on"
    with suppress(OSError, ValueError):
        left = int(_text(CGROUP / "memory.max")) - int(_text(CGROUP / "memory.current"))
        if left < memory:
            return f"the container has {left / 1e9:.3g} GB of memory left, of {memory / 1e9:.3g} GB that are needed"
    return ""


NUMA_NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")


def processors_by_numa_node() -> dict[int, list[int]]:
    """The processors of each NUMA node that this process may use whole, with its memory, by the number of the node; if
    the system does not tell of nodes, all processors of this process at node 0. Nodes without processors are left out:
    their memory is not next to any."""
    allowed = os.sched_getaffinity(0)
    memory = re.search(r"^Mems_allowed_list:\s*(\S+)", _text(STATUS), re.MULTILINE)
    nodes = {int(path.name[4:]): tools.listed(_text(path / "cpulist")) for path in NUMA_NODES.glob("node[0-9]*")}
    usable = tools.listed(memory[1]) if memory else set(nodes)
    whole = {number: sorted(each) for number, each in nodes.items() if each and each <= allowed and number in usable}
    return whole if any(nodes.values()) else {0: sorted(allowed)}


def _nccl_net_plugin() -> str:
    """The library by which NCCL reaches other nodes, where it does not do so itself: the file that the loader finds
    under the name that NCCL asks for (its manual, NCCL_NET_PLUGIN); "none" if there is no such file."""
    wanted = os.environ.get("NCCL_NET_PLUGIN", "")
    if wanted == "none":
        return "none"
    name = wanted if wanted.endswith(".so") else f"libnccl-net{wanted and f'-{wanted}'}.so"
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    there = (Path(folder, name) for folder in folders if folder)
    found = next((path for path in there if path.exists()), None)
    return str(found.resolve()) if found else _by_the_loader(name) or "none"


def _by_the_loader(name: str) -> str | None:
    """Where ld.so's cache has a library of this name (ldconfig(8))."""
    lines = (line.split(" => ") for line in output("/sbin/ldconfig", "-p").splitlines() if " => " in line)
    return next((path.strip() for about, path in lines if about.split()[0] == name), None)


# Anybody may read these (drivers/firmware/dmi-id.c), but for serial numbers, which only root may.
IDS = {
    "vendor": "sys_vendor", "product": "product_name", "board_vendor": "board_vendor", "board": "board_name",
    "bios_vendor": "bios_vendor", "bios_version": "bios_version", "bios_date": "bios_date",
    "serial": "product_serial", "board_serial": "board_serial", "chassis_serial": "chassis_serial",
}  # fmt: skip


def firmware(root: Path = Path("/")) -> dict[str, str | None]:
    """`vendor` and `product` of the machine, `board_vendor` and `board`, `bios_vendor`, `bios_version` and `bios_date`,
    and the serial numbers `serial` (of the machine), `board_serial` and `chassis_serial`, None where nobody but root
    may read them.
    Absent where the system has no such firmware, as in many containers."""
    told = {key: tools.text(root / "sys/class/dmi/id" / name) for key, name in IDS.items()}
    if not any(told.values()):
        raise Absent("this system does not tell what its firmware says of the machine (/sys/class/dmi/id)")
    return told


DMI = HostFact("dmi", dict[str, str | None], firmware)
KERNEL = HostFact("kernel", str, platform.release)
CPU_GOVERNOR = HostFact("cpu_governor", str, _governor)
CPU_ENERGY_PREFERENCE = HostFact("cpu_energy_preference", str, _energy_preference)
PROCESSOR_SET = HostFact("processor_set", list[int], lambda: sorted(os.sched_getaffinity(0)))
SHARED_MEMORY = HostFact("shared_memory_bytes", int, _shared_memory)
LOCKED_MEMORY_LIMIT = HostFact("locked_memory_limit", int | str, _locked_memory)
OPEN_FILES_HARD_LIMIT = HostFact("open_files_hard_limit", int | str, lambda: _limit(resource.RLIMIT_NOFILE, hard=True))
ALL: tuple[HostFact[Any], ...] = (
    HostFact("name", str, own_name),
    HostFact("boot_id", str, lambda: _text("/proc/sys/kernel/random/boot_id")),  # random(4): of this kernel's start
    KERNEL,
    HostFact("system", str, lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
    HostFact("processors", int | None, os.cpu_count),
    HostFact("processors_allowed", int, lambda: len(os.sched_getaffinity(0))),
    PROCESSOR_SET,
    HostFact("memory_bytes", int, lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    HostFact("container_memory_limit", int | str, _memory_limit),
    HostFact("numa_nodes", int, lambda: len(list(NUMA_NODES.glob("node[0-9]*")))),
    CPU_GOVERNOR,
    CPU_ENERGY_PREFERENCE,
    SHARED_MEMORY,
    LOCKED_MEMORY_LIMIT,
    HostFact("open_files_limit", int | str, lambda: _limit(resource.RLIMIT_NOFILE)),
    OPEN_FILES_HARD_LIMIT,
    HostFact("fabric_manager", bool, _fabric_manager),
    network_ports.NETWORK_PORTS,
    DMI,
    memory.MEMORY_MODULES,
    disks.NVME,
    processors.PROCESSOR,
    bmc.BMC_FIRMWARE,
    memory.MEMORY_ERRORS,
    processors.PROCESSOR_SETUP,
    pcie.PCI_DEVICES,
    gpudirect.GPUDIRECT,
    HostFact("nccl_net_plugin", str, _nccl_net_plugin),
    software.ENVIRONMENT,
    disks.DISK_HEALTH,
    optics.OPTICS,
    acs.PCIE_ACS,
    bmc.BMC,
    rdma.RDMA_WRITES,
)
FACTS = {fact.name: fact for fact in ALL}


def serial() -> str | None:
    """The serial number of this machine by its firmware (DMI), which only root may read."""
    return one_line(tools.text(Path("/sys/class/dmi/id/product_serial")) or "") or None


def read(names: Sequence[str] | None = None) -> dict[str, Any]:
    """These facts of the host as evidence holds them, by name; without names, all that cost little. What cannot be
    read is Missing. KeyError for a name that no fact has."""
    wanted = [fact.name for fact in ALL if not fact.on_request] if names is None else names
    return {name: _plain(FACTS[name]) for name in wanted}


def _plain(fact: HostFact[Any]) -> Any:
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
