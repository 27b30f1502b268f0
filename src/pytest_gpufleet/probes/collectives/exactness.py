"""Whether collectives deliver exactly the right data.

The data are whole numbers that look random, differ by position and rank, and are such that what an operation makes of
them is exact in its type. A flipped, swapped, lost or doubled element changes the result, and every element must be
right (0 ULP).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from pytest_gpufleet.model.gpu import FP8_REDUCTIONS_SINCE
from pytest_gpufleet.probes.collectives.table import COLLECTIVES, type_name
from pytest_gpufleet.probes.timing import agree, seconds, synchronize, wait
from pytest_gpufleet.world.rank import TIMEOUT, Rank

# Every type that NCCL or Gloo knows, and up to which number it holds every whole number. (Complex tensors travel as
# pairs of floats.)
DTYPES = {
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
    torch.float32: 2**24,
    torch.float64: 2**53,
    torch.float8_e4m3fn: 2**4,
    torch.float8_e5m2: 2**3,
    torch.int8: 2**7 - 1,
    torch.uint8: 2**8 - 1,
    torch.int32: 2**31 - 1,
    torch.int64: 2**61,  # no more: the data are made in int64 and must not overflow on the way
    torch.bool: 1,
}

# One element, fewer than there are ranks, a power of two, and a number that fits no block.
COUNTS = {"cuda": (1, 3, 1 << 20, 1_000_003), "cpu": (1, 3, 1 << 14, 10_007)}
LARGE = {"cuda": 1 << 24, "cpu": 1 << 14}  # keeps all links busy
# That a rank makes of all ranks together: they are int64, and on 8 ranks LARGE takes as many. Of more ranks each has
# fewer, so that those of thousands fit into memory too.
MOST_NUMBERS = 1 << 27
SHOWN = 3

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


@dataclass(frozen=True)
class Operation:
    """A reduction, and numbers of which its result is exact.

    `combine` makes the result from stacked numbers of n ranks. Each rank's numbers stay below 1 / `headroom(n)` of what
    the type holds, and then go through `shape(numbers, n)`. `one_at_a_time`: of all ranks one has a number, and the
    others 1 or -1.
    """

    op: dist.ReduceOp.RedOpType
    combine: Callable[[Tensor], Tensor]
    headroom: Callable[[int], int] = lambda n: 1
    shape: Callable[[Tensor, int], Tensor] = lambda numbers, n: numbers
    one_at_a_time: bool = False


OPERATIONS = {
    "sum": Operation(dist.ReduceOp.SUM, lambda numbers: numbers.sum(0), headroom=lambda n: n),
    "max": Operation(dist.ReduceOp.MAX, lambda numbers: numbers.amax(0)),
    "min": Operation(dist.ReduceOp.MIN, lambda numbers: numbers.amin(0)),
    "prod": Operation(
        dist.ReduceOp.PRODUCT,
        # Not torch.prod, for which torch compiles a kernel of its own on a GPU: a second for each shape of its input.
        lambda numbers: reduce(torch.mul, numbers),
        one_at_a_time=True,
    ),
    # Multiples of n: their average is a whole number, whether one divides before or after adding up.
    "avg": Operation(
        dist.ReduceOp.AVG,
        lambda numbers: numbers.sum(0) // len(numbers),
        headroom=lambda n: n**2,
        shape=lambda numbers, n: numbers * n,
    ),
}
ANY = OPERATIONS["max"]  # for what reduces nothing: all numbers that the type holds

# Every collective, those that reduce with every operation.
KINDS = [(name, op) for name, each in COLLECTIVES.items() for op in (OPERATIONS if each.reduces else ("",))]


@dataclass(frozen=True)
class Case:
    """One exchange."""

    collective: str
    operation: str
    dtype: torch.dtype
    count: int  # of elements of S, rounded up to equal parts
    root: int | None  # None where all are alike
    in_place: bool
    strided: bool = False  # only every second element of a buffer belongs to the tensor

    def __str__(self) -> str:
        words = " ".join(filter(None, (self.collective, self.operation, type_name(self.dtype))))
        root = "" if self.root is None else f", root {self.root}"
        return f"{words}, {self.count:,} elements{root}, {'in' if self.in_place else 'out of'} place"


@dataclass(frozen=True)
class Delivery:
    """What one rank got: what was wrong, what the backend refused, and how many exchanges were right."""

    wrong: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    right: int = 0


class Refused(Exception):
    """The backend does not do this with this type."""


def exchange(
    rank: Rank,
    name: str,
    operation: str = "",
    dtypes: Sequence[torch.dtype] = tuple(DTYPES),
    strided: bool = False,
) -> Delivery:
    """Run a collective on data of every type and size, from the first, middle and last root, in place and out of place
    where torch has both. `strided`: with gaps in the buffers, which must stay as they are; the data are packed for the
    way, since the backends take tensors without gaps only (and some do not look)."""
    collective = COLLECTIVES[name]
    old_gloo = rank.device.type == "cpu" and TorchVersion(torch.__version__) < GLOO_ONLY_ADDS_BEFORE
    if old_gloo and name == "reduce_scatter" and operation != "sum":
        return Delivery(refused=(f"Gloo of torch before {GLOO_ONLY_ADDS_BEFORE} adds up, whatever the operation is",))
    roots = sorted({0, rank.size // 2, rank.size - 1}) if collective.rooted else [None]
    both = [False] if strided else [False, True]
    places = {"always": [True], "also": both, "never": [False]}[collective.in_place]
    wrong, refused, right = [], [], 0

    @lru_cache(maxsize=1)  # the same from every root, in place and out of place
    def numbers_of(count: int, dtype: torch.dtype) -> Tensor:
        return whole_numbers(OPERATIONS.get(operation, ANY), count, rank.size, dtype, rank.device)

    for dtype in dtypes:
        large = [LARGE[rank.device.type]] if dtype is torch.float32 else []
        counts = [bounded(count, rank.size) for count in (*COUNTS[rank.device.type], *large)]
        try:
            for count, root, in_place in itertools.product(counts, roots, places):
                case = Case(name, operation, dtype, count, root, in_place, strided)
                with rank.phase(str(case)):
                    fault = _fault(rank, case, numbers_of)
                if fault:
                    wrong.append(f"{case}: {fault}")
                else:
                    right += 1
        except Refused as reason:
            refused.append(f"{type_name(dtype)}: {reason}")
    return Delivery(tuple(wrong), tuple(refused), right)


def _fault(rank: Rank, case: Case, numbers_of: Callable[[int, torch.dtype], Tensor]) -> str:
    """ "" if every element of this rank's result is right, else how many are wrong and the first of them.
    `numbers_of(count, dtype)`: those of all ranks."""
    collective, dtype, n = COLLECTIVES[case.collective], case.dtype, rank.size
    operation = OPERATIONS.get(case.operation, ANY)
    on_gpu = rank.device.type == "cuda"
    if collective.reduces and _float8(dtype) and on_gpu and torch.cuda.get_device_capability() < FP8_REDUCTIONS_SINCE:
        raise Refused("NCCL adds float8 on later GPUs only")
    spaces: list[Tensor] = []

    def empty(count: int) -> Tensor:
        spaces.append(as_type(torch.ones(2 * count if case.strided else count, device=rank.device), dtype))
        return spaces[-1][::2] if case.strided else spaces[-1]

    input, output = collective.buffers(collective.total(case.count, n), n, rank.index, case.in_place, empty)
    numbers = numbers_of(input.numel(), dtype)
    input.copy_(as_type(numbers[rank.index], dtype))
    sent = input.contiguous()
    received = sent if case.in_place and case.strided else output.contiguous()
    try:
        wait(collective.launch(rank.group, received, sent, case.root or 0, operation.op))
    except (RuntimeError, TypeError, ValueError) as error:
        if any(words in str(error) for words in REFUSALS):
            raise Refused(str(error).splitlines()[0]) from None
        raise
    if case.strided:
        output.copy_(received)
        if any(bool(space[1::2].ne(1).any()) for space in spaces):
            return "elements beside the tensor were overwritten"
    expected = collective.expected(numbers, rank.index, case.root or 0, operation.combine)
    if expected is None:
        return ""
    # NCCL multiplies with 1 / n, which binary fractions hold exactly for powers of two only. nccl-tests allows 2 ULP.
    ulps = 2 if case.operation == "avg" and dtype.is_floating_point and n & (n - 1) else 0
    return wrong_elements(output, as_type(expected, dtype), ulps)


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
        rows.append(operation.shape(numbers, n))
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
    return numbers.float().to(dtype) if _float8(dtype) else numbers.to(dtype)


def _float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def wrong_elements(result: Tensor, expected: Tensor, ulps: int = 0) -> str:
    """How many elements are not equal (NaN never is), or more than `ulps` units in the last place off; the first."""
    if _float8(expected.dtype):
        result, expected = result.float(), expected.float()  # float8 cannot be compared
    wrong = result != expected
    if ulps:
        _, exponent = torch.frexp(expected.double())  # the fraction is in [0.5, 1)
        unit = torch.finfo(expected.dtype).eps * 2.0 ** (exponent - 1)
        wrong &= ~((result.double() - expected.double()).abs() <= ulps * unit)
    at = wrong.nonzero().flatten()
    if not len(at):
        return ""
    first = "; ".join(f"[{i}] is {result[i].item()}, expected {expected[i].item()}" for i in at[:SHOWN].tolist())
    return f"{len(at):,} of {len(expected):,} elements are wrong: {first}"


# The numbers repeat after so many elements: a prime, so that data moved by any block or chunk of NCCL's look different.
PERIOD = 251
AT_A_TIME = {"cuda": 1 << 26, "cpu": 1 << 12}  # elements that are made or compared; the data alone may fill half a GPU


def large_all_reduce(rank: Rank, nbytes: int) -> str:
    """What is wrong with an all_reduce of `nbytes` of float32, which takes them in memory once; "" if nothing is."""
    data = torch.empty(nbytes // 4, device=rank.device)
    with rank.phase(f"all_reduce of {nbytes:,} bytes, exactly"):
        for part, positions in _parts(data):
            part.copy_(_numbers(positions, rank.index))
        wait(COLLECTIVES["all_reduce"].launch(rank.group, data, data))
        wrong = []
        for number, (part, positions) in enumerate(_parts(data)):
            expected = torch.zeros_like(part)
            for index in range(rank.size):
                expected += _numbers(positions, index)
            if words := wrong_elements(part, expected):
                wrong.append(f"part {number}: {words}")
    return "; ".join(wrong[:SHOWN])


def _parts(data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The data part by part, with the position of each element."""
    begin = 0
    for part in torch.split(data, AT_A_TIME[data.device.type]):
        yield part, torch.arange(begin, begin + part.numel(), device=data.device)
        begin += part.numel()


def _numbers(positions: Tensor, index: int) -> Tensor:
    """Whole numbers of a rank, so small that float32 holds the sum of thousands of ranks."""
    return (positions + 3 * index).remainder_(PERIOD).float()


def addends(rank: Rank, count: int) -> tuple[Tensor, Tensor]:
    """So many numbers of this rank as float32, and the sums of those of all ranks, which are exact."""
    numbers = whole_numbers(OPERATIONS["sum"], count, rank.size, torch.float32, rank.device)
    return numbers[rank.index].float(), numbers.sum(0).float()


def stays_exact(rank: Rank, duration: float) -> tuple[int, str]:
    """all_reduce of one large tensor of float32 again and again for about `duration` seconds: how often it was done,
    and "" if every element of every result was exactly right."""
    count = bounded(LARGE[rank.device.type], rank.size)
    mine, expected = addends(rank, count)
    buffer = torch.empty_like(mine)

    def repeat() -> Tensor:
        buffer.copy_(mine)
        wait(COLLECTIVES["all_reduce"].launch(rank.group, buffer, buffer))
        return (buffer != expected).sum()

    with rank.phase("all_reduce, repeated"):
        seconds(rank, repeat, 1)
        times = agree(rank, max(1, int(duration / seconds(rank, repeat, 3))))
        wrong = torch.zeros(times, dtype=torch.int64, device=rank.device)
        for number in range(times):
            wrong[number] = repeat()
    bad = wrong.nonzero().flatten().tolist()
    if not bad:
        return times, ""
    where = ", ".join(f"number {i:,} ({int(wrong[i]):,} elements)" for i in bad[:SHOWN])
    return times, f"{len(bad):,} of {times:,} results of {count:,} elements are wrong: {where}"


def two_at_once(rank: Rank, times: int = 10) -> str:
    """all_reduce in one group and all_gather in another of the same ranks, each on a stream of its own, at the same
    time: what is wrong on this rank, "" if nothing is. All ranks of the world call it."""
    second = dist.new_group(dist.get_process_group_ranks(rank.group), timeout=TIMEOUT)
    assert isinstance(second, dist.ProcessGroup)  # else this rank is no member
    jobs = [_Job("all_reduce", rank.group, rank), _Job("all_gather", second, rank)]
    synchronize(rank)  # the data are there before other streams use them
    with rank.phase("all_reduce and all_gather at once"):
        for _ in range(times):
            for job in jobs:
                job.launch()
            for job in jobs:
                job.compare()
        synchronize(rank)
        wrong = [f"{job.name}: {count:,} wrong elements" for job in jobs if (count := int(job.wrong.item()))]
    dist.destroy_process_group(second)
    return ", ".join(wrong)


class _Job:
    """A collective that is run again and again on a stream of its own."""

    def __init__(self, name: str, members: dist.ProcessGroup, rank: Rank) -> None:
        self.name, collective, n, add = name, COLLECTIVES[name], rank.size, OPERATIONS["sum"]
        self.stream = torch.cuda.Stream() if rank.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        total = collective.total(bounded(LARGE[rank.device.type], n), n)
        empty = partial(torch.empty, device=rank.device)
        self.input, self.output = collective.buffers(total, n, rank.index, collective.in_place == "always", empty)
        numbers = whole_numbers(add, self.input.numel(), n, torch.float32, rank.device)
        expected = collective.expected(numbers, rank.index, 0, add.combine)
        assert expected is not None
        self.mine, self.expected = numbers[rank.index].float(), expected.float()
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.start = partial(collective.launch, members, self.output, self.input)

    def launch(self) -> None:
        with torch.cuda.stream(self.stream):
            self.input.copy_(self.mine)
            self.works = self.start()

    def compare(self) -> None:
        with torch.cuda.stream(self.stream):
            wait(self.works)  # on a GPU it is the stream that waits
            self.wrong += (self.output != self.expected).sum()
