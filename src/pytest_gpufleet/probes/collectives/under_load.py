"""Matmuls and an all_reduce at the same time, as training overlaps them: what each keeps of what it reaches alone, and
whether both stay exact.

Both need SMs, memory and power, so a healthy GPU is slower at both than at one. The same work runs three times in
turns, on streams of the same priority: matmuls alone, the all_reduce alone, both. Only the time in which both were
under way counts as together, since the one that is done last runs on alone."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
import torch.distributed as dist

from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.conditions import SHARED_SPAN, Condition
from pytest_gpufleet.model.metric import Reading
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes import timing
from pytest_gpufleet.probes.collectives.exactness import Repeated
from pytest_gpufleet.probes.collectives.speed import nvls
from pytest_gpufleet.probes.compute.rate import multiplication, operands, shape_on, strictly
from pytest_gpufleet.probes.training.loop import ms, returns_memory
from pytest_gpufleet.world.world import Rank

NAME = "all_reduce"
SAMPLES = 3
# Of each of the three parts of a sample, which take turns: the power controller of an H200 swings within a second.
PART_SECONDS = {"cuda": 0.3, "cpu": 0.005}
LEAD_IN_SECONDS = {"cuda": 0.5, "cpu": 0.0}
RESTORED = 8  # all_reduces: a copy of the data takes a tenth of the time of one
LEAST = 4  # operations of a part: the first and the last one run on alone
CHECKED = 20  # matmuls that are compared bit for bit, and twice as many all_reduces

Times = tuple[float, float]  # seconds of one operation: alone, and beside the other one


@dataclass(frozen=True)
class _Work:
    """An operation on a stream of its own; on a CPU the host does it at once."""

    launch: Callable[[], object]
    stream: timing.Stream

    def marks(self, count: int) -> list[timing.Mark]:
        with torch.cuda.stream(self.stream):
            return timing.marks(self.stream, self.launch, 1, count)

    def seconds(self, rank: Rank, count: int) -> float:
        """Of one operation, of `count` in a row."""
        with torch.cuda.stream(self.stream):
            return timing.seconds(rank, self.launch, count)


@returns_memory()
def retention_under_load(rank: Rank, precision: str, nbytes: int) -> list[Reading]:
    """What matmuls in `precision` and an all_reduce of `nbytes` keep of their rates while both run: the median of three
    samples, the all_reduce of the slowest rank. On CPU ranks the two take turns, and the figure says nothing."""
    kind, shape = rank.device.type, shape_on(rank.device, precision)
    matmul = _Work(multiplication(precision, *operands(precision, shape, rank.device)), timing.own_stream(rank.device))
    works = (matmul, _Work(_reduction(rank, nbytes), timing.own_stream(rank.device)))
    with strictly(precision), rank.phase(f"{precision} matmuls and {NAME} of {nbytes:,} bytes at once"):
        counts = [_count(rank, each, PART_SECONDS[kind]) for each in works]
        with torch.cuda.stream(matmul.stream):
            timing.warm_up(rank.device, matmul.launch, LEAD_IN_SECONDS[kind])
        with Watch(rank.gpu) as watch:
            samples = [_sample(rank, works, counts) for _ in range(SAMPLES)]
    conditions: dict[str, Condition] = {
        "collective": NAME, "precision": precision, "bytes": nbytes, "ranks": rank.size, "nvls": nvls(rank.device),
        "method": SHARED_SPAN,
    }  # fmt: skip
    of_matmul, of_reduction = zip(*samples, strict=True)

    def means(samples: Sequence[Times], text: Callable[[float], str]) -> dict[str, Condition]:
        alone, together = map(fmean, zip(*samples, strict=True))
        return {"alone": text(alone), "together": text(together)}

    flop = 2 * math.prod(shape)
    rates = means(of_matmul, lambda seconds: f"{flop / seconds / 1e12:.4g} TFLOP/s")
    kept = [tuple(alone / beside for alone, beside in each) for each in (of_matmul, of_reduction)]
    return [
        Reading("product_retention", median(kept[0]), conditions, kept[0], None, rates, watch.state()),
        Reading("reduction_retention", median(kept[1]), conditions, kept[1], WORLD, means(of_reduction, ms)),
    ]


def _reduction(rank: Rank, nbytes: int) -> Callable[[], object]:
    """An all_reduce in place of random numbers, which are put back now and then: sums of sums grow out of bounds."""
    numbers = torch.rand(nbytes // 4, device=rank.device)
    data, launches = numbers.clone(), itertools.count()

    def reduce() -> None:
        if next(launches) % RESTORED == 0:
            data.copy_(numbers)
        dist.all_reduce(data, group=rank.group)

    return reduce


def _count(rank: Rank, work: _Work, seconds: float) -> int:
    """How many of them take so many seconds, as the slowest rank would have it."""
    work.seconds(rank, 1)  # connects the ranks and loads the kernels
    return timing.agree(rank, max(LEAST, math.ceil(seconds / work.seconds(rank, LEAST))))


def _sample(rank: Rank, works: Sequence[_Work], counts: Sequence[int]) -> list[Times]:
    """Of each work the seconds of one operation, alone and beside the other work."""
    alone = [work.seconds(rank, count) for work, count in zip(works, counts, strict=True)]
    timing.line_up(rank)
    origin = timing.mark(timing.current_stream(rank.device))
    # The one that takes fewer launches for the same time first: the other has still most of its time to go then.
    order = sorted((0, 1), key=lambda index: counts[index])
    marks = {index: works[index].marks(counts[index]) for index in order}
    timing.synchronize(rank)
    if rank.device.type != "cuda":  # there is nothing that both shared
        return [(each, each) for each in alone]
    own, others = ([timing.between(origin, each) for each in marks[index]] for index in (0, 1))
    return [(alone[0], beside(own, others)), (alone[1], beside(others, own))]


def beside(own: Sequence[float], others: Sequence[float]) -> float:
    """Seconds of one operation, of those that began and ended while the other ones were under way; each list has the
    moment at which the first began, and those at which each ended. NaN where there is none."""
    begin, end = max(own[0], others[0]), min(own[-1], others[-1])
    within = [(a, b) for a, b in itertools.pairwise(own) if begin <= a and b <= end]
    return (within[-1][1] - within[0][0]) / len(within) if within else math.nan


@returns_memory()
def wrong_under_load(rank: Rank, precision: str, nbytes: int) -> tuple[int, int]:
    """How many elements of matmuls are other bits than alone, and how many sums are wrong, at the same time."""
    multiply = multiplication(precision, *operands(precision, shape_on(rank.device, precision), rank.device))
    sums = Repeated(rank, NAME, rank.group, timing.own_stream(rank.device), nbytes // 4)
    wrong, what = torch.zeros((), dtype=torch.int64, device=rank.device), f"{NAME} of {4 * sums.count:,} bytes"
    with strictly(precision), rank.phase(f"{precision} matmuls and {what} at once, exactly"):
        first = multiply()

        def matmul() -> None:
            wrong.add_((multiply().view(torch.int16) != first.view(torch.int16)).sum())

        timing.line_up(rank)  # the numbers are there before other streams use them
        computing = _Work(matmul, timing.own_stream(rank.device))
        for _ in range(CHECKED):
            computing.marks(1)
            for _ in range(2):  # it is done sooner
                sums.once()
        timing.synchronize(rank)
    return int(wrong.item()), int(sums.wrong.item())
