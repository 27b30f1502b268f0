"""Whether a GPU still held itself back when a figure was measured, from the heavy load of the checks before.

Such a figure says nothing about what it is for. If it misses, it is measured once more after a pause, and the second
one counts; both stay on record. One that misses while nothing held the GPU back is not measured again: whoever tries
until something passes has tested nothing. Nor are figures whose own work is the heavy load, like matrix products: a GPU
that is slow once it is hot is what they are to find.
"""

from __future__ import annotations

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import GpuState
from pytest_gpufleet.model.place import Where

# The GPU begins to slow itself down at the temperature that NVML calls its slowdown, and does at its power limit. On a
# healthy H200 these are 89 C and 700 W; the hottest that was recorded had 67 C, and 480 W while its memory was copied.
NEAR_KELVIN = 10.0
AT_LIMIT = 0.95
OWN_LOAD = (
    "gemm", "gemm_relative", "soak_temperature", "soak_clock", "soak_power", "burn_power", "burn_retention",
    "step_power", "power_swing", "step_skew", "step_retention",
)  # fmt: skip


def held_back(finding: Finding, topology: GpuTopology) -> str:
    """What held GPUs back, by the temperatures and the power that stand beside a missed figure; empty if nothing did,
    or if nobody knows."""
    measurement = finding.measurement
    if finding.state != "missed" or measurement.metric in OWN_LOAD:
        return ""
    found = {at: _held_back(state, _of(at, topology)) for at, state in measurement.gpu_states.items()}
    blamed = {*finding.missed, *(finding.slower_than_peers or ())}
    return "; ".join(f"{at} had {what}" for at, what in found.items() if what and at in blamed)


def _of(where: Where, topology: GpuTopology) -> list[Gpu]:
    """The GPUs behind a place; all of them where they measured one thing together."""
    return [gpu for gpu in topology.gpus if gpu.place in where.parts] or list(topology.gpus)


def _held_back(state: GpuState, gpus: list[Gpu]) -> str:
    slowdowns = [(gpu.get("temperature_limits_c") or {}).get("slowdown") for gpu in gpus]
    celsius, watts = state.temperature_c or 0.0, state.power_watts or 0.0
    hot = [f"{celsius:g} C, and slows down at {each:g}" for each in slowdowns if each and celsius >= each - NEAR_KELVIN]
    full = [
        f"{watts:g} W of {each:g}"
        for each in (gpu.power_limit_watts for gpu in gpus)
        if each and watts >= AT_LIMIT * each
    ]
    return " and ".join([*hot[:1], *full[:1]])
