"""pytest-gpufleet: acceptance tests for machines full of GPUs.

The public names for authors of checks; the fixtures are in `pytest_gpufleet.fixtures`, the options in `options`.
Names that need torch or judge are loaded at their first use, since this package is part of every pytest run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpufleet.hardware.topology import Gpu, GpuTopology
    from pytest_gpufleet.probes.collectives import bus_bandwidth
    from pytest_gpufleet.probes.reading import GiB, KiB, Metric, MiB, Reading
    from pytest_gpufleet.verdict.finding import Finding, Limit
    from pytest_gpufleet.verdict.health import expect
    from pytest_gpufleet.verdict.judge import LimitMissed
    from pytest_gpufleet.verdict.measurement import Measurement, measure, measure_all, scaling_efficiency
    from pytest_gpufleet.world.failures import RankFailure, RankReport
    from pytest_gpufleet.world.outcomes import not_applicable
    from pytest_gpufleet.world.rank import Rank
    from pytest_gpufleet.world.world import World

_HOME = {
    **dict.fromkeys(("Gpu", "GpuTopology"), "hardware.topology"),
    **dict.fromkeys(("RankFailure", "RankReport"), "world.failures"),
    "not_applicable": "world.outcomes",
    "Rank": "world.rank",
    "World": "world.world",
    "bus_bandwidth": "probes.collectives",
    **dict.fromkeys(("KiB", "MiB", "GiB", "Metric", "Reading"), "probes.reading"),
    **dict.fromkeys(("Measurement", "measure", "measure_all", "scaling_efficiency"), "verdict.measurement"),
    **dict.fromkeys(("Finding", "Limit"), "verdict.finding"),
    "LimitMissed": "verdict.judge",
    "expect": "verdict.health",
}

__all__ = [
    "Finding",
    "GiB",
    "Gpu",
    "GpuTopology",
    "KiB",
    "Limit",
    "LimitMissed",
    "Measurement",
    "Metric",
    "MiB",
    "Rank",
    "RankFailure",
    "RankReport",
    "Reading",
    "World",
    "bus_bandwidth",
    "expect",
    "measure",
    "measure_all",
    "not_applicable",
    "scaling_efficiency",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
