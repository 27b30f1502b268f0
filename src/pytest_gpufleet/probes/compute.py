"""Matrix products: how fast a GPU computes them, and whether it always computes the same.

The rate is measured as mamf-finder does (stas00/ml-engineering): random normal operands, since zeros draw less power
and run faster; the second operand is stored by columns, as a linear layer holds its weights; 2mnk operations a product;
several shapes, because none is the fastest on every GPU model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from pytest_gpufleet.probes.device_clock import samples, seconds_each, warm_up
from pytest_gpufleet.probes.reading import Metric, Reading
from pytest_gpufleet.world.outcomes import not_applicable
from pytest_gpufleet.world.rank import Rank

Shape = tuple[int, int, int]  # m, n, k of an m x k matrix times a k x n matrix

MEAN = Metric("gemm_mean", "TFLOP/s", "higher", "matrix product, mean over shapes")
BURST = Metric("gemm_burst", "TFLOP/s", "higher", "matrix product, first tenth of a second after rest")
BURST_PRODUCTS = 50
# At its power limit an H200 swings by 5 % within a second: samples of 0.2 s caught it at different points.
LONG = 3.0

# An H200 needs some seconds under full load until its clock has settled at the power limit.
WARM_UP_SECONDS = {"cuda": 2.5, "cpu": 0.0}
ROUND = 4  # products between two looks at what the comparisons say
SHOWN = 3  # wrong elements that are described


@dataclass(frozen=True)
class Precision:
    """A way to multiply. `shapes` are those of the rate, the fastest on most GPU models first; `repeated` is large
    enough that comparing a result costs a few per cent of computing it. `since`: the first compute capability."""

    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    repeated: Shape
    since: tuple[int, int] = (0, 0)
    tf32: bool = False


# Among the fastest of thirty on a sustained H200, which differ by 10 %.
_FP32 = ((8192, 8192, 8192), (4096, 4096, 4096), (4096, 4096, 8192))
_TF32 = ((8448, 8192, 8192), (5632, 6144, 8192), (4096, 4096, 8192))
_FP64 = ((8192, 8192, 4096), (5632, 6144, 4096), (8192, 4096, 2048))
_HALF = ((5632, 6144, 8192), (4096, 4096, 16384), (8192, 8192, 8192))
_FP8 = ((8192, 8192, 16384), (16384, 8192, 8192), (8192, 8192, 8192))

PRECISIONS = {
    "fp64": Precision(torch.float64, _FP64, (4096, 4096, 4096)),
    "fp32": Precision(torch.float32, _FP32, (8192, 8192, 8192)),
    "tf32": Precision(torch.float32, _TF32, (8192, 8192, 8192), since=(8, 0), tf32=True),
    "fp16": Precision(torch.float16, _HALF, (8192, 8192, 16384)),
    "bf16": Precision(torch.bfloat16, _HALF, (8192, 8192, 16384), since=(8, 0)),
    "fp8": Precision(torch.float8_e4m3fn, _FP8, (8192, 8192, 16384), since=(8, 9)),
}
REHEARSAL_SHAPES = ((64, 96, 128), (128, 64, 64))
REHEARSED = ("fp64", "fp32", "fp16", "bf16")
# Other models have a few fp64 units for compatibility only, at 1/32 or 1/64 of the fp32 rate.
FULL_FP64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lacking(precision: str, device: torch.device) -> str:
    """Why a device does not multiply at this precision; "" if it does."""
    if device.type == "cpu":
        return "" if precision in REHEARSED else f"{precision} needs a GPU"
    capability, since = torch.cuda.get_device_capability(device), PRECISIONS[precision].since
    if capability < since:
        return f"{precision} came with compute capability {since[0]}.{since[1]}"
    if precision == "fp64" and capability not in FULL_FP64:
        return "this GPU model has hardly any fp64 units"
    if precision == "fp8" and torch.__version__ < "2.5":
        return "torch multiplies fp8 from version 2.5 on"
    return ""


def operands(precision: str, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random normal operands, m x k and k x n, the same bits on every device of one model."""
    m, n, k = shape
    dtype = PRECISIONS[precision].dtype
    # Made on the device: on the CPU it takes seconds. The generator counts, so equal devices make equal numbers.
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    a = torch.randn(m, k, generator=generator, dtype=drawn, device=device).to(dtype)
    b = torch.randn(n, k, generator=generator, dtype=drawn, device=device).to(dtype)
    return a, b.t()


def multiplication(precision: str, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """What computes a @ b each time it is called; the result has the type of the operands, for fp8 bf16.

    Call it within `strictly(precision)`.
    """
    if PRECISIONS[precision].dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(a, b)


@contextmanager
def strictly(precision: str) -> Iterator[None]:
    """Multiply fp32 in fp32, and only "tf32" in TF32, whatever torch was told before."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = PRECISIONS[precision].tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def exact_product(rank: Rank, precision: str) -> str:
    """Multiply matrices of -1, 0 and 1, whose product every precision holds exactly; "" if every element is right,
    else how many are wrong and the first of them."""
    _must_have(precision, rank.device)
    generator = torch.Generator().manual_seed(0)
    # Sums of 256 terms: bf16 holds whole numbers up to 256.
    a, b = (torch.randint(-1, 2, (512, 256), generator=generator).double() for _ in range(2))
    expected = a @ b.t()
    on_device = [matrix.to(rank.device, torch.float32).to(PRECISIONS[precision].dtype) for matrix in (a, b)]
    with rank.phase(f"{precision} product"), strictly(precision):
        result = multiplication(precision, on_device[0], on_device[1].t())().cpu().double()
    wrong = result != expected
    first = [f"{_place(at)} is {result[at].item():g}, expected {expected[at].item():g}" for at in _first(wrong)]
    return f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong: {'; '.join(first)}" if first else ""


def product_rate(rank: Rank, precision: str, shapes: int | None = None) -> list[Reading]:
    """TFLOP/s of matrix products on every rank at the same time: of the fastest shape under load that lasts ("gemm",
    the one to judge), the mean over all shapes ("gemm_mean"), and of one shape before power and heat limit the clock
    ("gemm_burst"), which is what benchmarks that run for a tenth of a second report.

    `shapes`: only the first so many of the precision's shapes. Each is the median of three samples, after a warm-up;
    counts 2mnk operations a product. Not applicable where the GPU does not have the precision.
    """
    _must_have(precision, rank.device)
    table = PRECISIONS[precision].shapes if rank.device.type == "cuda" else REHEARSAL_SHAPES
    rates: dict[Shape, tuple[float, ...]] = {}
    burst = 0.0
    with strictly(precision):
        for shape in table[:shapes]:
            m, n, k = shape
            with rank.phase(f"{precision} product, {m} x {n} x {k}"):
                work = multiplication(precision, *operands(precision, shape, rank.device))
                if not rates:
                    seconds_each(rank.device, work, 3)  # the first call may load or choose a kernel
                    burst = 2 * m * n * k / seconds_each(rank.device, work, BURST_PRODUCTS) / 1e12
                    warm_up(rank.device, work, WARM_UP_SECONDS[rank.device.type])
                rates[shape] = tuple(2 * m * n * k / seconds / 1e12 for seconds in samples(rank.device, work, LONG))
    medians = {shape: median(each) for shape, each in rates.items()}
    best = max(medians, key=medians.__getitem__)
    conditions = {"precision": precision, "at_once": "all" if rank.size > 1 else "one"}
    return [
        Reading("gemm", medians[best], conditions, rates[best], details={"shape": " x ".join(map(str, best))}),
        Reading(MEAN, fmean(medians.values()), conditions, details={"shapes": len(medians)}),
        Reading(BURST, burst, conditions, details={"shape": " x ".join(map(str, table[0]))}),
    ]


class Repeated:
    """One product computed again and again, every result compared bit for bit with the first, on the device.

    Operands and first result stay on the device between runs, so one object serves a whole burn-in:

        work = Repeated(rank.device, "bf16")
        teraflops = work.run(seconds=60)    # as often as wanted; goes on after a wrong result
        assert not work.trouble

    `products` computed, `wrong` elements and `unlike` products (with at least one wrong element) count over all runs.
    Neither NaN nor infinity passes: results are compared as bits, and the first must be finite. What the first result
    should have been only other devices know: compare `sums`.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        self.shape = PRECISIONS[precision].repeated if device.type == "cuda" else REHEARSAL_SHAPES[0]
        self.precision = precision
        self.products, self.wrong, self.unlike = 1, 0, 0
        self._descriptions: list[str] = []
        self._multiply = multiplication(precision, *operands(precision, self.shape, device))
        with strictly(precision):
            self._first = self._multiply()
        self._not_finite = int((~self._first.isfinite()).sum())

    def run(self, seconds: float) -> float:
        """Multiply for `seconds`, at least one round; TFLOP/s including the comparisons, which cost a few per cent."""
        began, before = time.perf_counter(), self.products
        with strictly(self.precision):
            while True:
                results = [self._multiply() for _ in range(ROUND)]
                # Eight bytes at a time, one answer for the round: little traffic and no waiting between products.
                if torch.stack([(_words(result) != _words(self._first)).any() for result in results]).any():
                    self._examine(results)
                self.products += ROUND
                elapsed = time.perf_counter() - began
                if elapsed >= seconds:
                    break
        m, n, k = self.shape
        return 2 * m * n * k * (self.products - before) / elapsed / 1e12

    @property
    def trouble(self) -> str:
        """What was wrong, in one line; "" if nothing was."""
        parts = []
        if self._not_finite:
            parts.append(f"NaN or infinite elements in the first product: {self._not_finite:,}")
        if self.wrong:
            parts.append(f"wrong elements: {self.wrong:,}, in {self.unlike:,} of {self.products:,} equal products")
            parts += self._descriptions
        return "; ".join(parts)

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        """Sums over the bits of each row and of each column of the first result, on the CPU: where two devices' sums
        differ, their results do."""
        bits = _bits(self._first)
        return bits.sum(1, dtype=torch.int64).cpu(), bits.sum(0, dtype=torch.int64).cpu()

    def _examine(self, results: list[Tensor]) -> None:
        expected = _bits(self._first)
        for number, result in enumerate(map(_bits, results), self.products + 1):
            wrong = result != expected
            if count := int(wrong.sum()):
                self.wrong += count
                self.unlike += 1
                for at in _first(wrong)[: SHOWN - len(self._descriptions)]:
                    found, wanted = _hexadecimal(result[at]), _hexadecimal(expected[at])
                    self._descriptions.append(f"product {number}, {_place(at)} is {found}, expected {wanted}")


@dataclass(frozen=True)
class Repetition:
    """What `repeat_product` saw on one rank. `kind`: devices of one kind must compute the same bits."""

    kind: str
    products: int
    teraflops: float
    trouble: str
    row_sums: Tensor
    column_sums: Tensor


def repeat_product(rank: Rank, precision: str, seconds: float) -> Repetition:
    """Compute one product for `seconds` and compare every result bit for bit with the first."""
    _must_have(precision, rank.device)
    with rank.phase(f"{precision} product, again and again"):
        work = Repeated(rank.device, precision)
        teraflops = work.run(seconds)
        return Repetition(kind(rank.device), work.products, teraflops, work.trouble, *work.sums)


def kind(device: torch.device) -> str:
    """What a device must share with another one for both to compute the same bits: cuBLAS promises that for GPUs of one
    architecture with the same number of SMs (cuBLAS documentation, "Results reproducibility")."""
    if device.type == "cpu":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs"


def dissenters(repetitions: Sequence[Repetition]) -> dict[int, str]:
    """The ranks whose first product is not the one that most ranks of their kind have, and how it differs.

    With two ranks of a kind nobody is the majority, and the higher one is named.
    """
    found = {}
    for alike in dict.fromkeys(each.kind for each in repetitions):
        ranks = [index for index, each in enumerate(repetitions) if each.kind == alike]
        keys = {index: _key(repetitions[index]) for index in ranks}
        usual, count = Counter(keys.values()).most_common(1)[0]
        reference = repetitions[next(index for index in ranks if keys[index] == usual)]
        doubt = "" if 2 * count > len(ranks) else "; nobody can say which is right"
        for index in ranks:
            if keys[index] != usual:
                rows = (repetitions[index].row_sums != reference.row_sums).nonzero().flatten()
                columns = (repetitions[index].column_sums != reference.column_sums).nonzero().flatten()
                found[index] = (
                    f"computes another product than {count} of {len(ranks)} ranks ({alike}) from the same data{doubt}: "
                    f"{_lines('row', rows)} and {_lines('column', columns)} differ"
                )
    return found


def _key(repetition: Repetition) -> bytes:
    return torch.cat([repetition.row_sums, repetition.column_sums]).numpy().tobytes()


def _lines(noun: str, which: Tensor) -> str:
    first = f" (the first is {int(which[0])})" if len(which) else ""
    return f"{len(which):,} {noun}{'' if len(which) == 1 else 's'}{first}"


def _must_have(precision: str, device: torch.device) -> None:
    if reason := lacking(precision, device):
        not_applicable(reason)


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _hexadecimal(element: Tensor) -> str:
    """An integer's bits: "0x3f80"."""
    digits = 2 * element.element_size()
    return f"0x{int(element) & (1 << 4 * digits) - 1:0{digits}x}"


def _first(wrong: Tensor) -> list[tuple[int, int]]:
    """Row and column of the first few true elements of a matrix."""
    columns = wrong.shape[1]
    return [(at // columns, at % columns) for at in wrong.flatten().nonzero().flatten()[:SHOWN].tolist()]


def _place(at: tuple[int, int]) -> str:
    return f"row {at[0]}, column {at[1]}"
