"""The checks of inventory and health, called with a recorded machine instead of this one: no process, no ranks."""

import inspect
import itertools
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace

import pytest

from pytest_gpufleet.machine.gpu_facts import NAMES
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.model import place
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.fault import Fault, Faults
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.world.world import World
from tests.conftest import ACCEPTANCE
from tests.machines import Recorded

MODULES = (
    "test_1_inventory", "test_1_order", "test_2_health", "test_2_host", "test_2_disks", "test_2_pcie", "test_6_network",
    "test_9_dcgm", "test_9_endurance",
)  # fmt: skip
pytest.register_assert_rewrite(*MODULES)
sys.path.append(str(ACCEPTANCE))


@dataclass(frozen=True)
class Outcome:
    """How a check ended: "passed", "failed", "skipped" or "not applicable", what it said, and the faults it found."""

    what: str
    message: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def gpus(self):
        places = {part for fault in self.faults for subject in fault.subjects for part in subject.parts}
        named = {part.index for part in places if part.kind == "gpu"}
        return named | set(map(int, re.findall(r"\bGPU (\d+) ", self.message)))


def checks_of(module):
    """Every check of a module with each of its cases as arguments, and its marks, those of the module first."""
    of_module = getattr(module, "pytestmark", [])
    for check in [each for name, each in vars(module).items() if name.startswith("test_")]:
        marks = [*(of_module if isinstance(of_module, list) else [of_module]), *getattr(check, "pytestmark", [])]
        marks = [getattr(mark, "mark", mark) for mark in marks]
        tables = [mark.args[:2] for mark in marks if mark.name == "parametrize"]
        for values in itertools.product(*(list(table) for _, table in tables)):
            sets = [value if hasattr(value, "marks") else pytest.param(value) for value in values]
            case = {name: each.values[0] for (name, _), each in zip(tables, sets, strict=True)}
            more = [getattr(mark, "mark", mark) for each in sets for mark in each.marks]
            yield check, case, [*(mark for mark in marks if mark.name != "parametrize"), *more]


def checks():
    """Every check of MODULES by its name with its case, and the case as arguments."""
    for module in map(__import__, MODULES):
        for check, case, _ in checks_of(module):
            yield check.__name__ + "".join(f"[{value}]" for value in case.values()), check, case


class Answering(Machine):
    """The fixture machine: `now` and `before` are facts of its host, or another recorded machine that answers."""

    def __init__(self, here, now, before):
        vars(self).update(vars(here))
        there = now.machine if isinstance(now, Recorded) else replace(here, host={**here.host, **(now or {})})
        vars(self)["now"] = lambda fact: facts_of(there).get(fact)
        vars(self)["before"] = lambda fact: {**facts_of(here), **before}.get(fact)


def facts_of(machine):
    return {**machine.host, **{fact: [gpu[fact] for gpu in machine.gpus] for fact in NAMES}}


def outcomes(here, asked=4, now=None, before=MappingProxyType({}), **more):
    """What every check says of this machine of which `asked` GPUs were asked for. Checks that take a fixture of which
    nothing is known, such as ranks, are left out; `more` are other fixtures. `now`: what another machine answers in its
    place, or what its host does; `before`: what its host has answered."""
    fixtures = {
        "machine": Answering(here.machine, now, before),
        "gpu_topology": here.topology,
        "gpu_profile": profile.choose(None, (gpu.name for gpu in here.topology.gpus)),
        "fleet_order": None,
        "fleet_network": "",
        "fleet_used": False,
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


def ranks(size, run=None, **more):
    """The fixture world: so many ranks, each on a GPU, that answer by `run`."""
    world = SimpleNamespace(size=size, run=run, places=[place.gpu(index) for index in range(size)], **more)
    world.faults = partial(World.faults, world)
    return world


def ranks_answer(answers, to):
    """This `to` the probe of that name, and nothing to others."""
    return ranks(len(answers), lambda probe: answers if probe.__name__ == to else [None] * len(answers))


def _outcome(check, fixtures, topology):
    try:
        check(**{name: fixtures[name] for name in inspect.signature(check).parameters})
    except NotApplicable as end:
        return Outcome("not applicable", str(end))
    except (pytest.skip.Exception, NotJudged) as end:
        return Outcome("skipped", str(end))
    except Faults as found:
        text = "\n".join(fault.described(topology.identity) for fault in found.faults)
        return Outcome("failed", text, found.faults)
    except (AssertionError, pytest.fail.Exception) as failure:
        return Outcome("failed", str(failure))
    return Outcome("passed")
