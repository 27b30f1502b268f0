"""The burn-in as the controller sees it: turn after turn on all ranks, the first trouble ends it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from statistics import median

from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import WORLD, Condition
from pytest_gpufleet.probes import burn_load
from pytest_gpufleet.probes.compute.corruption import dissenters
from pytest_gpufleet.world.world import World

ROUND_SECONDS = 30.0
ROUNDS = 10  # at least: the last tenth is compared with the first

# What was done, seconds since the beginning, bytes of host memory of each process: the controller, then the ranks.
AfterTurn = Callable[[str, float, list[int]], None]


def burn_in(world: World, seconds: float, after_turn: AfterTurn) -> list[Measurement]:
    """Load all ranks of `world` for `seconds`, and give the rates of matrix products and how well rates were kept.

    `after_turn` is called after each turn and ends the burn-in if it raises. Raises AssertionError, which names the
    ranks, as soon as a result differs from the first in one bit.
    """
    _no_trouble(world, "preparing", dissenters(world.run(burn_load.prepare)))
    round_seconds = min(ROUND_SECONDS, seconds / ROUNDS)
    turns: dict[str, list[list[burn_load.Turn]]] = {name: [] for name in burn_load.LOADS}
    began = time.monotonic()
    for name, load in itertools.cycle(burn_load.LOADS.items()):
        if time.monotonic() - began >= seconds and len(turns["training"]) >= 2:
            break
        results: list[burn_load.Turn] = world.run(burn_load.turn, name, load.share * round_seconds)
        turns[name].append(results)
        _no_trouble(world, name, {index: result.trouble for index, result in enumerate(results) if result.trouble})
        resident = [burn_load.resident_bytes(), *(result.resident_bytes for result in results)]
        after_turn(name, time.monotonic() - began, resident)
    world.run(burn_load.put_away)
    products = _by_place(world, turns["matrix products"])
    training = {WORLD: [min(result.rate for result in results) for results in turns["training"]]}
    return [
        _sustained(products, world.size, seconds),
        _retention("matrix products", products),
        _retention("training", training),
    ]


def _no_trouble(world: World, what: str, troubles: dict[int, str]) -> None:
    lines = [f"{world.name_of(index)}: {trouble}" for index, trouble in troubles.items()]
    if lines:
        raise AssertionError("\n".join([f"burn-in, {what}:", *lines]))


def _by_place(world: World, turns: Sequence[Sequence[burn_load.Turn]]) -> dict[str, list[float]]:
    return {place: [results[index].rate for results in turns] for index, place in enumerate(world.places)}


def _sustained(rates: dict[str, list[float]], ranks: int, seconds: float) -> Measurement:
    """The rate of each GPU over the whole burn-in, for comparison with its peers."""
    conditions: dict[str, Condition] = {"work": "burn-in", "seconds": round(seconds), "ranks": ranks}
    samples = {place: tuple(each) for place, each in rates.items()}
    return Measurement("gemm", {place: median(each) for place, each in rates.items()}, conditions, samples)


def _retention(work: str, rates: dict[str, list[float]]) -> Measurement:
    """The rate in the last tenth of the turns over that in the first tenth after the first turn, which warms up."""
    values = {}
    for place, each in rates.items():
        steady = each[1:]
        tenth = max(1, math.ceil(len(steady) / 10))
        values[place] = median(steady[-tenth:]) / median(steady[:tenth])
    return Measurement("burn_retention", values, {"work": work})


def peak_power(world: World, watts: Sequence[float]) -> Measurement:
    """The highest power that telemetry saw, of each GPU's limit."""
    # Without any sample there are no watts, and then nothing was measured.
    pairs = zip(world.gpus, watts, strict=True) if watts else ()
    values = {gpu.place: high / (gpu.power_limit_watts or math.nan) for gpu, high in pairs}
    return Measurement("burn_peak_power", values, {})
