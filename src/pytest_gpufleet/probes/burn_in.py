"""Sustained load: matmuls, reductions, memory patterns and training take turns for as long as wanted. Every result is
compared, bit for bit, with what it must be or with the first one; the first trouble ends it."""

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from pytest_gpufleet.machine.telemetry import Watch
from pytest_gpufleet.model.conditions import WARMED_THROUGH, Condition
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.probes import memory
from pytest_gpufleet.probes.collectives.exactness import stays_exact
from pytest_gpufleet.probes.compute import corruption
from pytest_gpufleet.probes.compute.rate import heaviest
from pytest_gpufleet.probes.timing import agree
from pytest_gpufleet.probes.training.correctness import differences
from pytest_gpufleet.probes.training.loop import (
    eager,
    lap,
    module_of,
    precision,
    release,
    returns_memory,
    synthetic_batch,
)
from pytest_gpufleet.probes.training.recipes import Workload, plan
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

ROUND_SECONDS = 30.0
ROUNDS = 10  # at least: the last tenth is compared with the first
# Until a GPU, its heat sink and the air around it are warm. From then on a healthy one keeps its rate; before, it loses
# 0.24 to 0.39 % for each of the 8 to 12 K by which H200 became warmer.
WARM_THROUGH_SECONDS = 300.0
MATMUL = "the matmul of the burn-in"  # that is repeated: a rank keeps its operands and its first result between turns
RECIPE = "amp"
SHOWN = 3

# What was done, seconds since the beginning, bytes of host memory of each process: the controller, then the ranks; none
# where nobody has looked.
AfterTurn = Callable[[str, float, list[int]], None]


@dataclass(frozen=True)
class Turn:
    """What one rank did in one turn. `trouble`: what was wrong, "" if nothing was. `state`: of the GPU."""

    rate: float  # in the unit of its load
    trouble: str
    resident_bytes: int  # host memory of the process
    state: GpuState | None = None


def burn_in(world: World, seconds: float, after_turn: AfterTurn) -> list[Measurement]:
    """Load all ranks of `world` for `seconds`, and give the rates of matmuls and how well rates were kept. It ends if
    `after_turn` raises; AssertionError, which names the ranks, as soon as a result is wrong in one bit."""
    no_trouble(world, "burn-in, preparing", corruption.dissenters(world.run(_prepare)))
    round_seconds = min(ROUND_SECONDS, seconds / ROUNDS)
    turns: dict[str, list[list[Turn]]] = {name: [] for name in LOADS}
    warm_through = min(WARM_THROUGH_SECONDS, seconds / 3)
    cold = dict.fromkeys(LOADS, 0)  # turns that began before
    began = time.monotonic()
    for name, (share, _) in itertools.cycle(LOADS.items()):
        if time.monotonic() - began >= seconds and len(turns["training"]) >= 2:
            break
        cold[name] += time.monotonic() - began < warm_through
        results: list[Turn] = world.run(_turn, name, share * round_seconds)
        turns[name].append(results)
        no_trouble(world, f"burn-in, {name}", dict(enumerate(result.trouble for result in results)))
        resident = [resident_bytes(), *(result.resident_bytes for result in results)]
        after_turn(name, time.monotonic() - began, resident)
    world.run(put_away, MATMUL)
    computed = turns["matrix products"]
    rates: dict[Where, list[float]] = {
        place: [results[index].rate for results in computed] for index, place in enumerate(world.places)
    }
    medians, samples = {place: median(each) for place, each in rates.items()}, {at: tuple(rates[at]) for at in rates}
    conditions: dict[str, Condition] = {"work": "burn-in", "seconds": round(seconds), "ranks": world.size}
    slowest = [min(result.rate for result in results) for results in turns["training"]]
    return [
        Measurement("gemm", medians, conditions, samples),
        _retention("matrix products", rates, cold["matrix products"]),
        _retention("training", {WORLD: slowest}, cold["training"]),
        *_power(world, computed),
    ]


def no_trouble(world: World, what: str, troubles: Mapping[int, str]) -> None:
    """AssertionError, which names the ranks that are in trouble, if any is."""
    if lines := [f"{world.name_of(index)}: {trouble}" for index, trouble in troubles.items() if trouble]:
        raise AssertionError("\n".join([f"{what}:", *lines]))


def _retention(work: str, rates: Mapping[Where, list[float]], cold: int) -> Measurement:
    """The rate in the last tenth of the turns over that in the first tenth of those that began on warm GPUs: all but
    the first `cold`."""
    values = {}
    for place, each in rates.items():
        warm = each[min(cold, len(each) - 1) :]
        tenth = max(1, math.ceil(len(warm) / 10))
        values[place] = median(warm[-tenth:]) / median(warm[:tenth])
    return Measurement("burn_retention", values, {"work": work, "method": WARMED_THROUGH})


def _power(world: World, turns: Sequence[Sequence[Turn]]) -> list[Measurement]:
    """The power of each GPU while it computed matmuls, of its limit; none of CPU ranks. The median of each turn, and
    then of all turns: a single spike does not make up for a load that was too light."""
    values: dict[Where, float] = {}
    for index, gpu in enumerate(world.gpus):
        states = [results[index].state for results in turns]
        watts = [state.power_watts for state in states if state is not None and state.power_watts is not None]
        if watts and gpu.power_limit_watts:  # else nothing was measured, and nothing is judged
            values[gpu.place] = median(watts) / gpu.power_limit_watts
    return [Measurement("burn_power", values, {})] if world.gpus else []


# ---------------------------------------------------------------- on ranks


def _prepare(rank: Rank) -> corruption.Repetition:
    with rank.phase("burn-in: preparing"):
        work = rank.kept[MATMUL] = corruption.Repeated(rank.device, heaviest(rank.device))
        return work.seen


def _turn(rank: Rank, name: str, seconds: float) -> Turn:
    with rank.phase(f"burn-in: {name}"), Watch(rank.gpu) as watch:
        rate, trouble = LOADS[name][1](rank, seconds)
    return Turn(rate, trouble, resident_bytes(), watch.medians)


def put_away(rank: Rank, work: str) -> None:
    """Give back the memory of what this rank keeps by this name."""
    del rank.kept[work]
    release(rank.device)


def _matmuls(rank: Rank, seconds: float) -> tuple[float, str]:
    """TFLOP/s."""
    work: corruption.Repeated = rank.kept[MATMUL]
    return work.run(seconds), work.trouble


def _reductions(rank: Rank, seconds: float) -> tuple[float, str]:
    """Reductions a second."""
    if rank.size == 1:
        return 0.0, ""
    began = time.perf_counter()
    times, trouble = stays_exact(rank, seconds)
    return times / (time.perf_counter() - began), trouble


def _memory(rank: Rank, seconds: float) -> tuple[float, str]:
    """Bytes a second, of all memory that is free."""
    began = time.perf_counter()
    seen = memory.hold_patterns(rank, seconds)
    return seen.tested * seen.sweeps / (time.perf_counter() - began), seen.trouble


@returns_memory
def _training(rank: Rank, seconds: float) -> tuple[float, str]:
    """Images a second, all ranks together: ResNet-50, begun anew; in the end all ranks must have the same bits."""
    training = plan(RECIPE, Workload(), rank.device)
    module = module_of(rank, training)
    step = partial(eager(module, training, rank.device), *synthetic_batch(rank, training))
    with precision(training.recipe):
        count = max(2, int(seconds / lap(rank, step, training.recipe.warm_up).mean))
        count = agree(rank, count) if rank.size > 1 else count
        measured = lap(rank, step, count)
    unlike = differences(rank, dict(module.named_parameters())) if rank.size > 1 else []
    rate = count * training.recipe.batch * rank.size / measured.seconds
    return rate, f"parameters differ from the other ranks': {'; '.join(unlike[:SHOWN])}" if unlike else ""


# By name its share of the time, and what loads a rank for so many seconds: the rate, and what was wrong. Matmuls on the
# tensor cores draw the most power.
LOADS: dict[str, tuple[float, Callable[[Rank, float], tuple[float, str]]]] = {
    "matrix products": (0.6, _matmuls),
    "all_reduce": (0.1, _reductions),
    "memory patterns": (0.1, _memory),
    "training": (0.2, _training),
}


def resident_bytes() -> int:
    """Host memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
