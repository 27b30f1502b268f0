"""What the suite measures on GPUs that are not here: its own checks and probes, on ranks in this process.

Checks are called as they stand in acceptance/, for each level, number of GPUs and of nodes. Probes decide as on GPUs
what they measure and under which conditions; only the work whose time they take is left out: WORK lists what stands in
for it.
"""

import importlib
import inspect
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.model.levels import includes
from pytest_gpufleet.model.metric import GiB, GpuState
from pytest_gpufleet.model.place import Gpu
from pytest_gpufleet.plugin.assertions import taken
from pytest_gpufleet.probes import between_nodes, endurance, inference, measure, memory, timing
from pytest_gpufleet.probes.collectives import speed, under_load
from pytest_gpufleet.probes.compute import corruption, rate
from pytest_gpufleet.probes.links import copies, copying
from pytest_gpufleet.probes.search import collective
from pytest_gpufleet.probes.timing import Timing
from pytest_gpufleet.probes.training import loop, recipes, transformer, ways
from pytest_gpufleet.world.call import RankSpec, unpack
from pytest_gpufleet.world.world import Rank, World
from tests.acceptance.checks import checks_of
from tests.conftest import ACCEPTANCE

# Of work that no shipped limit may name (test_vocabulary): ways to train beside each other.
FOR_INFORMATION = (
    "test_training_sweep", "test_training_in_full_memory", "test_ddp_and_fsdp",
)  # fmt: skip
STATE = GpuState(60.0, 1500.0, 700.0)
WATCHED = SimpleNamespace(state=lambda *_: STATE, medians=STATE, held_by=lambda _: False)
SAMPLES = (1.0, 1.0, 1.0)
FIRST, LAP = (loop.Lap((1.0,), loss) for loss in (2.0, 1.0))


def giving(value):
    return lambda *_, **__: value


COMPARED = corruption.Compared("", "bf16", (1, 1, 1), "", 0, torch.empty(0), 1, {0: corruption.Amount(1.0, 1)})
LAPS = [(float(moment), 1.0) for moment in range(rate.PARTS)]
SOAKED = SimpleNamespace(run=giving(COMPARED), shape=(8192, 8192, 16384), laps=LAPS)


def timed(rank, launch, samples, **how):
    return Timing((1.0,) * samples, 1, 1)


def crossed(rank, directions, *how):
    return {each: (dict.fromkeys(copies.WAYS[each], SAMPLES), "") for each in directions}


def stepped(rank, moment, hertz, count):
    return endurance.StepTurn((endurance.Step(0.0, 0.0, 1.0, 1),) * count, "", 1.0, 0.0)


nothing = giving(None)


def alike(rank, values):
    return [list(values)] * rank.size


TRAYS = 18  # of an NVL72


def in_rack(gpu, node):
    """A GPU of this node, whose domain it has if it is of a model that is made for one."""
    health = {"mask": 0, "clique": 32766, "cluster": f"{1 + node // TRAYS:032x}"}
    return Gpu(gpu.index, {**gpu.facts, "fabric": {"state": 3, "status": 0}, "fabric_health": health})


def of_all(rank, values):
    """What all ranks of a group would say that this one says: of their nodes and domains each its own."""
    _, *alike, domain = values
    (members,) = rank._groups
    nodes = [member // rank.local_size for member in members]
    return [[node, *alike, float(bool(domain)) * (1 + node // TRAYS)] for node in nodes]


# What stands in for work on GPUs, by the module that calls it.
WORK = [
    (torch.distributed, {"all_reduce": nothing}),
    (speed, {"timing": timed, "replayed": timed, "_each": giving(1.0)}),
    (timing, {"own_stream": nothing}),
    (under_load, {"_Work": giving(SimpleNamespace(stream=None, launch=nothing))}),
    (under_load, {"_count": giving(1), "_sample": giving(((1.0, 1.0),) * 2)}),
    (under_load, {"operands": giving((torch.empty(0),) * 2), "_reduction": nothing, "LEAD_IN_SECONDS": {"cuda": 0.0}}),
    (under_load, {"Watch": giving(nullcontext(WATCHED)), "nvls": giving(False)}),
    (collective, {"timing": timed}),
    (memory, {"seconds_each": giving(1.0), "calls_in": nothing, "warm_up": nothing}),
    (rate, {"operands": giving((torch.empty(0),) * 2), "seconds_each": nothing, "warm_up": nothing}),
    (rate, {"parts": giving(SAMPLES), "calls_in": nothing}),
    (measure, {"Watch": giving(nullcontext(WATCHED))}),
    (rate, {"Watch": giving(nullcontext(WATCHED))}),
    (corruption, {"Matmuls": giving(SOAKED), "dissenters": lambda world, every: [""] * world.size}),
    (corruption, {"stays_exact": giving(corruption.Kept(1, "", 1.0, 1))}),
    (corruption, {"Watch": giving(nullcontext(WATCHED))}),
    (copies, {"_copy_to_host": crossed, "_copy": giving(SAMPLES), "_difference": giving(""), "_leave": nothing}),
    (copies, {"_reach": lambda rank, offers: [True] * rank.size}),
    (copying, {"prepare": nothing, "free": nothing}),
    (loop, {"sampled": giving(loop.Laps([LAP] * 3, [LAP] * 3, list(SAMPLES))), "record_losses": nothing}),
    (loop, {"release": nothing, "details": lambda *_: {}, "everyones": alike, "agree": lambda rank, number: number}),
    (loop, {"steps_of": giving((nothing, nothing))}),
    (loop, {"network": torch.nn.Identity, "under": giving(torch.nn.Identity()), "lap": giving(FIRST)}),
    (loop, {"synthetic_batch": giving(()), "eager": giving(nothing)}),
    (ways, {"DataParallel": nothing, "_trainer": nothing, "full": giving(True)}),
    (ways, {"_train_full": lambda rank, training, seconds: (training, 2, 1.0, GiB)}),
    (ways, {"write_photos": nothing, "worker_count": giving(8), "agree": lambda rank, number: number}),
    (ways, {"normalised": nothing, "photo_loader": nothing, "closing": nullcontext}),
    (transformer, {"transformer": giving(SimpleNamespace(blocks=(), dtype=None)), "trainer": giving((nothing, None))}),
    (transformer, {"agree": lambda rank, number: number, "sequences": nothing, "Watch": giving(nullcontext(WATCHED))}),
    (endurance, {"_turn": giving(endurance.Turn(1.0, "", STATE, COMPARED)), "put_away": nothing}),
    (endurance, {"_prepare_steps": giving((COMPARED, 0.0)), "_step_turn": stepped}),
    (inference, {"Decoder": giving(SimpleNamespace(begin=nothing, nbytes=1)), "_unlike_others": giving([])}),
    (inference, {"_timed": giving((SAMPLES, [])), "everyones": lambda rank, values: [values]}),
    (inference, {"Watch": giving(nullcontext(WATCHED))}),
    (between_nodes, {"everyones": alike}),
    (speed, {"everyones": of_all}),
    (torch.cuda.nccl, {"version": giving((2, 28, 9))}),
    (between_nodes.network_ports, {"any_active": giving(True)}),
]  # fmt: skip


class NotOfRanks(Exception):
    """A check takes a fixture with facts of a machine."""


class OnMeta(TorchFunctionMode):
    """Tensors of GPUs have a shape and no memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


class DryPool:
    """Ranks in this process, as World asks a pool for them."""

    def __init__(self, topology, nodes):
        each = len(topology.gpus)
        self.limit = None
        self.specs = [
            RankSpec(node * each + index, nodes * each, node, index, each, f"cuda:{index}", in_rack(gpu, node),
                     host=f"node{node}")
            for node in range(nodes)
            for index, gpu in enumerate(topology.gpus)
        ]  # fmt: skip
        self.everyone = tuple(range(nodes * each))

    def call(self, call, timeout):
        """Each group has its answer by its first rank."""
        function, args, kwargs = unpack(call.work)
        answers = {members: function(self._rank(members, call), *args, **kwargs) for members in call.groups}
        return {number: answers[members] for members in call.groups for number in members}

    def restarted(self, environments):
        return nullcontext()

    def _rank(self, members, call):
        spec, board = self.specs[members[0]], SimpleNamespace(phase=nothing)
        local_size, device = call.nodes.count(spec.node), torch.device(spec.device)
        return Rank(0, len(members), spec.node, local_size, device, spec.gpu, {}, {members: None}, members, board)


@cache
def checks():
    """Every check of figures with each of its cases as arguments, and its marks, those of its module first."""
    modules = map(importlib.import_module, sorted(path.stem for path in ACCEPTANCE.glob("test_*.py")))
    found = [(module, *each) for module in modules for each in checks_of(module)]
    return [each for each in found if figures(each[3])]


def figures(marks):
    """The metrics that a check says it measures."""
    named = [mark for mark in marks if mark.name == "figures"]
    return {name for mark in named for name in (*mark.args, *mark.kwargs.get("of_several", ()))}


def measured(board, topology, nodes, nvls, level, metrics, judge=None, without=FOR_INFORMATION):
    """All that those checks of this level which measure any of these metrics hand to `judge`, on so many nodes. `nvls`:
    whether NCCL may use it there. `judge` gives each check, by its name, one of its own. Checks `without` these."""
    judged = []

    def judging(*measurements, shown=(), **_):
        judged.extend([*taken(measurements), *shown])

    world = World(DryPool(topology, nodes), with_group=True)
    given = {
        "world": world,
        "nccl_group": world,
        "gpu_topology": topology,
        "gpu_profile": None,
        "fleet_level": level,
        "resnet": recipes.Workload(),
        "burn_in": lambda world: endurance.burn_in(world, 0.0, nothing),
        "pytestconfig": SimpleNamespace(getoption=nothing),
        "power_steps": lambda world: endurance.power_steps(world, nothing),
    }
    with _pretending(board, topology, nvls):
        for module, check, case, marks in checks():
            lowest = [mark.args[0] for mark in marks if mark.name == "level"]
            needs = [need for mark in marks if mark.name == "needs" for need in mark.kwargs.items()]
            between = module.__name__.startswith("test_nodes_")
            of_level = includes(level, lowest[-1] if lowest else "quick")
            of_metric = check.__name__ not in without and not figures(marks).isdisjoint(metrics)
            if between != (nodes > 1) or not of_level or not of_metric:
                continue
            here = {"ranks": world.size, "nodes": nodes, "capability": board.capability, "gpus": True}
            if all(here[name] >= wanted for name, wanted in needs):
                found = {**given, **case, "judge": judge(check.__name__) if judge else judging}
                with suppress(NotApplicable, NotOfRanks):
                    check(**_arguments(module, check, found))
    return judged


def _arguments(module, function, given):
    """The fixtures of a check: those given, and its module's own. One that takes others measures without ranks."""
    for name in inspect.signature(function).parameters:
        if name not in given:
            if not hasattr(module, name):
                raise NotOfRanks(name)
            fixture = inspect.unwrap(getattr(module, name))
            given[name] = fixture(**_arguments(module, fixture, given))
    return {name: given[name] for name in inspect.signature(function).parameters}


@contextmanager
def _pretending(board, topology, nvls):
    driver = {
        "get_device_capability": giving(board.capability),
        "get_device_properties": giving(SimpleNamespace(total_memory=topology.gpus[0].memory_bytes, is_integrated=0)),
        "empty_cache": nothing,
        "max_memory_allocated": giving(GiB),
        "mem_get_info": giving((GiB, GiB)),
        "reset_peak_memory_stats": nothing,
    }
    with pytest.MonkeyPatch.context() as patch, OnMeta():
        for module, stand_ins in [*WORK, (torch.cuda, driver), (speed, {"nvls": giving(nvls)})]:
            for name, stand_in in stand_ins.items():
                patch.setattr(module, name, stand_in)
        yield
