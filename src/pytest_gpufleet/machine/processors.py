"""The processors of the host and how they are set up: facts, how they are read, and what is wrong with them."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.tools import Absent, HostFact
from pytest_gpufleet.model.fault import Fault, node_fault

CPU = Path("sys/devices/system/cpu")
# Clock sources that are read over the bus, each time: about 1 us instead of 0.02 us, and not by every processor at
# once. arch/x86/kernel/hpet.c rates its own 250, drivers/clocksource/acpi_pm.c 200, the kernel's last resorts below
# 10; tsc, kvm-clock, hyperv_clocksource_tsc_page and arch_sys_counter have 300 to 500.
SLOW_CLOCKS = ("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies")
# Of 16 modules of a socket one is 6 %. What the firmware and the kernel keep for themselves is some GiB of one node.
LESS_MEMORY = 0.05


@dataclass(frozen=True)
class Processor:
    """`model`: None where /proc/cpuinfo has none, as on Arm. `cores`: online, of all sockets together."""

    model: str | None = None
    cores: int | None = None


@dataclass(frozen=True)
class ProcessorSetup:
    """None or empty: the system does not say. `smt`: "on", "off", "forceoff", "notsupported". `numa_balancing`: 0 off,
    1 on, 2 and 3 between tiers of memory. `numa_memory`: bytes of each NUMA node with processors, by its number."""

    sockets: int | None = None
    offline: tuple[int, ...] = ()
    smt: str | None = None
    clock_source: str | None = None
    numa_balancing: int | None = None
    transparent_hugepages: str | None = None
    numa_memory: dict[str, int] = field(default_factory=dict)
    virtual: bool = False


def read_model(root: Path = Path("/")) -> Processor:
    model = re.search(r"^model name\s*:\s*(.*\S)", tools.text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return Processor(re.sub(r"\s+", " ", model[1]) if model else None, len(_topology(root, "thread_siblings")) or None)


def read(root: Path = Path("/")) -> ProcessorSetup:
    present, online = (tools.listed(tools.text(root / CPU / name)) for name in ("present", "online"))
    hugepages = re.search(r"\[(\w+)\]", tools.text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    memory = {}
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s*(\d+) kB", tools.text(node / "meminfo") or "")
        if total and tools.text(node / "cpulist"):
            memory[node.name[4:]] = int(total[1]) * 1024
    return ProcessorSetup(
        sockets=len(_topology(root, "physical_package_id") - {"-1"}) or None,  # -1: the firmware does not say
        offline=tuple(sorted(present - online)) if online else (),
        smt=tools.text(root / CPU / "smt/control"),
        clock_source=tools.text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        numa_balancing=tools.whole(root / "proc/sys/kernel/numa_balancing"),
        transparent_hugepages=hugepages[1] if hugepages else None,
        numa_memory=memory,
        virtual=tools.is_virtual(root),
    )


def _topology(root: Path, fact: str) -> set[str]:
    return set(filter(None, (tools.text(each) for each in (root / CPU).glob(f"cpu[0-9]*/topology/{fact}"))))


def by_numa_node(root: Path = Path("/")) -> dict[int, list[int]]:
    """The processors of each NUMA node that this process may use whole, with its memory; without nodes all processors
    of this process at node 0. Nodes without processors are left out: their memory is next to none."""
    allowed = os.sched_getaffinity(0)
    memory = re.search(r"^Mems_allowed_list:\s*(\S+)", tools.text(root / "proc/self/status") or "", re.MULTILINE)
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = {int(path.name[4:]): tools.listed(tools.text(path / "cpulist")) for path in folders}
    usable = tools.listed(memory[1]) if memory else set(nodes)
    whole = {number: sorted(each) for number, each in nodes.items() if each and each <= allowed and number in usable}
    return whole if any(nodes.values()) else {0: sorted(allowed)}


def slow_clock(setup: ProcessorSetup) -> list[Fault]:
    slow = setup.clock_source in SLOW_CLOCKS
    return [node_fault("clock_source_slow", f"{setup.clock_source} is in use")] if slow else []


def offline_processors(setup: ProcessorSetup) -> list[Fault]:
    """Processors that are there and switched off, unless that is how somebody turned off all second threads."""
    if not setup.offline or setup.smt in ("off", "forceoff"):
        return []
    shown = ", ".join(map(str, setup.offline[:8])) + (" and others" if len(setup.offline) > 8 else "")
    return [node_fault("cpu_offline", f"{len(setup.offline)} are offline: {shown}")]


def nodes_with_less_memory(setup: ProcessorSetup) -> list[Fault]:
    most = max(setup.numa_memory.values(), default=0)
    less = {node: nbytes for node, nbytes in setup.numa_memory.items() if nbytes < (1 - LESS_MEMORY) * most}
    text = "NUMA node {} has {:.4g} GB, another one {:.4g}"
    return [node_fault("numa_memory_imbalance", text.format(node, n / 1e9, most / 1e9)) for node, n in less.items()]


def _cpufreq(name: str) -> str:
    if text := tools.text(Path("/", CPU, "cpu0/cpufreq", name)):
        return text
    raise Absent("the BIOS, or the host of the virtual machine, controls the clock of the processors")


PROCESSOR = HostFact("processor", Processor, read_model)
PROCESSOR_SETUP = HostFact("processor_setup", ProcessorSetup, read, subject="processors")
CPU_GOVERNOR = HostFact("cpu_governor", str, lambda: _cpufreq("scaling_governor"), subject="processors")
CPU_ENERGY_PREFERENCE = HostFact("cpu_energy_preference", str, lambda: _cpufreq("energy_performance_preference"))
PROCESSOR_SET = HostFact("processor_set", list[int], lambda: sorted(os.sched_getaffinity(0)))
