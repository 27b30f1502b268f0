"""pytest-gpufleet: acceptance tests for machines full of GPUs.

The public names for authors of checks; the fixtures are in `pytest_gpufleet.fixtures`, the options in `options`.
Names that need torch or judge are loaded at their first use, since this package is part of every pytest run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpufleet.hardware.network_ports import fastest_ports as fastest_ports
    from pytest_gpufleet.model.endings import not_applicable as not_applicable
    from pytest_gpufleet.model.endings import not_judged as not_judged
    from pytest_gpufleet.model.fault import Fault as Fault
    from pytest_gpufleet.model.fault import Faults as Faults
    from pytest_gpufleet.model.fault import expect_none as expect_none
    from pytest_gpufleet.model.finding import Finding as Finding
    from pytest_gpufleet.model.gpu import Gpu as Gpu
    from pytest_gpufleet.model.gpu import GpuTopology as GpuTopology
    from pytest_gpufleet.model.limit import Limit as Limit
    from pytest_gpufleet.model.machine import Machine as Machine
    from pytest_gpufleet.model.measurement import GpuState as GpuState
    from pytest_gpufleet.model.measurement import Measurement as Measurement
    from pytest_gpufleet.model.measurement import Reading as Reading
    from pytest_gpufleet.model.metric import GiB as GiB
    from pytest_gpufleet.model.metric import KiB as KiB
    from pytest_gpufleet.model.metric import Metric as Metric
    from pytest_gpufleet.model.metric import MiB as MiB
    from pytest_gpufleet.model.order_given import Order as Order
    from pytest_gpufleet.model.place import THIS_NODE as THIS_NODE
    from pytest_gpufleet.model.place import WORLD as WORLD
    from pytest_gpufleet.model.place import Pair as Pair
    from pytest_gpufleet.model.place import Place as Place
    from pytest_gpufleet.model.place import Where as Where
    from pytest_gpufleet.model.size import Size as Size
    from pytest_gpufleet.plugin.expectations import Wanted as Wanted
    from pytest_gpufleet.plugin.expectations import at_least as at_least
    from pytest_gpufleet.plugin.expectations import expect as expect
    from pytest_gpufleet.plugin.expectations import expect_as_ordered as expect_as_ordered
    from pytest_gpufleet.plugin.expectations import expect_host as expect_host
    from pytest_gpufleet.plugin.expectations import grave_host_messages as grave_host_messages
    from pytest_gpufleet.plugin.expectations import grave_xids as grave_xids
    from pytest_gpufleet.plugin.expectations import of_host as of_host
    from pytest_gpufleet.plugin.expectations import ports_in_use as ports_in_use
    from pytest_gpufleet.plugin.expectations import require_answers as require_answers
    from pytest_gpufleet.plugin.expectations import require_any as require_any
    from pytest_gpufleet.plugin.expectations import require_told as require_told
    from pytest_gpufleet.plugin.judging import Judge as Judge
    from pytest_gpufleet.probes.collectives.speed import bus_bandwidth as bus_bandwidth
    from pytest_gpufleet.probes.measure import measure as measure
    from pytest_gpufleet.probes.measure import measure_all as measure_all
    from pytest_gpufleet.probes.measure import scaling_efficiency as scaling_efficiency
    from pytest_gpufleet.verdict.fingerprint_rules import gpus_apart as gpus_apart
    from pytest_gpufleet.verdict.fingerprint_rules import nothing_repeats as nothing_repeats
    from pytest_gpufleet.verdict.fleet.among_nodes import clocks_apart as clocks_apart
    from pytest_gpufleet.verdict.fleet.among_nodes import fingerprints_in_common as fingerprints_in_common
    from pytest_gpufleet.verdict.fleet.among_nodes import nodes_compute_otherwise as nodes_compute_otherwise
    from pytest_gpufleet.verdict.fleet.among_nodes import nodes_unlike_others as nodes_unlike_others
    from pytest_gpufleet.verdict.fleet.among_nodes import slower_than_other_nodes as slower_than_other_nodes
    from pytest_gpufleet.verdict.fleet.host_runs import HostRun as HostRun
    from pytest_gpufleet.verdict.gpu_faults import unreadable as unreadable
    from pytest_gpufleet.verdict.health_rules import corrected_errors as corrected_errors
    from pytest_gpufleet.verdict.health_rules import corrected_rows as corrected_rows
    from pytest_gpufleet.verdict.health_rules import held_clocks as held_clocks
    from pytest_gpufleet.verdict.health_rules import recorded_errors as recorded_errors
    from pytest_gpufleet.verdict.host_rules.adapter_rules import adapters_that_fail as adapters_that_fail
    from pytest_gpufleet.verdict.host_rules.adapter_rules import slow_adapters as slow_adapters
    from pytest_gpufleet.verdict.host_rules.bmc_rules import cleared_since as cleared_since
    from pytest_gpufleet.verdict.host_rules.bmc_rules import fan_ills as fan_ills
    from pytest_gpufleet.verdict.host_rules.bmc_rules import is_inlet as is_inlet
    from pytest_gpufleet.verdict.host_rules.bmc_rules import log_full as log_full
    from pytest_gpufleet.verdict.host_rules.bmc_rules import logged_errors as logged_errors
    from pytest_gpufleet.verdict.host_rules.bmc_rules import logged_since as logged_since
    from pytest_gpufleet.verdict.host_rules.bmc_rules import power_ills as power_ills
    from pytest_gpufleet.verdict.host_rules.bmc_rules import supplies_lost as supplies_lost
    from pytest_gpufleet.verdict.host_rules.bmc_rules import temperature_ills as temperature_ills
    from pytest_gpufleet.verdict.host_rules.dcgm_rules import Diagnosis as Diagnosis
    from pytest_gpufleet.verdict.host_rules.disk_rules import sick_drives as sick_drives
    from pytest_gpufleet.verdict.host_rules.gpudirect_rules import adapters_by_gpu as adapters_by_gpu
    from pytest_gpufleet.verdict.host_rules.gpudirect_rules import adapters_far as adapters_far
    from pytest_gpufleet.verdict.host_rules.gpudirect_rules import built_for_gpudirect as built_for_gpudirect
    from pytest_gpufleet.verdict.host_rules.gpudirect_rules import gpudirect_ills as gpudirect_ills
    from pytest_gpufleet.verdict.host_rules.gpudirect_rules import redirecting_ports as redirecting_ports
    from pytest_gpufleet.verdict.host_rules.memory_rules import filled_slots as filled_slots
    from pytest_gpufleet.verdict.host_rules.memory_rules import memory_below_modules as memory_below_modules
    from pytest_gpufleet.verdict.host_rules.memory_rules import memory_errors_grown as memory_errors_grown
    from pytest_gpufleet.verdict.host_rules.memory_rules import recorded_memory_errors as recorded_memory_errors
    from pytest_gpufleet.verdict.host_rules.memory_rules import unfit_modules as unfit_modules
    from pytest_gpufleet.verdict.host_rules.optics_rules import links_with_errors as links_with_errors
    from pytest_gpufleet.verdict.host_rules.optics_rules import module_faults as module_faults
    from pytest_gpufleet.verdict.host_rules.pcie_rules import counts_errors as counts_errors
    from pytest_gpufleet.verdict.host_rules.pcie_rules import path_errors as path_errors
    from pytest_gpufleet.verdict.host_rules.pcie_rules import reduced_links as reduced_links
    from pytest_gpufleet.verdict.host_rules.pcie_rules import tells_links as tells_links
    from pytest_gpufleet.verdict.host_rules.pcie_rules import uncorrected_errors as uncorrected_errors
    from pytest_gpufleet.verdict.host_rules.processor_rules import nodes_with_less_memory as nodes_with_less_memory
    from pytest_gpufleet.verdict.host_rules.processor_rules import offline_processors as offline_processors
    from pytest_gpufleet.verdict.host_rules.processor_rules import slow_clock as slow_clock
    from pytest_gpufleet.verdict.judgement import LimitMissed as LimitMissed
    from pytest_gpufleet.verdict.link_rules import fabric_ills as fabric_ills
    from pytest_gpufleet.verdict.link_rules import link_errors as link_errors
    from pytest_gpufleet.verdict.link_rules import pcie_errors as pcie_errors
    from pytest_gpufleet.verdict.link_rules import pcie_lanes as pcie_lanes
    from pytest_gpufleet.verdict.mfu import above_peak as above_peak
    from pytest_gpufleet.verdict.mfu import model_flops_utilization as model_flops_utilization
    from pytest_gpufleet.verdict.orders.order_lines import ORDER_LINES as ORDER_LINES
    from pytest_gpufleet.verdict.orders.order_lines import ports_down as ports_down
    from pytest_gpufleet.verdict.port_rules import port_errors as port_errors
    from pytest_gpufleet.verdict.port_rules import port_traffic as port_traffic
    from pytest_gpufleet.verdict.port_rules import ports_behind_slow_pcie as ports_behind_slow_pcie
    from pytest_gpufleet.verdict.profiles.profile import Profile as Profile
    from pytest_gpufleet.world.rank import Rank as Rank
    from pytest_gpufleet.world.rank_failure import RankFailure as RankFailure
    from pytest_gpufleet.world.rank_failure import RankReport as RankReport
    from pytest_gpufleet.world.world import World as World

__version__ = "0.3.0"

_NAMES = {
    "hardware.network_ports": ("fastest_ports",),
    "model.endings": ("not_applicable", "not_judged"),
    "model.fault": ("Fault", "Faults", "expect_none"),
    "model.finding": ("Finding",),
    "model.gpu": ("Gpu", "GpuTopology"),
    "model.limit": ("Limit",),
    "model.machine": ("Machine",),
    "model.measurement": ("GpuState", "Measurement", "Reading"),
    "model.metric": ("GiB", "KiB", "Metric", "MiB"),
    "model.order_given": ("Order",),
    "model.place": ("THIS_NODE", "WORLD", "Pair", "Place", "Where"),
    "model.size": ("Size",),
    "plugin.expectations": (
        "Wanted",
        "at_least",
        "expect",
        "expect_as_ordered",
        "expect_host",
        "grave_host_messages",
        "grave_xids",
        "of_host",
        "ports_in_use",
        "require_answers",
        "require_any",
        "require_told",
    ),
    "plugin.judging": ("Judge",),
    "probes.collectives.speed": ("bus_bandwidth",),
    "probes.measure": ("measure", "measure_all", "scaling_efficiency"),
    "verdict.fingerprint_rules": ("gpus_apart", "nothing_repeats"),
    "verdict.fleet.among_nodes": (
        "clocks_apart",
        "fingerprints_in_common",
        "nodes_compute_otherwise",
        "nodes_unlike_others",
        "slower_than_other_nodes",
    ),
    "verdict.fleet.host_runs": ("HostRun",),
    "verdict.gpu_faults": ("unreadable",),
    "verdict.health_rules": ("corrected_errors", "corrected_rows", "held_clocks", "recorded_errors"),
    "verdict.host_rules.bmc_rules": (
        "cleared_since",
        "fan_ills",
        "is_inlet",
        "log_full",
        "logged_errors",
        "logged_since",
        "power_ills",
        "supplies_lost",
        "temperature_ills",
    ),
    "verdict.host_rules.dcgm_rules": ("Diagnosis",),
    "verdict.host_rules.disk_rules": ("sick_drives",),
    "verdict.host_rules.adapter_rules": ("adapters_that_fail", "slow_adapters"),
    "verdict.host_rules.memory_rules": (
        "filled_slots",
        "memory_below_modules",
        "memory_errors_grown",
        "recorded_memory_errors",
        "unfit_modules",
    ),
    "verdict.host_rules.processor_rules": ("nodes_with_less_memory", "offline_processors", "slow_clock"),
    "verdict.host_rules.optics_rules": ("links_with_errors", "module_faults"),
    "verdict.host_rules.gpudirect_rules": (
        "adapters_by_gpu",
        "adapters_far",
        "built_for_gpudirect",
        "gpudirect_ills",
        "redirecting_ports",
    ),
    "verdict.host_rules.pcie_rules": (
        "counts_errors",
        "path_errors",
        "reduced_links",
        "tells_links",
        "uncorrected_errors",
    ),
    "verdict.judgement": ("LimitMissed",),
    "verdict.link_rules": ("fabric_ills", "link_errors", "pcie_errors", "pcie_lanes"),
    "verdict.mfu": ("above_peak", "model_flops_utilization"),
    "verdict.orders.order_lines": ("ORDER_LINES", "ports_down"),
    "verdict.port_rules": ("port_errors", "port_traffic", "ports_behind_slow_pcie"),
    "verdict.profiles.profile": ("Profile",),
    "world.rank": ("Rank",),
    "world.rank_failure": ("RankFailure", "RankReport"),
    "world.world": ("World",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = tuple(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
