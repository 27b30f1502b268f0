"""Sustained load: matmuls, reductions, memory patterns and training take turns for as long as wanted. Every result is
compared, bit for bit, with what it must be or with the first one; the first trouble ends it."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple

import torch

from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.conditions import WARMED_THROUGH, Condition
from pytest_gpufleet.model.fault import expect_none
from pytest_gpufleet.model.levels import MATMULS, NO_EVENT
from pytest_gpufleet.model.metric import GpuState, Measurement
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.probes import memory
from pytest_gpufleet.probes.collectives.exactness import stays_exact
from pytest_gpufleet.probes.compute import corruption
from pytest_gpufleet.probes.compute.rate import heaviest, shape_on, strictly
from pytest_gpufleet.probes.timing import agree, seconds_each
from pytest_gpufleet.probes.training import loop
from pytest_gpufleet.probes.training.correctness import differences
from pytest_gpufleet.probes.training.recipes import USUAL
from pytest_gpufleet.world.world import Rank, World

ROUNDS = 10  # at least: the last tenth is compared with the first
# Until a GPU, its heat sink and the air around it are warm. From then on a healthy one keeps its rate; before, it loses
# 0.24 to 0.39 % for each of the 8 to 12 K by which H200 became warmer.
WARM_THROUGH_SECONDS = 300.0
MATMUL = "the matmul of the burn-in"  # that is compared: a rank keeps its operands between turns
ROUNDS_APART = 1_000_003  # of two turns: more than a turn has
RECIPE = "amp"
SHOWN = 3

AfterTurn = Callable[[str, float], None]  # what was done, and seconds since the beginning


class Turn(NamedTuple):
    """What one rank did in one turn."""

    rate: float = 0.0  # of matmuls and training
    trouble: str = ""
    state: GpuState | None = None
    compared: corruption.Compared | None = None  # of matmuls


def burn_in(world: World, seconds: float, after_turn: AfterTurn, bound: float = 0.0) -> list[Measurement]:
    """Load all ranks for `seconds`, and until as much was compared as `bound` needs: the rates of matmuls, and how well
    rates were kept. It ends if `after_turn` raises, and by Faults as soon as a result is wrong."""
    round_seconds = min(30.0, seconds / ROUNDS)
    turns: dict[str, list[list[Turn]]] = {name: [] for name in LOADS}
    cold = dict.fromkeys(LOADS, 0)  # turns that began before GPUs were warm
    every: list[corruption.Compared] = []
    began = time.monotonic()
    for name, (share, code, _) in itertools.cycle(LOADS.items()):
        enough = sum(each.seconds for each in every) >= NO_EVENT * bound
        if (spent := time.monotonic() - began) >= seconds and len(turns["training"]) >= 2 and enough:
            break
        cold[name] += spent < min(WARM_THROUGH_SECONDS, seconds / 3)
        results: list[Turn] = world.run(_turn, name, share * round_seconds, len(turns[name]))
        turns[name].append([result._replace(compared=None) for result in results])
        expect_none(world.faults(code, [result.trouble for result in results]))
        if compared := [result.compared for result in results if result.compared]:
            expect_none(world.faults("matmul_wrong", corruption.dissenters(world, compared)))
            every = [one.and_also(more) for one, more in zip(every, compared, strict=True)] if every else compared
        after_turn(name, time.monotonic() - began)
    world.run(put_away, MATMUL)
    by_place = zip(*turns["matrix products"], strict=True)
    matmuls: dict[Where, tuple[Turn, ...]] = dict(zip(world.places, by_place, strict=True))
    samples = {place: tuple(turn.rate for turn in own) for place, own in matmuls.items()}
    conditions: dict[str, Condition] = {"work": "burn-in", "seconds": round(seconds), "ranks": world.size}
    slowest = [min(result.rate for result in results) for results in turns["training"]]
    # Of matmuls, the median of each turn, and then of all turns: a single spike does not make up for a light load.
    return [
        Measurement("gemm", {place: median(each) for place, each in samples.items()}, conditions, samples),
        corruption.bound(world, every),
        _retention("matrix products", samples, cold["matrix products"]),
        _retention("training", {WORLD: slowest}, cold["training"]),
        *_power("burn_power", world, {place: _watts(turn.state for turn in own) for place, own in matmuls.items()}),
    ]


def _retention(work: str, rates: Mapping[Where, Sequence[float]], cold: int) -> Measurement:
    """The rate in the last tenth of the turns over that in the first tenth of all but the first `cold`."""
    values = {}
    for place, each in rates.items():
        warm = each[min(cold, len(each) - 1) :]
        tenth = max(1, math.ceil(len(warm) / 10))
        values[place] = median(warm[-tenth:]) / median(warm[:tenth])
    return Measurement("burn_retention", values, {"work": work, "method": WARMED_THROUGH})


def _watts(states: Iterable[GpuState | None]) -> list[float]:
    return [state.power_watts for state in states if state is not None and state.power_watts is not None]


def _power(metric: str, world: World, watts: Mapping[Where, Sequence[float]]) -> list[Measurement]:
    """The median power of each GPU, of its limit; none of CPU ranks."""
    limits: dict[Where, float | None] = {gpu.place: gpu.power_limit_watts for gpu in world.gpus}
    values = {place: median(each) / limit for place, each in watts.items() if each and (limit := limits.get(place))}
    return [Measurement(metric, values, {})] if world.gpus else []


def _turn(rank: Rank, name: str, seconds: float, number: int) -> Turn:
    with rank.phase(f"burn-in: {name}"), Watch(rank.gpu) as watch:
        turn = LOADS[name][2](rank, seconds, number, watch)
    return turn._replace(state=watch.medians)


def put_away(rank: Rank, work: str) -> None:
    del rank.kept[work]
    loop.release()


def _matmuls(rank: Rank, seconds: float, number: int, watch: Watch) -> Turn:
    """TFLOP/s. All ranks begin a turn at the same round, to which no turn before came."""
    if MATMUL not in rank.kept:
        rank.kept[MATMUL] = corruption.Matmuls(rank.device, heaviest(rank.device))
    clock = partial(getattr, watch, "sm_clock_mhz")
    compared: corruption.Compared = rank.kept[MATMUL].run(seconds, number * ROUNDS_APART, clock=clock)
    return Turn(compared.tflops, compared.trouble, compared=compared)


@loop.returns_memory()
def _training(rank: Rank, seconds: float, *_: object) -> Turn:
    """Images a second, all ranks together: ResNet-50, begun anew; in the end all ranks must have the same bits."""
    training = loop.plan_of_all(rank, RECIPE, USUAL)
    module = loop.module_of(rank, training)
    step = partial(loop.eager(module, training, rank.device), *loop.synthetic_batch(rank, training))
    before = next(module.parameters()).clone()
    with loop.precision(training):
        count = max(2, int(seconds / loop.lap(rank, step, training.warm_up).mean))
        measured = loop.lap(rank, step, agree(rank, count) if rank.size > 1 else count)
    if torch.equal(before, next(module.parameters())):
        raise ArithmeticError("training changed no weight: all gradients are NaN or infinite")
    unlike = differences(rank, dict(module.named_parameters())) if rank.size > 1 else []
    rate = training.batch * rank.size / measured.mean
    return Turn(rate, f"parameters differ from the other ranks': {'; '.join(unlike[:SHOWN])}" if unlike else "")


# By name its share of the time, the fault that its trouble is, and what loads a rank for so many seconds in its turn of
# this number. Matmuls on the tensor cores draw the most power.
LOADS: dict[str, tuple[float, str, Callable[[Rank, float, int, Watch], Turn]]] = {
    "matrix products": (MATMULS, "matmul_nondeterministic", _matmuls),
    "all_reduce": (
        0.1, "collective_wrong",
        lambda rank, seconds, *_: Turn(trouble=stays_exact(rank, seconds).trouble if rank.size > 1 else ""),
    ),
    "memory patterns": (
        0.1, "memory_data_error", lambda rank, seconds, *_: Turn(trouble=memory.hold_patterns(rank, seconds).trouble),
    ),
    "training": (0.2, "replicas_differ", _training),
}  # fmt: skip


# Power steps: all GPUs go from idle to full load and back together, which trips supplies that carry a steady load.
# DCGM's pulse test is for the same; frequencies and shape of the steps are our own. The moments of the steps are given
# beforehand, on the clock that all processes of one machine share, so that ranks neither wait for each other nor drift
# apart. Few matmuls wait in a GPU's queue at a time: when a step is over, its load is.

# Steps a second, each half load and half rest, and how many: 58 s in all. The slowest lets NVML's power, a mean of one
# second (nvml.h, nvmlDeviceGetPowerUsage), come to its top and its bottom.
STEPS = {"cuda": ((0.1, 2), (0.5, 6), (1.0, 10), (5.0, 40), (10.0, 80)), "cpu": ((5.0, 4), (10.0, 8))}
# From a call, of all steps of a frequency, to its first one: ranks get it in well below a millisecond.
LEAD_SECONDS = 0.1
# A tenth of the load of a step at 10 Hz. Larger matmuls draw the most power, and end the load less on time.
MATMUL_SECONDS = 0.005
HALVINGS = 3  # of each side of the matmul: to a 512th of the work
AHEAD = 2  # matmuls in a GPU's queue
WATCHED_SECONDS = 1.5  # of the end of a load or a rest of at least twice as long
SLOW = 0.7  # of a GPU's rate in the first half of the steps: as with a power brake, which takes half or more
STEP_MATMUL = "the matmul of the power steps"


class Step(NamedTuple):
    began_off: float  # by how many seconds off the moments given its load began and ended
    ended_off: float
    seconds: float
    matmuls: int


class StepTurn(NamedTuple):
    steps: tuple[Step, ...]
    trouble: str
    top: float | None = None  # watts at the end of loads, where those last long enough for NVML
    bottom: float | None = None  # of rests


def power_steps(world: World, after_turn: AfterTurn) -> list[Measurement]:
    """All ranks, of one machine, step together. It ends as `burn_in` does, and where a rank becomes much slower."""
    _prepare_all_steps(world)
    began, turns = time.monotonic(), dict[float, list[StepTurn]]()
    for hertz, count in STEPS["cuda" if world.gpus else "cpu"]:
        turns[hertz] = world.run(_step_turn, time.monotonic() + LEAD_SECONDS, hertz, count)
        expect_none(world.faults("matmul_nondeterministic", [turn.trouble for turn in turns[hertz]]))
        after_turn(f"power steps at {hertz:g} Hz", time.monotonic() - began)
        if any(_retained(turn.steps) < SLOW for turn in turns[hertz]):
            break
    world.run(put_away, STEP_MATMUL)
    return step_figures(world, turns)


def steps_seconds(world: World) -> float:
    return sum(count / hertz for hertz, count in STEPS["cuda" if world.gpus else "cpu"])


def step_figures(world: World, turns: Mapping[float, Sequence[StepTurn]]) -> list[Measurement]:
    """How late loads began or ended (ms), what of its rate each rank retained, and on GPUs the power at the top of the
    steps, of the limit, and how far it swung (W). `turns`: by frequency what each rank did."""
    late, kept, swing = (dict[Where, float]() for _ in range(3))
    watts: dict[Where, list[float]] = {}
    for place, own in zip(world.places, zip(*turns.values(), strict=True), strict=True):
        off = [abs(by) for turn in own for step in turn.steps for by in (step.began_off, step.ended_off)]
        late[place] = 1e3 * quantiles(off, n=10, method="inclusive")[-1]  # a host is held up now and then
        kept[place] = min(_retained(turn.steps) for turn in own)
        watts[place] = [turn.top for turn in own if turn.top is not None]
        bottoms = [turn.bottom for turn in own if turn.bottom is not None]
        if watts[place] and bottoms:
            swing[place] = median(watts[place]) - median(bottoms)
    details = {"hertz": ", ".join(f"{hertz:g}" for hertz in turns)}
    return [
        Measurement("step_skew", late, {}, details=details),
        Measurement("step_retention", kept, {}, details=details),
        *_power("step_power", world, watts),
        *([Measurement("power_swing", swing, {})] if world.gpus else []),
    ]


def _retained(steps: Sequence[Step]) -> float:
    """The rate in the second half of the steps of a frequency over that in the first half. Each frequency has a rate of
    its own, since a GPU that has rested is faster for a moment."""
    half = len(steps) // 2
    first, last = (
        sum(step.matmuls for step in some) / max(1e-9, sum(step.seconds for step in some))
        for some in (steps[:half], steps[-half:])
    )
    return min(1.0, last / first) if first else 0.0


def _prepare_all_steps(world: World) -> None:
    """The largest matmul that ends a step on time on the slowest GPU: the same on all, to be compared."""
    for halvings in range(HALVINGS + 1):
        ready: list[tuple[corruption.Compared, float]] = world.run(_prepare_steps, halvings)
        if max(seconds for _, seconds in ready) <= MATMUL_SECONDS:
            break
    every = [compared for compared, _ in ready]
    expect_none(world.faults("matmul_nondeterministic", [each.trouble for each in every]))
    expect_none(world.faults("matmul_wrong", corruption.dissenters(world, every)))


def _prepare_steps(rank: Rank, halvings: int) -> tuple[corruption.Compared, float]:
    with rank.phase("power steps: preparing"):
        precision = heaviest(rank.device)
        m, n, k = (side >> halvings for side in shape_on(rank.device, precision))
        work = rank.kept[STEP_MATMUL] = corruption.Matmuls(rank.device, precision, (m, n, k))
        with strictly(precision):
            seconds_each(rank.device, work.launch, AHEAD)  # the first may load or choose a kernel
            seconds = seconds_each(rank.device, work.launch, 10)
        return work.run(0.0), seconds


def _step_turn(rank: Rank, moment: float, hertz: float, count: int) -> StepTurn:
    """`count` steps, the first of which begins at `moment`, on time.monotonic()."""
    work: corruption.Matmuls = rank.kept[STEP_MATMUL]
    half = 0.5 / hertz
    watched = WATCHED_SECONDS if half >= 2 * WATCHED_SECONDS else 0.0
    unlike = torch.zeros((), dtype=torch.int64, device=rank.device)
    steps, tops, bottoms = list[Step](), list[float](), list[float]()
    with rank.phase(f"power steps at {hertz:g} Hz"), strictly(work.precision):
        for number in range(count):
            up, down = moment + number / hertz, moment + number / hertz + half
            _sleep_until(up)
            began = time.monotonic()
            matmuls = _load(work, unlike, down - watched)
            if watched:
                with Watch(rank.gpu) as watch:
                    matmuls += _load(work, unlike, down)
                tops += _watts([watch.medians])
            ended = time.monotonic()
            steps.append(Step(began - up, ended - down, ended - began, matmuls))
            if watched:
                _sleep_until(down + half - watched)
                with Watch(rank.gpu) as watch:
                    _sleep_until(down + half)
                bottoms += _watts([watch.medians])
    wrong, computed = int(unlike), sum(step.matmuls for step in steps)
    trouble = f"{wrong:,} of {computed:,} matmuls at {hertz:g} Hz differ from the first" if wrong else ""
    return StepTurn(tuple(steps), trouble, median(tops) if tops else None, median(bottoms) if bottoms else None)


def _load(work: corruption.Matmuls, unlike: torch.Tensor, until: float) -> int:
    """How many matmuls until then, when only the last may still go on. `unlike`: those that are not as the first."""
    waiting: deque[torch.cuda.Event] = deque()
    matmuls, began = 0, time.monotonic()
    while True:
        now = time.monotonic()
        each = (now - began) / max(1, matmuls - len(waiting))
        if now + len(waiting) * each >= until:
            break
        unlike += work.launch()
        matmuls += 1
        if unlike.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            waiting.append(done)
            if len(waiting) >= AHEAD:
                waiting.popleft().synchronize()
    while waiting:
        waiting.popleft().synchronize()
    return matmuls


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
