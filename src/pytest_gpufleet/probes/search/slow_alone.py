"""Whether GPUs whose matrix products are slow while all work are slow alone too."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.probes.compute.rate import product_rate
from pytest_gpufleet.probes.measure import measure
from pytest_gpufleet.world.world import World

NOISE = 0.04  # by so much healthy H200 of one board differ at their power limit


def one_at_a_time(world: World, all_at_once: Measurement) -> Measurement:
    """The rates of the slowest and of the fastest GPU of a measurement, each while all others rest."""
    by_rate = sorted(range(world.size), key=lambda index: all_at_once.values[world.places[index]])
    precision = all_at_once.conditions["precision"]
    slow, fast = (measure(world.subset([index]), product_rate, precision) for index in (by_rate[0], by_rate[-1]))
    return replace(
        slow,
        values={**slow.values, **fast.values},
        samples={**slow.samples, **fast.samples},
        gpu_states={**slow.gpu_states, **fast.gpu_states},
    )


def why_slow(all_at_once: Measurement, alone: Measurement) -> Fault:
    """What it means for the slowest GPU of `all_at_once` what it and the fastest one reach alone."""
    (slow, slow_alone), (_, fast_alone) = alone.values.items()
    among_all, fastest = all_at_once.values[slow], max(all_at_once.values.values())
    figures = f"{slow_alone:.4g} {alone.unit} alone and {among_all:.4g} while all GPUs work"
    behind, behind_alone = 1 - among_all / fastest, 1 - slow_alone / fast_alone
    if behind > NOISE and behind_alone > behind / 2:
        return Fault(
            "slower_than_peers", (slow,), f"it is slow by itself: {figures}, the fastest {fast_alone:.4g} alone"
        )
    if slow_alone > among_all * (1 + NOISE):
        what = f"only while all GPUs work, which share power supplies and cooling: the slowest reaches {figures}"
        return Fault("cause_unclear", (), what)
    what = f"no faster while all others rest, so that driver, clocks or power limit are to be looked at: {figures}"
    return Fault("cause_unclear", (), what)
