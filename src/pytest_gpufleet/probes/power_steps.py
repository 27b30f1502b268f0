"""Power steps: all GPUs go from idle to full load and back together, which trips supplies that carry a steady load.

DCGM's pulse test is for the same; frequencies and shape of the steps are our own. The moments of the steps are given
beforehand, on the clock that all processes of one machine share, so that ranks neither wait for each other nor drift
apart. Few products wait in a GPU's queue at a time: when a step is over, its load is.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from pytest_gpufleet.machine.telemetry import Watch
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.probes.burn_in import AfterTurn, no_trouble, put_away
from pytest_gpufleet.probes.compute import corruption
from pytest_gpufleet.probes.compute.rate import heaviest, shape_on, strictly
from pytest_gpufleet.probes.timing import seconds_each
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

# Steps a second, each half load and half rest, and how many: 58 s in all. The slowest lets NVML's power, a mean of one
# second (nvml.h, nvmlDeviceGetPowerUsage), come to its top and its bottom.
STEPS = {"cuda": ((0.1, 2), (0.5, 6), (1.0, 10), (5.0, 40), (10.0, 80)), "cpu": ((5.0, 4), (10.0, 8))}
CALL_SECONDS = 4.0  # after which health is looked at; a step of 0.1 Hz takes longer
LEAD_SECONDS = 0.1  # from a call to its first step: ranks get it in well below a millisecond
# A tenth of the load of a step at 10 Hz. Larger products draw the most power, and end the load less on time.
PRODUCT_SECONDS = 0.005
HALVINGS = 3  # of each side of the product: to a 512th of the work
AHEAD = 2  # products in a GPU's queue
WATCHED_SECONDS = 1.5  # of the end of a load or a rest of at least twice as long
SLOW = 0.7  # of a GPU's rate at the first steps of a frequency: as with a power brake, which takes half or more
WORK = "the matrix product of the power steps"


@dataclass(frozen=True)
class Step:
    """One step of one rank: by how many seconds its load began and ended off the moments given, how long it lasted,
    and its products."""

    began_off: float
    ended_off: float
    seconds: float
    products: int


@dataclass(frozen=True)
class Turn:
    """What one rank did in one call. `top` and `bottom`: watts at the end of loads and of rests, where those last long
    enough to tell."""

    steps: tuple[Step, ...]
    trouble: str
    top: float | None = None
    bottom: float | None = None

    @property
    def rate(self) -> float:
        """Products a second of load; 0 if there was none."""
        seconds = sum(step.seconds for step in self.steps)
        return sum(step.products for step in self.steps) / seconds if seconds > 0 else 0.0


Turns = Mapping[float, Sequence[Sequence[Turn]]]  # by frequency, of each call what each rank did


def power_steps(world: World, after_turn: AfterTurn) -> list[Measurement]:
    """All ranks of `world`, which are of one machine, step together through all frequencies.

    `after_turn` is called after each call and ends it if it raises. AssertionError, which names the ranks, as soon as a
    product differs from the first in one bit. Ends early where a rank becomes much slower, which its figures show.
    """
    _prepare_all(world)
    began = time.monotonic()
    turns: defaultdict[float, list[list[Turn]]] = defaultdict(list)
    for hertz, count in _calls(world):
        moment = time.monotonic() + LEAD_SECONDS
        results: list[Turn] = world.run(_turn, moment, hertz, count)
        turns[hertz].append(results)
        no_trouble(world, "power steps", dict(enumerate(result.trouble for result in results)))
        after_turn(f"power steps at {hertz:g} Hz", time.monotonic() - began, [])
        if slowed(turns[hertz]):
            break
    world.run(put_away, WORK)
    return figures(world, turns)


def _calls(world: World) -> Iterator[tuple[float, int]]:
    """The frequency of each call, and how many steps it has."""
    for hertz, count in STEPS["cuda" if world.gpus else "cpu"]:
        each = max(1, round(CALL_SECONDS * hertz))
        yield from ((hertz, min(each, count - first)) for first in range(0, count, each))


def duration(world: World) -> float:
    """Seconds that all steps take."""
    return sum(count / hertz for hertz, count in STEPS["cuda" if world.gpus else "cpu"])


def slowed(calls: Sequence[Sequence[Turn]]) -> list[int]:
    """The ranks that were much slower in the last call of a frequency than in its first."""
    pairs = enumerate(zip(calls[0], calls[-1], strict=True))
    return [index for index, (first, last) in pairs if last.rate < SLOW * first.rate]


def figures(world: World, turns: Turns) -> list[Measurement]:
    """How late loads began or ended (ms), what of its rate each rank retained, and on GPUs the power at the top of the
    steps, of the limit, and how far it swung (W)."""
    by_rank: dict[Where, Mapping[float, Sequence[Turn]]] = {
        place: {hertz: [call[index] for call in calls] for hertz, calls in turns.items()}
        for index, place in enumerate(world.places)
    }
    details = {"hertz": ", ".join(f"{hertz:g}" for hertz in turns)}
    late: dict[Where, float] = {place: 1e3 * _off(each) for place, each in by_rank.items()}
    kept: dict[Where, float] = {place: _retained(each) for place, each in by_rank.items()}
    timing = [
        Measurement("step_skew", late, {}, details=details),
        Measurement("step_retention", kept, {}, details=details),
    ]
    return [*timing, *_power(world, by_rank)] if world.gpus else timing


def _off(of_rank: Mapping[float, Sequence[Turn]]) -> float:
    """Seconds by which nine of ten steps were at most off their moments: a host is held up now and then."""
    steps = [step for calls in of_rank.values() for call in calls for step in call.steps]
    off = [abs(each) for step in steps for each in (step.began_off, step.ended_off)]
    return quantiles(off, n=10, method="inclusive")[-1]


def _retained(of_rank: Mapping[float, Sequence[Turn]]) -> float:
    """The rate in the second half of the steps of a frequency over that in the first half, of the worst frequency: each
    has a rate of its own, since a GPU that has rested is faster for a moment."""
    parts = []
    for calls in of_rank.values():
        steps = [step for call in calls for step in call.steps]
        if half := len(steps) // 2:
            first, last = Turn(tuple(steps[:half]), "").rate, Turn(tuple(steps[-half:]), "").rate
            parts.append(min(1.0, last / first) if first else 0.0)
    return min(parts, default=1.0)


def _power(world: World, by_rank: Mapping[Where, Mapping[float, Sequence[Turn]]]) -> list[Measurement]:
    power: dict[Where, float] = {}
    swing: dict[Where, float] = {}
    for gpu, of_rank in zip(world.gpus, by_rank.values(), strict=True):
        turns = [turn for calls in of_rank.values() for turn in calls]
        tops = [turn.top for turn in turns if turn.top is not None]
        bottoms = [turn.bottom for turn in turns if turn.bottom is not None]
        if tops and gpu.power_limit_watts:  # else nothing was measured, and nothing is judged
            power[gpu.place] = median(tops) / gpu.power_limit_watts
        if tops and bottoms:
            swing[gpu.place] = median(tops) - median(bottoms)
    return [Measurement("step_power", power, {}), Measurement("power_swing", swing, {})]


def _prepare_all(world: World) -> None:
    """The largest product that ends a step on time on the slowest GPU: the same one on all, so that results can be
    compared."""
    for halvings in range(HALVINGS + 1):
        ready: list[tuple[corruption.Repetition, float]] = world.run(_prepare, halvings)
        if max(seconds for _, seconds in ready) <= PRODUCT_SECONDS:
            break
    no_trouble(world, "power steps", corruption.dissenters([repetition for repetition, _ in ready]))


# ---------------------------------------------------------------- on ranks


def _prepare(rank: Rank, halvings: int) -> tuple[corruption.Repetition, float]:
    """Its first product, for comparison, and seconds that one takes."""
    with rank.phase("power steps: preparing"):
        precision = heaviest(rank.device)
        m, n, k = (side >> halvings for side in shape_on(rank.device, precision))
        work = rank.kept[WORK] = corruption.Repeated(rank.device, precision, (m, n, k))
        with strictly(precision):
            seconds_each(rank.device, work.launch, AHEAD)  # the first may load or choose a kernel
            seconds = seconds_each(rank.device, work.launch, 10)
        return work.seen, seconds


def _turn(rank: Rank, moment: float, hertz: float, count: int) -> Turn:
    """`count` steps, the first of which begins at `moment`, on time.monotonic()."""
    work: corruption.Repeated = rank.kept[WORK]
    half = 0.5 / hertz
    watched = half >= 2 * WATCHED_SECONDS
    unlike = torch.zeros((), dtype=torch.int64, device=rank.device)
    steps: list[Step] = []
    tops: list[float] = []
    bottoms: list[float] = []
    with rank.phase(f"power steps at {hertz:g} Hz"), strictly(work.precision):
        for number in range(count):
            up, down = moment + number / hertz, moment + number / hertz + half
            _sleep_until(up)
            began, products = time.monotonic(), 0
            if watched:
                products = _load(work, unlike, down - WATCHED_SECONDS)
                with Watch(rank.gpu) as watch:
                    products += _load(work, unlike, down)
                tops += _watts(watch)
            else:
                products = _load(work, unlike, down)
            ended = time.monotonic()
            steps.append(Step(began - up, ended - down, ended - began, products))
            if watched:
                _sleep_until(down + half - WATCHED_SECONDS)
                with Watch(rank.gpu) as watch:
                    _sleep_until(down + half)
                bottoms += _watts(watch)
    wrong, computed = int(unlike), sum(step.products for step in steps)
    trouble = f"{wrong:,} of {computed:,} products at {hertz:g} Hz differ from the first" if wrong else ""
    top, bottom = (median(each) if each else None for each in (tops, bottoms))
    return Turn(tuple(steps), trouble, top, bottom)


def _load(work: corruption.Repeated, unlike: torch.Tensor, until: float) -> int:
    """Products until that moment, and none that is still computed then but the last; how many. Counts in `unlike`, on
    the device, those that are not the first."""
    waiting: deque[torch.cuda.Event] = deque()
    products, began = 0, time.monotonic()
    while True:
        now = time.monotonic()
        each = (now - began) / max(1, products - len(waiting))
        if now + len(waiting) * each >= until:
            break
        unlike += work.launch()
        products += 1
        if unlike.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            waiting.append(done)
            if len(waiting) >= AHEAD:
                waiting.popleft().synchronize()
    while waiting:
        waiting.popleft().synchronize()
    return products


def _watts(watch: Watch) -> list[float]:
    state = watch.state
    return [] if state is None or state.power_watts is None else [state.power_watts]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
