"""A figure with everything that is needed to judge it later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpufleet.probes.reading import METRICS, WORLD, Condition, Metric, Reading
from pytest_gpufleet.world.world import World


@dataclass(frozen=True)
class Measurement:
    """A metric's value for every place, and the conditions it was measured under.

    `values` maps a place ("gpu3", "gpu0-gpu5", "node", "world") to a value in the metric's unit; `samples` holds the
    repetitions behind each value; `conditions` decide which limit applies; `details` are only shown.
    """

    metric: str
    values: Mapping[str, float]
    conditions: Mapping[str, Condition]
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    details: Mapping[str, Condition] = field(default_factory=dict)

    @property
    def definition(self) -> Metric:
        return METRICS[self.metric]

    @property
    def unit(self) -> str:
        return self.definition.unit

    @property
    def worst(self) -> tuple[str, float]:
        """The place that did worst, and its value."""
        pick = min if self.definition.better == "higher" else max
        return pick(self.values.items(), key=lambda item: item[1])

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        samples = {place: tuple(values) for place, values in data["samples"].items()}
        return cls(**{**data, "samples": samples})


def measure(world: World, probe: Callable[..., Reading], *args: Any, **kwargs: Any) -> Measurement:
    """Run a probe on every rank of a world and put the ranks' readings together.

    Readings for the place "world" are one figure that all ranks made together: the worst one counts, since a
    collective is as slow as its slowest rank. ValueError if the metric is unknown or ranks measured different things.
    """
    readings: list[Reading] = world.run(probe, *args, **kwargs)
    first = readings[0]
    if first.metric not in METRICS:
        raise ValueError(f"there is no metric {first.metric!r}; a Reading has one of {', '.join(METRICS)}")
    for index, reading in enumerate(readings):
        if (reading.metric, reading.conditions) != (first.metric, first.conditions):
            raise ValueError(
                f"{world.name_of(index)} measured {reading.metric} {dict(reading.conditions)}, "
                f"rank 0 {first.metric} {dict(first.conditions)}: a probe must measure the same thing on every rank"
            )
    if first.place == WORLD:
        pick = min if METRICS[first.metric].better == "higher" else max
        no_number = [reading for reading in readings if math.isnan(reading.value)]
        worst = pick(no_number or readings, key=lambda reading: reading.value)
        values, samples = {WORLD: worst.value}, {WORLD: worst.samples}
    else:
        values = {place: reading.value for place, reading in zip(world.places, readings, strict=True)}
        samples = {place: reading.samples for place, reading in zip(world.places, readings, strict=True)}
    return Measurement(first.metric, values, first.conditions, samples, first.details)


def scaling_efficiency(one: Measurement, many: Measurement) -> Measurement:
    """throughput(n) / (n x throughput(1)), both for the place "world" and measured in one run with one recipe."""
    ranks = many.conditions["ranks"]
    assert isinstance(ranks, int)
    ratio = many.values[WORLD] / (ranks * one.values[WORLD])
    return Measurement("scaling_efficiency", {WORLD: ratio}, many.conditions)
