"""How much of what GPUs can do at best training makes use of, and what its time is spent on.

Model FLOPs utilization (MFU) as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the operations that a
model needs for the tokens of a second, of those that the GPUs can do in one. Figures are in tokens/s, of one GPU or of
all that train together.
"""

from __future__ import annotations

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.verdict import peaks
from pytest_gpufleet.verdict.peaks import NoPeak

# Products in FP8, of those in 16 bits, by the papers that peaks.py names: H100 1,979 TFLOP/s and 989, L40S 733 and 362,
# B200 4,500 and 2,250.
TIMES_16_BITS = {"bf16": 1, "fp8": 2}
SPENT = 0.5  # of the time of a step, from which on it is known what it is spent on


def model_flops_utilization(tokens: Measurement, flop_a_token: float, topology: GpuTopology) -> list[Measurement]:
    """The MFU of each figure; none where a GPU's peak is not known, as in a rehearsal."""
    try:
        peak = _peaks(tokens, topology)
        details: dict[str, Condition] = {"peak": f"{next(iter(peak.values())):,.4g} TFLOP/s"}
        if told := _spent(tokens, flop_a_token, peak, topology):
            details["time of a step"] = told
    except NoPeak:
        return []
    values = {place: value * flop_a_token / (peak[place] * 1e12) for place, value in tokens.values.items()}
    return [Measurement("model_flops_utilization", values, tokens.conditions, details=details)]


def above_peak(tokens: Measurement, least_flop_a_token: float, topology: GpuTopology) -> list[Fault]:
    """Figures that are above what the GPUs can do, if a token takes so many operations at least."""
    try:
        peak = _peaks(tokens, topology)
    except NoPeak:
        return []
    return [
        Fault("above_peak", (place,), f"{value * least_flop_a_token / 1e12:,.4g} TFLOP/s of at most {peak[place]:,.4g}")
        for place, value in tokens.values.items()
        if value * least_flop_a_token > peak[place] * 1e12
    ]


def _peaks(tokens: Measurement, topology: GpuTopology) -> dict[Where, float]:
    """TFLOP/s of the GPUs behind each figure."""
    recipe = str(tokens.conditions.get("recipe"))
    if recipe not in TIMES_16_BITS:
        raise NoPeak(f"no peak is known for training in {recipe}")
    known = {place: _gpus(place, topology) for place in tokens.values}
    return {
        place: TIMES_16_BITS[recipe] * sum(peaks.product_rate(gpu).value for gpu in gpus)
        for place, gpus in known.items()
    }


def _gpus(place: Where, topology: GpuTopology) -> list[Gpu]:
    gpus = [gpu for gpu in topology.gpus if place == WORLD or gpu.place in place.parts]
    if not gpus:
        raise NoPeak("it is not of this machine's GPUs")
    return gpus


def _spent(tokens: Measurement, flop_a_token: float, peak: dict[Where, float], topology: GpuTopology) -> str:
    """What the slowest GPU spends a step on, by what the figure's probe counted: how much of it its products take at
    their peak, and how much what other operations read and write at that of its memory; "" where nothing was counted.
    """
    moved = tokens.details.get("bytes_a_token")
    if not isinstance(moved, int):
        return ""
    place, rate = min(tokens.values.items(), key=lambda each: each[1])
    products = rate * flop_a_token / (peak[place] * 1e12)
    bandwidth = sum(peaks.memory_bandwidth(gpu).value for gpu in _gpus(place, topology))
    memory = rate * moved / (bandwidth * 1e9)
    told = f"products at their peak {products:.0%}, what else is read and written at that of memory {memory:.0%}"
    if products + memory < SPENT:
        return f"{told}: most of it is spent elsewhere, as by a host that launches too slowly"
    return f"{told}: bound by {'products' if products >= memory else 'memory'}"
