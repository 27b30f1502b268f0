"""How much of what GPUs can do at best training in 16 bits makes use of.

Model FLOPs utilization (MFU) as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the operations that a
model needs for the tokens of a second, of those that the GPUs can do in one. Figures are in tokens/s, of one GPU or of
all that train together.
"""

from __future__ import annotations

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.verdict import peaks
from pytest_gpufleet.verdict.peaks import NoPeak


def model_flops_utilization(tokens: Measurement, flop_a_token: float, topology: GpuTopology) -> list[Measurement]:
    """The MFU of each figure; none where a GPU's peak is not known, as in a rehearsal."""
    try:
        peak = _peaks(tokens, topology)
    except NoPeak:
        return []
    values = {place: value * flop_a_token / (peak[place] * 1e12) for place, value in tokens.values.items()}
    details = {"peak": f"{next(iter(peak.values())):,.4g} TFLOP/s"}
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
    known = {place: _gpus(place, topology) for place in tokens.values}
    return {place: sum(peaks.product_rate(gpu).value for gpu in gpus) for place, gpus in known.items()}


def _gpus(place: Where, topology: GpuTopology) -> list[Gpu]:
    gpus = [gpu for gpu in topology.gpus if place == WORLD or gpu.place in place.parts]
    if not gpus:
        raise NoPeak("it is not of this machine's GPUs")
    return gpus
