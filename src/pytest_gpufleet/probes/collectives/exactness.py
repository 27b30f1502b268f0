"""Whether collectives deliver exactly the right data.

The data are whole numbers that look random, differ by position and rank, and are such that what an operation makes of
them is exact in its type. A flipped, swapped, lost or doubled element changes the result, and every element must be
right (0 ULP)."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from pytest_gpufleet.model.place import FP8_REDUCTIONS_SINCE
from pytest_gpufleet.probes.collectives.table import COLLECTIVES, Collective, type_name
from pytest_gpufleet.probes.comparison import SHOWN, wrong_elements
from pytest_gpufleet.probes.timing import Stream, agree, current_stream, own_stream, seconds, synchronize, wait
from pytest_gpufleet.world.world import TIMEOUT, Rank

# Every type that NCCL or Gloo knows (complex ones travel as floats), and up to which number it holds every whole one.
DTYPES = {
    torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53,
    torch.float8_e4m3fn: 2**4, torch.float8_e5m2: 2**3,
    torch.int8: 2**7 - 1, torch.uint8: 2**8 - 1, torch.int32: 2**31 - 1,
    torch.int64: 2**61,  # no more: the data are made in int64 and must not overflow on the way
    torch.bool: 1,
}  # fmt: skip

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# One element, fewer than there are ranks, a power of two, and a number that fits no block.
COUNTS = {"cuda": (1, 3, 1 << 20, 1_000_003), "cpu": (1, 3, 1 << 14, 10_007)}
LARGE = {"cuda": 1 << 24, "cpu": 1 << 14}  # keeps all links busy
# That a rank makes of all ranks together: int64, and on 8 ranks LARGE takes as many. Of thousands each has fewer.
MOST_NUMBERS = 1 << 27

# How torch says that a backend lacks an operation or a type. Every other error is a failure.
REFUSALS = (
    "Invalid scalar type",  # Gloo
    "Cannot use ReduceOp.AVG with Gloo",
    "result type Float can't be cast",  # Gloo, of averages of whole numbers
    "data type is not supported for NCCL",
    "Unsupported Float8 type for NCCL reduction",
    "Cannot use ReduceOp.AVG with boolean inputs",  # NCCL
)
# torch, whose Gloo has added up in reduce_scatter whatever it was asked for: 2.4.0, 2.7.1 and 2.8.0 do, 2.9.1 does not.
GLOO_ONLY_ADDS_BEFORE = "2.9"


class Operation(NamedTuple):
    """A reduction, and numbers of which its result is exact. `combine` makes the result from stacked numbers of n
    ranks. Each rank's numbers stay below 1 / `headroom(n)` of what the type holds, and are multiplied by `factor(n)`.
    `one_at_a_time`: of all ranks one has a number, and the others 1 or -1."""

    op: dist.ReduceOp.RedOpType
    combine: Callable[[Tensor], Tensor]
    headroom: Callable[[int], int] = lambda n: 1
    factor: Callable[[int], int] = lambda n: 1
    one_at_a_time: bool = False


OPERATIONS = {
    "sum": Operation(dist.ReduceOp.SUM, lambda numbers: numbers.sum(0), headroom=lambda n: n),
    "max": Operation(dist.ReduceOp.MAX, lambda numbers: numbers.amax(0)),
    "min": Operation(dist.ReduceOp.MIN, lambda numbers: numbers.amin(0)),
    # Not torch.prod, for which torch compiles a kernel of its own on a GPU: a second for each shape of its input.
    "prod": Operation(dist.ReduceOp.PRODUCT, lambda numbers: reduce(torch.mul, numbers), one_at_a_time=True),
    # Multiples of n: their average is a whole number, whether one divides before or after adding up.
    "avg": Operation(dist.ReduceOp.AVG, lambda numbers: numbers.sum(0) // len(numbers), lambda n: n**2, lambda n: n),
}  # fmt: skip

# Every collective, those that reduce with every operation.
KINDS = [(name, op) for name, each in COLLECTIVES.items() for op in (OPERATIONS if each.reduces else ("",))]


class Delivery(NamedTuple):
    """What one rank got: what was wrong, what the backend refused, and how many exchanges were right."""

    wrong: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    right: int = 0


class Refused(Exception):
    """The backend does not do this with this type."""


def exchange(
    rank: Rank, name: str, operation: str = "", dtypes: Sequence[torch.dtype] = tuple(DTYPES), strided: bool = False
) -> Delivery:
    """Run a collective on data of every type and size, from the first, middle and last root, in place and out of place
    where torch has both. `strided`: with gaps in the buffers, which must stay as they are; the data are packed for the
    way, since the backends take tensors without gaps only (and some do not look)."""
    # What reduces nothing gets all numbers that the type holds.
    collective, reduction = COLLECTIVES[name], OPERATIONS[operation or "max"]
    old_gloo = rank.device.type == "cpu" and TorchVersion(torch.__version__) < GLOO_ONLY_ADDS_BEFORE
    if old_gloo and name == "reduce_scatter" and operation != "sum":
        return Delivery(refused=(f"Gloo of torch before {GLOO_ONLY_ADDS_BEFORE} adds up, whatever the operation is",))
    roots = sorted({0, rank.size // 2, rank.size - 1}) if collective.rooted else [None]
    both = [False] if strided else [False, True]
    places = {"always": [True], "also": both, "never": [False]}[collective.in_place]
    wrong, refused, right = [], [], 0
    # Made once for every root, in place and out of place.
    numbers_of = lru_cache(1)(lambda count, dtype: whole_numbers(reduction, count, rank.size, dtype, rank.device))
    for dtype in dtypes:
        counts = [*COUNTS[rank.device.type], *([LARGE[rank.device.type]] if dtype is torch.float32 else [])]
        words = " ".join(filter(None, (name, operation, type_name(dtype))))
        # What all can: one that refuses alone would have the others wait for it.
        of_gpu = collective.reduces and dtype in FLOAT8 and rank.device.type == "cuda"
        if of_gpu and not agree(rank, torch.cuda.get_device_capability() >= FP8_REDUCTIONS_SINCE):
            refused.append(f"{type_name(dtype)}: NCCL adds float8 on later GPUs only")
            continue
        try:
            for count, root, in_place in itertools.product(counts, roots, places):
                elements = collective.total(bounded(count, rank.size), rank.size)
                at = "" if root is None else f", root {root}"
                case = f"{words}, {elements:,} elements{at}, {'in' if in_place else 'out of'} place"
                with rank.phase(case):
                    fault = _fault(rank, collective, reduction, numbers_of, dtype, elements, root, in_place, strided)
                if fault:
                    wrong.append(f"{case}: {fault}")
                else:
                    right += 1
        except Refused as reason:
            refused.append(f"{type_name(dtype)}: {reason}")
    return Delivery(tuple(wrong), tuple(refused), right)


def _fault(
    rank: Rank, collective: Collective, reduction: Operation, numbers_of: Callable[[int, torch.dtype], Tensor],
    dtype: torch.dtype, elements: int, root: int | None, in_place: bool, strided: bool,
) -> str:  # fmt: skip
    """How many elements of this rank's result are wrong, and the first; or "". `numbers_of`: those of all ranks."""
    n, spaces = rank.size, list[Tensor]()

    def empty(size: int) -> Tensor:
        spaces.append(as_type(torch.ones(2 * size if strided else size, device=rank.device), dtype))
        return spaces[-1][::2] if strided else spaces[-1]

    input, output = collective.buffers(elements, n, rank.index, in_place, empty)
    numbers = numbers_of(input.numel(), dtype)
    input.copy_(as_type(numbers[rank.index], dtype))
    sent = input.contiguous()
    received = sent if in_place and strided else output.contiguous()
    try:
        wait(collective.launch(rank.group, received, sent, root or 0, reduction.op))
    except (RuntimeError, TypeError, ValueError) as error:
        if any(words in str(error) for words in REFUSALS):
            raise Refused(str(error).splitlines()[0]) from None
        raise
    if strided:
        output.copy_(received)
        if any(bool(space[1::2].ne(1).any()) for space in spaces):
            return "elements beside the tensor were overwritten"
    if (expected := collective.expected(numbers, rank.index, root or 0, reduction.combine)) is None:
        return ""
    # NCCL multiplies with 1 / n, which binary fractions hold exactly for powers of two only. nccl-tests allows 2 ULP.
    ulps = 2 if reduction.op == dist.ReduceOp.AVG and dtype.is_floating_point and n & (n - 1) else 0
    return wrong_in(output, as_type(expected, dtype), ulps)


def whole_numbers(operation: Operation, count: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers of all n ranks: n rows of `count` int64. Refused if the type cannot hold results of so many ranks."""
    true_stays_true = dtype is torch.bool and operation.op == dist.ReduceOp.SUM
    top = DTYPES[dtype] // (1 if true_stays_true else operation.headroom(n))
    if not top:
        raise Refused(f"it holds no exact result of {n} ranks")
    turn = noise(n, count, device).remainder(n) if operation.one_at_a_time else None
    rows = []
    for index in range(n):
        numbers = noise(index, count, device)
        numbers = numbers.remainder(2 * top + 1) - top if dtype.is_signed else numbers.remainder(top + 1)
        if turn is not None:
            numbers = torch.where(turn == index, numbers, torch.where(numbers < 0, -1, 1))
        rows.append(numbers * operation.factor(n))
    return torch.stack(rows)


def bounded(count: int, n: int) -> int:
    """So many elements, or as many as n ranks leave of MOST_NUMBERS."""
    return min(count, MOST_NUMBERS // n)


def noise(seed: int, count: int, device: torch.device) -> Tensor:
    """`count` int64 values that look random and differ by position and seed: a counter, mixed by multiplying and
    shifting (SplitMix64, but for the sign), since a generator would not give the same on every device."""
    # Tensors of int64 wrap around; Python's numbers must be made to.
    offset = ((seed + 1) * -4417276706812531889 + 2**63) % 2**64 - 2**63
    values = torch.arange(1, count + 1, device=device) * -7046029254386353131 + offset
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        values = (values ^ (values >> shift)) * factor
    return values


def as_type(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    # Not every torch converts whole numbers to float8.
    return numbers.float().to(dtype) if dtype in FLOAT8 else numbers.to(dtype)


def wrong_in(result: Tensor, expected: Tensor, ulps: int = 0) -> str:
    """How many elements are not equal (NaN never is), or more than `ulps` units in the last place off; the first."""
    if expected.dtype in FLOAT8:
        result, expected = result.float(), expected.float()  # float8 cannot be compared
    wrong = result != expected
    if ulps:
        _, exponent = torch.frexp(expected.double())  # the fraction is in [0.5, 1)
        unit = torch.finfo(expected.dtype).eps * 2.0 ** (exponent - 1)
        wrong &= ~((result.double() - expected.double()).abs() <= ulps * unit)
    return wrong_elements(result, expected, wrong=wrong)


# The numbers repeat after so many elements: a prime, so that data moved by any block or chunk of NCCL's look different.
PERIOD = 251
AT_A_TIME = {"cuda": 1 << 26, "cpu": 1 << 12}  # elements that are made or compared; the data alone may fill half a GPU


def large_all_reduce(rank: Rank, nbytes: int) -> str:
    """What is wrong with an all_reduce of `nbytes` of float32, which takes them in memory once; "" if nothing is."""
    data = torch.empty(nbytes // 4, device=rank.device)
    size, wrong = AT_A_TIME[data.device.type], []

    def numbers(index: int, part: Tensor) -> Tensor:
        """Of a rank, so small that float32 holds the sum of thousands of ranks."""
        positions = torch.arange(part.storage_offset(), part.storage_offset() + len(part), device=data.device)
        return (positions + 3 * index).remainder_(PERIOD).float()

    with rank.phase(f"all_reduce of {nbytes:,} bytes, exactly"):
        for part in torch.split(data, size):
            part.copy_(numbers(rank.index, part))
        wait(COLLECTIVES["all_reduce"].launch(rank.group, data, data))
        for number, part in enumerate(torch.split(data, size)):
            expected = torch.zeros_like(part)
            for index in range(rank.size):
                expected += numbers(index, part)
            if text := wrong_elements(part, expected):
                wrong.append(f"part {number}: {text}")
    return "; ".join(wrong[:SHOWN])


class Repeated:
    """A collective of exact numbers: as many as keep all links busy, or `count`. `wrong`: how many, on the device."""

    def __init__(self, rank: Rank, name: str, group: ProcessGroup, stream: Stream, count: int = 0) -> None:
        self.name, collective, n, add = name, COLLECTIVES[name], rank.size, OPERATIONS["sum"]
        self.stream, self.count = stream, bounded(count or LARGE[rank.device.type], n)
        empty = partial(torch.empty, device=rank.device)
        total, in_place = collective.total(self.count, n), collective.in_place == "always"
        self.input, self.output = collective.buffers(total, n, rank.index, in_place, empty)
        numbers = whole_numbers(add, self.input.numel(), n, torch.float32, rank.device)
        expected = collective.expected(numbers, rank.index, 0, add.combine)
        assert expected is not None
        self.mine, self.expected = numbers[rank.index].float(), expected.float()
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.start = partial(collective.launch, group, self.output, self.input)

    def launch(self) -> None:
        with torch.cuda.stream(self.stream):
            self.output.zero_()  # what was right the last time; in place it is the input too
            self.input.copy_(self.mine)
            self.works = self.start()

    def compare(self) -> Tensor:
        """How many elements are wrong this time."""
        with torch.cuda.stream(self.stream):
            wait(self.works)  # on a GPU it is the stream that waits
            wrong = (self.output != self.expected).sum()
            self.wrong += wrong
            return wrong

    def once(self) -> Tensor:
        self.launch()
        return self.compare()


class Kept(NamedTuple):
    """`trouble`: "" if every element of every result was exactly right. `nbytes`: S of all together."""

    times: int
    trouble: str
    seconds: float
    nbytes: int


def stays_exact(rank: Rank, duration: float, name: str = "all_reduce") -> Kept:
    """A collective of one large tensor of float32 again and again for about `duration` seconds."""
    job = Repeated(rank, name, rank.group, current_stream(rank.device))
    with rank.phase(f"{name}, repeated"):
        seconds(rank, job.once, 1)
        times = agree(rank, max(1, int(duration / seconds(rank, job.once, 3))))
        wrong = torch.zeros(1 + times, dtype=torch.int64, device=rank.device)
        wrong[0] = job.wrong  # of those that only took time
        began = time.monotonic()
        for number in range(1, 1 + times):
            wrong[number] = job.once()
        bad = wrong.nonzero().flatten().tolist()
        taken = time.monotonic() - began
    where = ", ".join(f"number {i:,} ({int(wrong[i]):,} elements)" for i in bad[:SHOWN])
    text = f"{len(bad):,} of {times:,} results of {job.count:,} elements are wrong: {where}" if bad else ""
    return Kept(times, text, taken, times * job.count * job.mine.element_size())


def two_at_once(rank: Rank) -> str:
    """What is wrong on this rank of an all_reduce and an all_gather at once, in groups and on streams of their own."""
    second = dist.new_group(dist.get_process_group_ranks(rank.group), timeout=TIMEOUT)
    assert isinstance(second, ProcessGroup)  # else this rank is no member
    groups = {"all_reduce": rank.group, "all_gather": second}
    jobs = [Repeated(rank, name, group, own_stream(rank.device)) for name, group in groups.items()]
    synchronize(rank)  # the data are there before other streams use them
    with rank.phase("all_reduce and all_gather at once"):
        for _ in range(10):
            for job in jobs:
                job.launch()
            for job in jobs:
                job.compare()
        synchronize(rank)
        wrong = [f"{job.name}: {count:,} wrong elements" for job in jobs if (count := int(job.wrong.item()))]
    dist.destroy_process_group(second)
    return ", ".join(wrong)
