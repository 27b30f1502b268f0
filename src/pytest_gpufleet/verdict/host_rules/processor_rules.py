"""What counts as healthy of the processors of a host, and of the memory that each NUMA node has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE

# Clock sources that are read over the bus, each time: about 1 us instead of 0.02 us, and not by every processor at
# once. arch/x86/kernel/hpet.c rates its own 250, drivers/clocksource/acpi_pm.c 200, the kernel's last resorts below
# 10; tsc, kvm-clock, hyperv_clocksource_tsc_page and arch_sys_counter have 300 to 500. check_processor.py of Meta's GCM
# asks for the name of one.
SLOW_CLOCKS = ("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies")
# Of 16 modules of a socket one is 6 %. What the firmware and the kernel keep for themselves is some GiB of one node.
LESS_MEMORY = 0.05


def slow_clock(processors: Mapping[str, Any]) -> list[Fault]:
    """A clock source that slows down every program that looks at the time."""
    source = processors["clock_source"]
    return [Fault("clock_source_slow", (THIS_NODE,), f"{source} is in use")] if source in SLOW_CLOCKS else []


def offline_processors(processors: Mapping[str, Any]) -> list[Fault]:
    """Processors that are there and switched off, unless that is how somebody turned off all second threads."""
    offline = processors["offline"]
    if not offline or processors["smt"] in ("off", "forceoff"):
        return []
    shown = ", ".join(map(str, offline[:8])) + (" and others" if len(offline) > 8 else "")
    return [Fault("processors_offline", (THIS_NODE,), f"{len(offline)} are offline: {shown}")]


def nodes_with_less_memory(processors: Mapping[str, Any]) -> list[Fault]:
    """NUMA nodes that have less memory than the one that has most."""
    memory = processors["numa_memory"]
    most = max(memory.values(), default=0)
    return [
        Fault(
            "memory_uneven", (THIS_NODE,), f"NUMA node {node} has {nbytes / 1e9:.4g} GB, another one {most / 1e9:.4g}"
        )
        for node, nbytes in memory.items()
        if nbytes < (1 - LESS_MEMORY) * most
    ]
