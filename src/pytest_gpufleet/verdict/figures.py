"""What one run measured, by what it is: the same figure can be found again in another run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_gpufleet.probes.reading import Condition, Metric
from pytest_gpufleet.verdict.finding import Finding


@dataclass(frozen=True)
class Figure:
    """A metric under conditions; the places that it has a value for are another matter."""

    name: str
    conditions: tuple[tuple[str, Condition], ...]
    # Not part of what makes two figures the same: a later version may word it otherwise.
    metric: Metric = field(compare=False)

    def worst(self, values: Iterable[float]) -> float:
        """NaN is worse than any number."""
        sign = 1 if self.metric.better == "higher" else -1
        return min(values, key=lambda value: -math.inf if math.isnan(value) else sign * value)


def figures(findings: Iterable[Finding]) -> dict[Figure, dict[str, float]]:
    """Each figure and its value for every place, in the order of the findings; the worst one if it was measured twice.

    How far samples spread is left out: it says how good a figure is and is none itself.
    """
    result: dict[Figure, dict[str, float]] = {}
    for finding in findings:
        measurement = finding.measurement
        if measurement.metric == "spread":
            continue
        conditions = tuple(sorted(measurement.conditions.items()))
        figure = Figure(measurement.metric, conditions, measurement.definition)
        values = result.setdefault(figure, {})
        for place, value in measurement.values.items():
            values[place] = figure.worst((value, values.get(place, value)))
    return result
