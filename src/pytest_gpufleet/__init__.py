"""pytest-gpufleet: acceptance tests for GPU servers.

The public names for authors of checks; the fixtures are in `pytest_gpufleet.fixtures`, the options in `options`.
Names that need torch or judge are loaded at their first use, since this package is part of every pytest run."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

# fmt: off
if TYPE_CHECKING:
    from pytest_gpufleet.model.endings import not_applicable as not_applicable, not_judged as not_judged  # noqa: I001
    from pytest_gpufleet.model.fault import Fault as Fault, Faults as Faults, expect_none as expect_none
    from pytest_gpufleet.model.finding import Finding as Finding, Limit as Limit
    from pytest_gpufleet.model.metric import (
        GiB as GiB, GpuState as GpuState, KiB as KiB, Measurement as Measurement, Metric as Metric, MiB as MiB,
        Reading as Reading, Size as Size,
    )
    from pytest_gpufleet.model.place import (
        THIS_NODE as THIS_NODE, WORLD as WORLD, Gpu as Gpu, GpuTopology as GpuTopology, Pair as Pair, Place as Place,
    )
    from pytest_gpufleet.plugin.assertions import (
        Judge as Judge, LiveMachine as LiveMachine, at_least as at_least, expect as expect,
    )
    from pytest_gpufleet.probes.collectives.speed import bus_bandwidth as bus_bandwidth
    from pytest_gpufleet.probes.measure import (
        measure as measure, measure_all as measure_all, scaling_efficiency as scaling_efficiency,
    )
    from pytest_gpufleet.verdict.judgement import LimitMissed as LimitMissed
    from pytest_gpufleet.verdict.profile import Profile as Profile
    from pytest_gpufleet.world.failure import RankFailure as RankFailure, RankReport as RankReport
    from pytest_gpufleet.world.world import Rank as Rank, World as World
# fmt: on

__version__ = "0.4.0.dev0"

_NAMES = {
    "model.endings": ("not_applicable", "not_judged"),
    "model.fault": ("Fault", "Faults", "expect_none"),
    "model.finding": ("Finding", "Limit"),
    "model.metric": ("GiB", "GpuState", "KiB", "Measurement", "Metric", "MiB", "Reading", "Size"),
    "model.place": ("THIS_NODE", "WORLD", "Gpu", "GpuTopology", "Pair", "Place"),
    "plugin.assertions": ("Judge", "LiveMachine", "at_least", "expect"),
    "probes.collectives.speed": ("bus_bandwidth",),
    "probes.measure": ("measure", "measure_all", "scaling_efficiency"),
    "verdict.judgement": ("LimitMissed",),
    "verdict.profile": ("Profile",),
    "world.failure": ("RankFailure", "RankReport"),
    "world.world": ("Rank", "World"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = tuple(_HOME)


def _refuse_to_be_no_test() -> None:
    """`python acceptance/test_x.py`, by torchrun too, would define its checks, run none, and end with status 0."""
    path = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    folder, file = os.path.split(path)
    if not file.startswith(("test_", "conftest.py", "__init__.py")) or not os.path.isfile(path):
        return
    with open(path, encoding="utf-8", errors="replace") as opened:
        text = opened.read()
    if "__main__" in text or ("def test_" not in text and file.startswith("test_")):  # it does something by itself
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        checks = path if file.startswith("test_") else folder
        run = f"run `pytest {checks} --gpus 8`, which starts a process for each GPU"
        print(f"{path} tests nothing when Python or torchrun starts it: {run}", file=sys.stderr)
    raise SystemExit(4)


_refuse_to_be_no_test()


class Lazy:
    """A module of this package that is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a plugin whether it is a fixture
            raise AttributeError(name)
        return getattr(import_module(f"{__name__}.{self._name}"), name)


def lazy(room: str, *modules: str) -> Iterator[Any]:
    """For what is loaded in every pytest run; type checkers read an ordinary import of the same modules."""
    return (Lazy(f"{room}.{name}") for name in modules)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
