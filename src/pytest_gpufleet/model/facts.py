"""What can be known of a GPU: the names of its facts. hardware/fact_tables.py has the calls that give them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

# What stays as it is while a machine runs. `minor` is of the device file: 3 for /dev/nvidia3. `power_limit_watts` is
# the enforced one. `nvlink_remotes`: where each link ends, by PCI bus id, "switch", or "" for one that is down.
# `gsp_firmware`: what runs on the GPU's own processor (GSP), Unavailable where the driver does that work itself.
# `processes`: who computed on the GPU before this run's ranks started, as "process 4711 (python3), 2.1 GiB". `p2p`: by
# capability the nvmlGpuP2PStatus_t with every GPU (0 is OK). `brand` is an nvmlBrandType_t, `virtualization` an
# nvmlGpuVirtualizationMode_t. What physical limits are made of (verdict/peaks.py): `cuda_cores`, `memory_bus_bits` and
# the highest clocks. `pcie_width_able`: how many lanes the "gpu" can use and the "port" above it has, 0 for what the
# system does not tell; pcie_width_max is no more than the less of both. `network_adapters`: InfiniBand and RoCE ones
# ("mlx5_0") that share most of the GPU's way over PCIe; none where nobody can tell which of several. `module_id`: which
# module of its baseboard it is, as on HGX. `physical_slot`: what the firmware calls the slot of a card ("21").
# `fabric_health`: the nvmlGpuFabricInfo's mask, clique and cluster, of which a fabric that is there may be ill.
CONSTANTS = (
    "name", "uuid", "serial", "board_part_number", "vbios", "gsp_firmware", "inforom_version", "inforom_valid",
    "pci_bus_id", "pci_device_id", "minor", "memory_bytes", "compute_capability",
    "brand", "virtualization", "cuda_cores", "memory_bus_bits", "sm_clock_max_mhz", "memory_clock_max_mhz",
    "pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max", "pcie_width_able",
    "network_adapters", "module_id", "physical_slot",
    "ecc_mode", "ecc_mode_default", "mig_mode", "compute_mode", "persistence_mode",
    "power_limit_watts", "power_limit_default_watts", "application_clock_mhz", "application_clock_default_mhz",
    "temperature_limits_c", "recovery_action", "numa_node", "cpu_affinity", "fabric", "fabric_health",
    "nvlink_states", "nvlink_versions", "nvlink_remote_types", "nvlink_remotes", "nvlink_speeds", "processes", "p2p",
)  # fmt: skip

# What must not get worse. All of these are read around every test, so each is one cheap call. `slowdown_ns`: for how
# long the GPU has been slowed down by what must not slow it down, in nanoseconds by the keys of COUNTED_SLOWDOWNS.
COUNTERS = (
    "ecc_uncorrected_volatile", "ecc_uncorrected_aggregate", "ecc_corrected_volatile", "sram_threshold_exceeded",
    "remapped_rows", "retired_pages_pending", "memory_unrepairable", "pcie_replays",
    "slowdown_ns",
)  # fmt: skip

# Counters that are not read around every test: those of NVLinks cost too much (on an H200 each of the 72 numbers takes
# 4 ms of CPU), the others change rarely. `nvlink_errors`: by kind the count of each link, None where it tells none.
# `nvlink_fec`: of each link how many blocks of data had 0, 1, ... 15 errors that were corrected on the way.
# `spare_rows`: how many banks of memory have all their spare rows (max), many (high), some (partial), few (low) and
# none. `ecc_corrected`: how many in "dram" and "sram" since the driver was loaded.
SLOW_COUNTERS = ("nvlink_errors", "nvlink_fec", "spare_rows", "ecc_corrected")

# What telemetry samples. The slow readings cost more than all others together (on an H200 a millisecond of CPU each):
# they are not in every sample.
SLOW_READINGS = ("pcie_transmitted_kilobytes_per_second", "pcie_received_kilobytes_per_second")
READINGS = (
    "utilization_percent", "memory_used_bytes", "temperature_c", "memory_temperature_c", "power_watts",
    "sm_clock_mhz", "memory_clock_mhz", "clock_event_reasons", *SLOW_READINGS,
)  # fmt: skip

NAMES = (*CONSTANTS, *COUNTERS, *SLOW_COUNTERS, *READINGS)

# nvml.h, nvmlClocksEventReasons: why the clocks are not higher than they are, the most alarming first.
CLOCK_EVENTS = {
    0x40: "hw thermal slowdown",
    0x80: "hw power brake slowdown",
    0x8: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x4: "sw power cap",
    0x2: "applications clocks setting",
    0x10: "sync boost",
    0x100: "display clock setting",
    0x1: "gpu idle",
}

# The clock events of which NVML counts how long they lasted. Older drivers have one counter of heat alone.
COUNTED_SLOWDOWNS = {"sw_thermal": 0x20, "hw_thermal": 0x40, "power_brake": 0x80, "thermal": 0x20}


class Unavailable(msgspec.Struct, frozen=True):
    """A fact that could not be read. `applicable` is False where this GPU or driver has no such thing."""

    reason: str = msgspec.field(name="unavailable")
    applicable: bool

    def __str__(self) -> str:
        return self.reason


def told(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts as they came from a file or another process: msgspec leaves what may be anything as it is."""
    untyped = [name for name, value in facts.items() if isinstance(value, dict) and "unavailable" in value]
    return {**facts, **{name: msgspec.convert(facts[name], Unavailable) for name in untyped}} if untyped else facts


def check_name(fact: str) -> None:
    """KeyError if no fact is called so: a check that asks for it would never look at anything."""
    if fact not in NAMES:
        near = difflib.get_close_matches(fact, NAMES, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(sorted(NAMES))}"
        raise KeyError(f"no GPU has a fact {fact!r}: {hint}")


def clock_events(mask: int) -> list[str]:
    """The bits of the reading `clock_event_reasons` in words, the most alarming first."""
    unknown = mask & ~sum(CLOCK_EVENTS)
    words = [word for bit, word in CLOCK_EVENTS.items() if mask & bit]
    return words + ([f"unknown reason {unknown:#x}"] if unknown else [])
