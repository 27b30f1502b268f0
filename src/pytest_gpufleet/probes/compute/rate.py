"""Matrix multiplication (matmul): at which precisions, and how fast.

The rate is measured as mamf-finder does (stas00/ml-engineering): random normal operands, since zeros draw less power
and run faster; the second operand is stored by columns, as a linear layer holds its weights; 2mnk operations a matmul.
Unlike there it is one shape on all GPUs, so that peers and runs are compared by the same work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from torch import Tensor

from pytest_gpufleet.machine.health import POWER_CAP
from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import GpuState, Measurement, Reading
from pytest_gpufleet.model.place import ARCHITECTURES, BF16_SINCE, FP8_SINCE, TF32_SINCE, Capability, Gpu, Where
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.probes.timing import calls_in, parts, seconds_each, warm_up
from pytest_gpufleet.world.world import Rank, World


@contextmanager
def matmul_in_tf32(allowed: bool) -> Iterator[None]:
    """For this block. Convolutions have a switch of their own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


Shape = tuple[int, int, int]  # m, n, k of an m x k matrix times a k x n matrix

# The power controller of an H200 swings by some per cent within a second: a window holds several of its swings. As much
# load of the same kind comes before it: an H200 needs some seconds until its clock has settled at the power limit.
WINDOW_SECONDS = {"cuda": 4.5, "cpu": 0.02}
PARTS = 8


@dataclass(frozen=True)
class Precision:
    """A way to multiply, and the shape of its matmuls. `since`: the first compute capability."""

    dtype: torch.dtype
    shape: Shape
    since: Capability = (0, 0)
    tf32: bool = False


# One shape for all models: so many tiles that on 40 SMs or on 200 the last round of them costs little, so large that
# comparing a result costs a few per cent of computing it, and small enough for a GPU with 8 GB and 4 TFLOP/s.
PRECISIONS = {
    "fp64": Precision(torch.float64, (4096, 4096, 4096)),
    "fp32": Precision(torch.float32, (8192, 8192, 8192)),
    "tf32": Precision(torch.float32, (8192, 8192, 8192), since=TF32_SINCE, tf32=True),
    "fp16": Precision(torch.float16, (8192, 8192, 16384)),
    "bf16": Precision(torch.bfloat16, (8192, 8192, 16384), since=BF16_SINCE),
    "fp8": Precision(torch.float8_e4m3fn, (8192, 8192, 16384), since=FP8_SINCE),
}
REHEARSED = ("fp64", "fp32", "fp16", "bf16")


def lacking(precision: str, device: torch.device) -> str:
    """Why a device does not have this precision; "" if it has."""
    if device.type == "cpu":
        return "" if precision in REHEARSED else "this precision needs a GPU"
    capability, since = torch.cuda.get_device_capability(device), PRECISIONS[precision].since
    if capability < since:
        return f"{precision} came with compute capability {since[0]}.{since[1]}"
    if precision == "fp64" and capability in ARCHITECTURES and not ARCHITECTURES[capability].fp64:
        return "this GPU model has hardly any fp64 units"
    if precision == "fp8" and torch.__version__ < "2.5":
        return "torch multiplies fp8 from version 2.5 on"
    return ""


def usual_precision(gpus: Iterable[Gpu]) -> str:
    """Of training and of published figures."""
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability]
    return "bf16" if all(each >= BF16_SINCE for each in capabilities) else "fp16"


def heaviest(device: torch.device) -> str:
    """Tensor cores draw the most power."""
    return next(name for name in ("bf16", "fp16", "fp32") if not lacking(name, device))


def must_have(precision: str, device: torch.device) -> None:
    if reason := lacking(precision, device):
        not_applicable(reason)


def operands(precision: str, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random normal, m x k and k x n, the same bits on every device of one model."""
    (m, n, k), dtype = shape, PRECISIONS[precision].dtype
    # Made on the device: on the CPU it takes seconds. The generator counts, so equal devices make equal numbers.
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = (torch.randn(side, k, generator=generator, dtype=drawn, device=device).to(dtype) for side in (m, n))
    return a, b.t()


def multiplication(precision: str, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """What computes a @ b each time it is called, within `strictly(precision)`. The result has the type of the
    operands, for fp8 bf16, without the faster and less exact sums (use_fast_accum) that only forward passes use."""
    if PRECISIONS[precision].dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(a, b)


def strictly(precision: str) -> AbstractContextManager[None]:
    """Multiply fp32 in fp32, and only "tf32" in TF32."""
    return matmul_in_tf32(PRECISIONS[precision].tf32)


def shape_on(device: torch.device, precision: str) -> Shape:
    return PRECISIONS[precision].shape if device.type == "cuda" else (64, 96, 128)


def precisions_of(rank: Rank) -> list[str]:
    return [precision for precision in PRECISIONS if not lacking(precision, rank.device)]


def relative_rate(rates: Sequence[Measurement]) -> Measurement:
    """The mean of a GPU's rates at all precisions, each as a part of the fastest's, and of its temperatures."""
    values, states = dict[Where, float](), dict[Where, GpuState]()
    for place in rates[0].values:
        parts = (rate.values[place] / most if (most := max(rate.values.values())) else 0.0 for rate in rates)
        known = (rate.gpu_states[place].temperature_c for rate in rates if place in rate.gpu_states)
        values[place], celsius = fmean(parts), [each for each in known if each is not None]
        states |= {place: GpuState(fmean(celsius))} if celsius else {}
    details = {"precisions": ", ".join(str(rate.conditions["precision"]) for rate in rates)}
    return Measurement("gemm_relative", values, {"at_once": "all"}, details=details, gpu_states=states)


# Below the power limit. fp32 without tensor cores on zeros drew 433 to 443 of 700 W: the clock stayed at its highest,
# and an H100 and an H200, both with 132 multiprocessors at 1,980 MHz, gave 51.04 and 51.03 TFLOP/s, within 0.06 %.
# Tensor cores were held by the power cap at 435 W, and on random numbers the two differed by 2.2 % (2026-11-23).
FULL_CLOCK_SECONDS = {"cuda": 0.35, "cpu": 0.0}
SETTLED_SECONDS = {"cuda": 0.3, "cpu": 0.0}
ALIKE = 0.003  # by so much rates and clocks of healthy ones differ at most


def rate_at_full_clock(rank: Rank) -> tuple[Reading, bool]:
    """TFLOP/s of matmuls of zeros, which take little power: the median of windows, each of the median of single calls,
    of which one that was disturbed does not count. And whether the driver's power cap held the clock even so."""
    kind, (m, n, k) = rank.device.type, shape_on(rank.device, "fp32")
    with strictly("fp32"), rank.phase(f"fp32 matmul of zeros, {m} x {n} x {k}"):
        a, b = (torch.zeros(side, k, device=rank.device) for side in (m, n))
        work = multiplication("fp32", a, b.t())
        seconds_each(rank.device, work, 1)  # the first call may load or choose a kernel
        warm_up(rank.device, work, SETTLED_SECONDS[kind])
        calls = calls_in(rank.device, work, FULL_CLOCK_SECONDS[kind])
        with Watch(rank.gpu) as watch:
            windows = [parts(rank.device, work, 1, calls) for _ in range(3)]
    rates = tuple(2 * m * n * k / median(each) / 1e12 for each in windows)
    conditions = {"precision": "fp32", "at_once": "all" if rank.size > 1 else "one"}
    details = {"shape": f"{m} x {n} x {k}", "operands": "zeros"}
    reading = Reading("gemm_full_clock", median(rates), conditions, rates, None, details, watch.state())
    return reading, watch.held_by(POWER_CAP)


def full_clock_rates(world: World) -> Measurement:
    """The same of all ranks; a condition says whether the power cap holds half of the GPUs or more."""
    every = world.run(rate_at_full_clock)
    at_limit = 2 * sum(held for _, held in every) >= len(every)
    readings = [replace(each, conditions={**each.conditions, "at_power_limit": at_limit}) for each, _ in every]
    return together(world, [[each] for each in readings])[0]


def why_below_full_clock(measured: Measurement, gpus: Sequence[Gpu]) -> str | list[Fault]:
    """Whether those that are slow were held at a lower clock than the fastest of their model, or do less in a clock."""
    clocks = {at: state.sm_clock_mhz for at, state in measured.gpu_states.items() if state.sm_clock_mhz}
    models, faults, alike = dict[Where, str]((gpu.place, gpu.name) for gpu in gpus), list[Fault](), True
    for at, value in measured.values.items():
        like = (other for other in measured.values if models.get(other) == models.get(at))
        fastest = max(like, key=measured.values.__getitem__)
        if (behind := 1 - value / measured.values[fastest]) < ALIKE:
            continue
        alike = False
        if usual := clocks.get(fastest):
            clock = clocks.get(at, usual)
            what = f"at {clock:,.0f} MHz it does {behind:.1%} less than the fastest: multiprocessors or the L2 are slow"
            if 1 - clock / usual > behind / 2:
                what = f"its SM clock was {clock:,.0f} MHz, that of the fastest {usual:,.0f}: something holds it down"
            faults.append(Fault("slower_than_peers", (at,), what))
    shown = ", ".join(sorted({f"{clock:,.0f}" for clock in clocks.values()}))
    return faults or (f"all alike, at {shown} MHz" if shown and alike else "")
