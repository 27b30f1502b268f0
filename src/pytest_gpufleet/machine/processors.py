"""How the processors and the memory beside them are set up: clock source, idle states, what is offline, swap."""

import re
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact

CPU = Path("sys/devices/system/cpu")
KIB = 1 << 10


def read_model(root: Path = Path("/")) -> dict[str, Any]:
    """`model` ("Intel(R) Xeon(R) Platinum 8480C", None where /proc/cpuinfo does not tell, as on Arm) and `cores` (on
    line, of all sockets together), None where the system does not tell."""
    cores = {tools.text(each) for each in (root / CPU).glob("cpu[0-9]*/topology/thread_siblings")}
    model = re.search(r"^model name\s*:\s*(.*\S)", tools.text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return {"model": re.sub(r"\s+", " ", model[1]) if model else None, "cores": len(cores - {None}) or None}


def read(root: Path = Path("/")) -> dict[str, Any]:
    """What the system does not tell is None, or empty.

    `sockets`: how many; `offline`: the processors that are there and switched off; `smt`: what controls their second
    threads ("on", "off", "forceoff", "notsupported"); `clock_source` in use; `idle_states` of processor 0: `name`,
    `microseconds` that leaving it takes, whether it is `disabled`; `numa_balancing` (0: off, 1: on, 2 and 3: between
    tiers of memory), `transparent_hugepages` ("madvise"), `swap_bytes` and `swap_used_bytes`; `numa_memory`: bytes of
    each NUMA node with processors, by its number; `virtual`: whether a hypervisor is below."""
    present, online = (tools.listed(tools.text(root / CPU / name)) for name in ("present", "online"))
    packages = {tools.text(each) for each in (root / CPU).glob("cpu[0-9]*/topology/physical_package_id")}
    hugepages = re.search(r"\[(\w+)\]", tools.text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return {
        "sockets": len(packages - {None, "-1"}) or None,  # -1: the firmware does not tell (drivers/base/topology.c)
        "offline": sorted(present - online) if online else [],
        "smt": tools.text(root / CPU / "smt/control"),
        "clock_source": tools.text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "idle_states": [_idle_state(state) for state in sorted((root / CPU / "cpu0/cpuidle").glob("state*"))],
        "numa_balancing": tools.whole(root / "proc/sys/kernel/numa_balancing"),
        "transparent_hugepages": hugepages[1] if hugepages else None,
        **_swap(root),
        "numa_memory": _numa_memory(root),
        "virtual": bool(
            re.search(r"^flags\s*:.*\bhypervisor\b", tools.text(root / "proc/cpuinfo") or "", re.MULTILINE)
        ),
    }


def _idle_state(state: Path) -> dict[str, Any]:
    return {
        "name": tools.text(state / "name"),
        "microseconds": tools.whole(state / "latency"),
        "disabled": bool(tools.whole(state / "disable")),
    }


def _swap(root: Path) -> dict[str, int | None]:
    """proc(5), /proc/swaps: name, type, size and what of it is used, in KiB."""
    told = tools.text(root / "proc/swaps")
    if told is None:
        return {"swap_bytes": None, "swap_used_bytes": None}
    columns = [line.split()[2:4] for line in told.splitlines()[1:]]
    size, used = (sum(int(each[index]) for each in columns) * KIB for index in (0, 1))
    return {"swap_bytes": size, "swap_used_bytes": used}


def _numa_memory(root: Path) -> dict[str, int]:
    memory = {}
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s*(\d+) kB", tools.text(node / "meminfo") or "")
        if total and tools.text(node / "cpulist"):
            memory[node.name[4:]] = int(total[1]) * KIB
    return memory


PROCESSOR = HostFact("processor", dict[str, Any], read_model)
PROCESSOR_SETUP = HostFact("processor_setup", dict[str, Any], read, subject="processors")
