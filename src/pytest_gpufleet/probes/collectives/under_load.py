"""Matrix products and an all_reduce at the same time, as training overlaps them: what each keeps of what it reaches
alone, and whether both stay exact.

Both need SMs, memory and power, so a healthy GPU is slower at both than at one. The same work runs three times in
turns, on streams of the same priority: products alone, the all_reduce alone, both. Only the time in which both were
under way counts as together, since the one that is done last runs on alone.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpufleet.machine.telemetry import Watch
from pytest_gpufleet.model.conditions import SHARED_SPAN, Condition
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.collectives.exactness import OPERATIONS, bounded, whole_numbers
from pytest_gpufleet.probes.collectives.speed import nvls
from pytest_gpufleet.probes.compute.rate import multiplication, operands, shape_on, strictly
from pytest_gpufleet.probes.timing import agree, current_stream, line_up, mark, synchronize
from pytest_gpufleet.probes.training.loop import ms, returns_memory
from pytest_gpufleet.world.rank import Rank

NAME = "all_reduce"
SAMPLES = 3
# Of each of the three parts of a sample. The power controller of an H200 swings within a second: the parts take turns,
# so that it meets all alike.
PART_SECONDS = {"cuda": 0.3, "cpu": 0.005}
LEAD_IN_SECONDS = {"cuda": 0.5, "cpu": 0.0}
RESTORED = 8  # all_reduces: a copy of the data takes a tenth of the time of one
LEAST = 4  # operations of a part: the first and the last one run on alone
CHECKED = 20  # products that are compared bit for bit, and twice as many all_reduces

Times = tuple[float, float]  # seconds of one operation: alone, and beside the other one


@dataclass(frozen=True)
class _Work:
    """An operation on a stream of its own; on a CPU the host does it at once."""

    launch: Callable[[], object]
    stream: torch.cuda.Stream | None

    def marks(self, count: int) -> list[Any]:
        """Start it `count` times, with a mark before the first and after each."""
        marks = [mark(self.stream)]
        for _ in range(count):
            with torch.cuda.stream(self.stream):
                self.launch()
            marks.append(mark(self.stream))
        return marks


@returns_memory
def retention_under_load(rank: Rank, precision: str, nbytes: int) -> list[Reading]:
    """What products in `precision` and an all_reduce of `nbytes` keep of their rates while both run, as parts of what
    each reaches alone in the same turns: the median of three. The all_reduce is that of the slowest rank.

    On CPU ranks the two take turns, and the figure says nothing.
    """
    kind = rank.device.type
    shape = shape_on(rank.device, precision)
    products = _Work(multiplication(precision, *operands(precision, shape, rank.device)), _stream(rank))
    reduction = _Work(_reduction(rank, nbytes), _stream(rank))
    with strictly(precision), rank.phase(f"{precision} products and {NAME} of {nbytes:,} bytes at once"):
        counts = [_count(rank, each, PART_SECONDS[kind]) for each in (products, reduction)]
        until = time.monotonic() + LEAD_IN_SECONDS[kind]
        while time.monotonic() < until:
            products.marks(counts[0])
            synchronize(rank)
        with Watch(rank.gpu) as watch:
            samples = [_sample(rank, products, reduction, counts) for _ in range(SAMPLES)]
    conditions: dict[str, Condition] = {
        "collective": NAME,
        "precision": precision,
        "bytes": nbytes,
        "ranks": rank.size,
        "nvls": nvls(rank.device),
        "method": SHARED_SPAN,
    }
    of_products, of_reduction = zip(*samples, strict=True)
    flop = 2 * math.prod(shape)
    rates = _means(of_products, lambda seconds: f"{flop / seconds / 1e12:.4g} TFLOP/s")
    times = _means(of_reduction, ms)
    kept = [tuple(alone / beside for alone, beside in each) for each in (of_products, of_reduction)]
    return [
        Reading("product_retention", median(kept[0]), conditions, kept[0], None, rates, watch.state),
        Reading("reduction_retention", median(kept[1]), conditions, kept[1], WORLD, times),
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


def _means(samples: Sequence[Times], text: Callable[[float], str]) -> dict[str, Condition]:
    alone, together = map(fmean, zip(*samples, strict=True))
    return {"alone": text(alone), "together": text(together)}


def _stream(rank: Rank) -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if rank.device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _seconds(marks: Sequence[Any], origin: Any) -> list[float]:
    """When each mark was reached, counted from another one."""
    if isinstance(origin, float):
        return [mark - origin for mark in marks]
    return [origin.elapsed_time(mark) / 1e3 for mark in marks]


def _begin(rank: Rank) -> Any:
    """All ranks from the same moment on."""
    line_up(rank)
    return mark(current_stream(rank))


def _alone(rank: Rank, work: _Work, count: int) -> float:
    """Seconds of one operation, of `count` in a row."""
    origin = _begin(rank)
    marks = work.marks(count)
    synchronize(rank)
    at = _seconds(marks, origin)
    return (at[-1] - at[0]) / count


def _count(rank: Rank, work: _Work, seconds: float) -> int:
    """How many of them take so many seconds, as the slowest rank would have it."""
    _alone(rank, work, 1)  # connects the ranks and loads the kernels
    return agree(rank, max(LEAST, math.ceil(seconds / _alone(rank, work, LEAST))))


def _sample(rank: Rank, products: _Work, reduction: _Work, counts: Sequence[int]) -> tuple[Times, Times]:
    """Seconds of a product alone and beside the other, and of an all_reduce."""
    alone = [_alone(rank, each, count) for each, count in zip((products, reduction), counts, strict=True)]
    origin = _begin(rank)
    # The one that takes fewer launches for the same time first: the other has still most of its time to go then.
    works = sorted(zip((products, reduction), counts, strict=True), key=lambda each: each[1])
    marks = {id(work): work.marks(count) for work, count in works}
    synchronize(rank)
    at = [_seconds(marks[id(each)], origin) for each in (products, reduction)]
    together = beside(at[0], at[1]), beside(at[1], at[0])
    if rank.device.type != "cuda":  # there is nothing that both shared
        together = alone[0], alone[1]
    return (alone[0], together[0]), (alone[1], together[1])


def beside(own: Sequence[float], others: Sequence[float]) -> float:
    """Seconds of one operation, of those that began and ended while the other ones were under way; each list has the
    moment at which the first began, and those at which each ended. NaN where there is none."""
    begin, end = max(own[0], others[0]), min(own[-1], others[-1])
    within = [(a, b) for a, b in itertools.pairwise(own) if begin <= a and b <= end]
    return (within[-1][1] - within[0][0]) / len(within) if within else math.nan


@dataclass(frozen=True)
class Overlapped:
    """How many elements were wrong on a rank, of products and of all_reduces that ran at the same time."""

    products: int
    sums: int


@returns_memory
def wrong_under_load(rank: Rank, precision: str, nbytes: int) -> Overlapped:
    """Compute one product and reduce one tensor again and again at the same time, and compare each element: products
    bit for bit with the one that was computed alone, sums with what they must be."""
    multiply = multiplication(precision, *operands(precision, shape_on(rank.device, precision), rank.device))
    count = bounded(nbytes // 4, rank.size)
    numbers = whole_numbers(OPERATIONS["sum"], count, rank.size, torch.float32, rank.device)
    mine, right = numbers[rank.index].float(), numbers.sum(0).float()
    del numbers
    data, wrong = torch.empty_like(mine), torch.zeros(2, dtype=torch.int64, device=rank.device)
    with strictly(precision), rank.phase(f"{precision} products and {NAME} of {4 * count:,} bytes at once, exactly"):
        first = multiply()

        def product() -> None:
            wrong[0] += (multiply().view(torch.int16) != first.view(torch.int16)).sum()

        def reduction() -> None:
            data.copy_(mine)
            dist.all_reduce(data, group=rank.group)
            wrong[1] += (data != right).sum()

        line_up(rank)  # the numbers are there before other streams use them
        computing, reducing = _Work(product, _stream(rank)), _Work(reduction, _stream(rank))
        for _ in range(CHECKED):
            computing.marks(1)
            reducing.marks(2)  # it is done sooner
        synchronize(rank)
    return Overlapped(*map(int, wrong.tolist()))
