"""The checks of inventory and health, called with a recorded machine instead of this one: no process, no ranks."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpufleet.model import place
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.fault import Fault, Faults
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.world.world import World
from tests.conftest import ACCEPTANCE
from tests.machines import Recorded

MODULES = (
    "test_1_inventory",
    "test_1_order",
    "test_2_health",
    "test_2_host",
    "test_2_disks",
    "test_2_pcie",
    "test_6_network",
    "test_9_dcgm",
    "test_9_endurance",
)
pytest.register_assert_rewrite(*MODULES)
sys.path.append(str(ACCEPTANCE))


@dataclass(frozen=True)
class Outcome:
    """How a check ended: "passed", "failed", "skipped" or "not applicable", what it said, and the faults it found."""

    what: str
    message: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def gpus(self) -> set[int]:
        """The indices of the GPUs that it names."""
        places = {part for fault in self.faults for subject in fault.subjects for part in subject.parts}
        named = {part.index for part in places if part.kind == "gpu"}
        return named | set(map(int, re.findall(r"\bGPU (\d+) ", self.message)))


def checks() -> Iterator[tuple[str, Callable[..., None], dict[str, Any]]]:
    """Every check by its name with its case, and the case as arguments."""
    for module in map(__import__, MODULES):
        for name, check in vars(module).items():
            if not name.startswith("test_"):
                continue
            marks = [mark for mark in getattr(check, "pytestmark", ()) if mark.name == "parametrize"]
            if not marks:
                yield name, check, {}
            for argument, values, *_ in (mark.args for mark in marks):
                yield from ((f"{name}[{value}]", check, {argument: value}) for value in values)


def outcomes(here: Recorded, asked: int = 4, **more: Any) -> dict[str, Outcome]:
    """What every check says of this machine of which `asked` GPUs were asked for. Checks that take a fixture of which
    nothing is known, such as ranks, are left out; `more` are other fixtures."""
    fixtures = {
        "machine": here.machine,
        "gpu_topology": here.topology,
        "gpu_profile": profile.choose(None, (gpu.name for gpu in here.topology.gpus)),
        "fleet_order": None,
        "fleet_network": "",
        "host_now": here.machine.host.get,
        "host_before": {}.get,
        "asked_once": here.machine.host.get,
        "notice": lambda shown: None,
        "pytestconfig": SimpleNamespace(getoption={"gpus": asked}.get),
        **more,
    }
    return {
        name: _outcome(check, {**fixtures, **case}, here.topology)
        for name, check, case in checks()
        if inspect.signature(check).parameters.keys() <= {*fixtures, *case}
    }


def later(here: Recorded) -> Callable[[str], list[Any]]:
    """The fixture machine_now: the facts of another machine in the place of what this one answers now."""
    return lambda fact: [gpu[fact] for gpu in here.machine.gpus]


def ranks_answer(answers: list[Any], to: str) -> SimpleNamespace:
    """The fixture world: its ranks answer this `to` the probe of that name, and nothing to others."""

    def run(probe: Callable[..., Any]) -> list[Any]:
        return answers if probe.__name__ == to else [None] * len(answers)

    world = SimpleNamespace(run=run, places=[place.gpu(index) for index in range(len(answers))])
    world.faults = partial(World.faults, world)
    return world


def _outcome(check: Callable[..., None], fixtures: dict[str, Any], topology: GpuTopology) -> Outcome:
    try:
        check(**{name: fixtures[name] for name in inspect.signature(check).parameters})
    except NotApplicable as end:
        return Outcome("not applicable", str(end))
    except (pytest.skip.Exception, NotJudged) as end:
        return Outcome("skipped", str(end))
    except Faults as found:
        told = "\n".join(fault.told(topology.identity) for fault in found.faults)
        return Outcome("failed", told, found.faults)
    except (AssertionError, pytest.fail.Exception) as failure:
        return Outcome("failed", str(failure))
    return Outcome("passed")
