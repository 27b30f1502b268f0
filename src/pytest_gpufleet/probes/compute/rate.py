"""Matrix products: at which precisions, and how fast.

The rate is measured as mamf-finder does (stas00/ml-engineering): random normal operands, since zeros draw less power
and run faster; the second operand is stored by columns, as a linear layer holds its weights; 2mnk operations a product;
several shapes, because none is the fastest on every GPU model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.probes.tf32 import products_in_tf32
from pytest_gpufleet.probes.timing.one_gpu import samples, seconds_each, warm_up
from pytest_gpufleet.world.rank import Rank

Shape = tuple[int, int, int]  # m, n, k of an m x k matrix times a k x n matrix

MEAN = Metric("gemm_mean", "TFLOP/s", "higher", "matrix product, mean over shapes")
BURST = Metric("gemm_burst", "TFLOP/s", "higher", "matrix product, first tenth of a second after rest")
BURST_SECONDS = 0.1
# At its power limit an H200 swings by 5 % within a second: samples of 0.2 s caught it at different points.
LONG = 3.0

# An H200 needs some seconds under full load until its clock has settled at the power limit.
WARM_UP_SECONDS = {"cuda": 2.5, "cpu": 0.0}


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


def must_have(precision: str, device: torch.device) -> None:
    """End the test as not applicable if a device does not multiply at this precision."""
    if reason := lacking(precision, device):
        not_applicable(reason)


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


def strictly(precision: str) -> AbstractContextManager[None]:
    """Multiply fp32 in fp32, and only "tf32" in TF32."""
    return products_in_tf32(PRECISIONS[precision].tf32)


def product_rate(rank: Rank, precision: str, shapes: int | None = None) -> list[Reading]:
    """TFLOP/s of matrix products on every rank at the same time: of the fastest shape under load that lasts ("gemm",
    the one to judge), the mean over all shapes ("gemm_mean"), and of one shape before power and heat limit the clock
    ("gemm_burst"), which is what benchmarks that run for a tenth of a second report.

    `shapes`: only the first so many of the precision's shapes. Each is the median of three samples, after a warm-up;
    counts 2mnk operations a product. Not applicable where the GPU does not have the precision.
    """
    must_have(precision, rank.device)
    table = PRECISIONS[precision].shapes if rank.device.type == "cuda" else REHEARSAL_SHAPES
    rates: dict[Shape, tuple[float, ...]] = {}
    burst = 0.0
    with strictly(precision):
        for shape in table[:shapes]:
            m, n, k = shape
            with rank.phase(f"{precision} product, {m} x {n} x {k}"):
                work = multiplication(precision, *operands(precision, shape, rank.device))
                if not rates:
                    seconds_each(rank.device, work, 1)  # the first call may load or choose a kernel
                    products = max(1, round(BURST_SECONDS / seconds_each(rank.device, work, 2)))
                    burst = 2 * m * n * k / seconds_each(rank.device, work, products) / 1e12
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
