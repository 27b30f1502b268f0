"""A GPU under matrix products until it is warm, one precision after the other: whether it computes the same bits again
and again, how fast, and what it is like at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpufleet.hardware.telemetry import Watch
from pytest_gpufleet.model.measurement import GpuState, Measurement, Reading
from pytest_gpufleet.probes.compute.corruption import Repetition, repeat_product
from pytest_gpufleet.probes.compute.rate import WINDOW_SECONDS, must_have, product_rate
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

# Of products alone, between those that are compared and the window: after a pause of 0.3 s an H200 was up to 8 %
# faster, and after 1.5 s of work within 3 % of what it settled at.
SETTLING_SECONDS = {"cuda": 1.5, "cpu": 0.0}
FIGURES = {"soak_temperature": "temperature_c", "soak_clock": "sm_clock_mhz", "soak_power": "power_watts"}


@dataclass(frozen=True)
class Turn:
    """What one rank did at one precision. `state`: of its GPU through all of it."""

    repetition: Repetition
    rate: Reading
    state: GpuState | None


def soak_turn(rank: Rank, precision: str, seconds: float) -> Turn:
    """Compute products at one precision for `seconds` without a rest: first the same one again and again, compared bit
    for bit, which warms the GPU up; then the window of `product_rate`."""
    must_have(precision, rank.device)
    settling = SETTLING_SECONDS[rank.device.type]
    with Watch(rank.gpu) as watch:
        repetition = repeat_product(rank, precision, seconds - settling - WINDOW_SECONDS[rank.device.type])
        rate = product_rate(rank, precision, lead_in=settling)
    return Turn(repetition, rate, watch.state)


def rate_of(world: World, turns: Sequence[Turn]) -> Measurement:
    """How fast the ranks of a world were in a turn."""
    (rate,) = together(world, [[turn.rate] for turn in turns])
    return rate


def soak_figures(world: World, last: Sequence[Turn]) -> list[Measurement]:
    """Temperature (C), SM clock (MHz) and power (W) of each GPU in the last turn, as far as NVML tells them."""
    states = {place: turn.state for place, turn in zip(world.places, last, strict=True) if turn.state}
    told = {
        metric: {place: getattr(state, reading) for place, state in states.items()}
        for metric, reading in FIGURES.items()
    }
    return [
        Measurement(metric, {place: value for place, value in values.items() if value is not None}, {})
        for metric, values in told.items()
    ]
