"""Which figures are measured a second time. The second one counts; both stay on record.

A figure that missed while its GPU still held itself back, from the heavy load of the checks before, says nothing about
what it is for. Nor does one that met its limit by samples that differ: what the host did for a moment is no fault of a
GPU, and a fault that makes figures change from one sample to the next does so again. One that misses for no such reason
is not measured again: whoever tries until something passes has tested nothing. Nor are figures whose own work is the
heavy load, like matrix products: a GPU that is slow, or changes, once it is hot is what they are to find.

Of all that is measured again the second figure counts, also of what had met its limit at first and was measured
along with another: so nobody can choose between two, and one that misses then is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import GpuState
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.verdict.judgement import measured_again, unsteady

# The GPU begins to slow itself down at the temperature that NVML calls its slowdown, and does at its power limit. On a
# healthy H200 these are 89 C and 700 W; the hottest that was recorded had 67 C, and 480 W while its memory was copied.
NEAR_KELVIN = 10.0
AT_LIMIT = 0.95
OWN_LOAD = (
    "gemm", "gemm_relative", "soak_temperature", "soak_clock", "soak_power", "burn_power", "burn_retention",
    "step_power", "power_swing", "step_skew", "step_retention",
)  # fmt: skip

ALONG = "a figure that was measured with it had to be measured again"


def to_measure_again(findings: Sequence[Finding], topology: GpuTopology) -> list[Finding]:
    """The figures among them, if there is a reason to measure one again and none missed without; else none."""
    figures = [finding for finding in findings if finding.measurement.metric != "spread"]
    why = [why_again(each, topology) for each in figures]
    missed_without = any(each.state == "missed" and not reason for each, reason in zip(figures, why, strict=True))
    return figures if any(why) and not missed_without else []


def set_aside(first: Sequence[Finding], second: Sequence[Finding], topology: GpuTopology) -> list[Finding]:
    """The findings of a first measurement when the second is there: those of figures that are in both count no longer,
    and say why."""
    measured = [_figure(finding) for finding in second]
    return [
        measured_again(each, why_again(each, topology) or ALONG) if _figure(each) in measured else each
        for each in first
    ]


def _figure(finding: Finding) -> tuple[str, Mapping[str, object]]:
    return finding.measurement.metric, finding.measurement.conditions


def why_again(finding: Finding, topology: GpuTopology) -> str:
    """Why a figure is measured a second time; empty if it is not."""
    if finding.measurement.metric in OWN_LOAD:
        return ""
    if finding.state == "missed":
        return _held_back(finding, topology)
    if not (spread := unsteady(finding)):
        return ""
    return "; ".join(f"the samples of {at} differed by {spread.measurement.values[at]:.1%}" for at in spread.missed)


def _held_back(finding: Finding, topology: GpuTopology) -> str:
    """What held GPUs back, by the temperatures and the power that stand beside a missed figure; empty if nothing did,
    or if nobody knows."""
    measurement = finding.measurement
    found = {at: _reason_of(state, _of(at, topology)) for at, state in measurement.gpu_states.items()}
    blamed = {*finding.missed, *(finding.slower_than_peers or ())}
    return "; ".join(f"{at} had {what}" for at, what in found.items() if what and at in blamed)


def _of(where: Where, topology: GpuTopology) -> list[Gpu]:
    """The GPUs behind a place; all of them where they measured one thing together."""
    return [gpu for gpu in topology.gpus if gpu.place in where.parts] or list(topology.gpus)


def _reason_of(state: GpuState, gpus: list[Gpu]) -> str:
    slowdowns = [(gpu.get("temperature_limits_c") or {}).get("slowdown") for gpu in gpus]
    celsius, watts = state.temperature_c or 0.0, state.power_watts or 0.0
    hot = [f"{celsius:g} C, and slows down at {each:g}" for each in slowdowns if each and celsius >= each - NEAR_KELVIN]
    full = [
        f"{watts:g} W of {each:g}"
        for each in (gpu.power_limit_watts for gpu in gpus)
        if each and watts >= AT_LIMIT * each
    ]
    return " and ".join([*hot[:1], *full[:1]])
