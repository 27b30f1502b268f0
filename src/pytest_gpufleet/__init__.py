"""pytest-gpufleet: acceptance tests for machines full of GPUs.

The public names for authors of checks; the fixtures are in `pytest_gpufleet.fixtures`, the options in `options`.
Names that need torch or judge are loaded at their first use, since this package is part of every pytest run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpufleet.model.fault import Fault, Faults
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.model.gpu import Gpu, GpuTopology
    from pytest_gpufleet.model.limit import Limit
    from pytest_gpufleet.model.measurement import Measurement, Reading
    from pytest_gpufleet.model.metric import GiB, KiB, Metric, MiB
    from pytest_gpufleet.model.place import WORLD, Pair, Place
    from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
    from pytest_gpufleet.probes.measure import measure, measure_all, scaling_efficiency
    from pytest_gpufleet.verdict.health_rules import expect
    from pytest_gpufleet.verdict.judgement import LimitMissed
    from pytest_gpufleet.world.outcomes import not_applicable
    from pytest_gpufleet.world.rank import Rank
    from pytest_gpufleet.world.rank_failure import RankFailure, RankReport
    from pytest_gpufleet.world.world import World

__version__ = "0.3.0"

_HOME = {
    **dict.fromkeys(("Fault", "Faults"), "model.fault"),
    **dict.fromkeys(("Gpu", "GpuTopology"), "model.gpu"),
    **dict.fromkeys(("RankFailure", "RankReport"), "world.rank_failure"),
    "not_applicable": "world.outcomes",
    "Rank": "world.rank",
    "World": "world.world",
    "bus_bandwidth": "probes.collectives.speed",
    **dict.fromkeys(("KiB", "MiB", "GiB", "Metric"), "model.metric"),
    **dict.fromkeys(("Measurement", "Reading"), "model.measurement"),
    **dict.fromkeys(("Pair", "Place", "WORLD"), "model.place"),
    **dict.fromkeys(("measure", "measure_all", "scaling_efficiency"), "probes.measure"),
    "Finding": "model.finding",
    "Limit": "model.limit",
    "LimitMissed": "verdict.judgement",
    "expect": "verdict.health_rules",
}

__all__ = [
    "WORLD",
    "Fault",
    "Faults",
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
    "Pair",
    "Place",
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
