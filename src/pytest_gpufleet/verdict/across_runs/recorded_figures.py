"""What one run measured, by what it is: the same figure can be found again in another run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import Measurement, goodness
from pytest_gpufleet.model.metric import Condition, Metric
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.model.record import Record

GpuIds = tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A metric under conditions; the places that it has a value for are another matter."""

    name: str
    conditions: tuple[tuple[str, Condition], ...]
    # Not part of what makes two figures the same: a later version may word it otherwise.
    metric: Metric = field(compare=False)

    def worst(self, values: Iterable[float]) -> float:
        """NaN is worse than any number."""
        return min(values, key=lambda value: goodness(value, self.metric))

    def share(self, difference: float, reference: float) -> float:
        """A difference as a fraction of what it is held against.

        Of a ratio it is the difference itself: a ratio is a fraction already, and can be next to nothing, like the
        share of communication.
        """
        return difference if self.metric.unit == "ratio" else difference / abs(reference) if reference else math.nan


def figure_of(measurement: Measurement) -> Figure:
    return Figure(measurement.metric, tuple(sorted(measurement.conditions.items())), measurement.definition)


def held_to_limits(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings that the suite holds against a limit, or would if there were one. What is only shown, like the
    bandwidth of small messages, is too unsteady for that."""
    return (finding for finding in findings if finding.required or finding.limit is not None)


def figures(findings: Iterable[Finding]) -> dict[Figure, dict[Where, float]]:
    """Each figure and its value for every place, in the order of the findings; the worst one if it was measured twice.

    How far samples spread is left out: it says how good a figure is and is none itself. So is what was measured again,
    since heavy load had held its GPU back.
    """
    result: dict[Figure, dict[Where, float]] = {}
    for finding in findings:
        measurement = finding.measurement
        if measurement.metric == "spread" or finding.again:
            continue
        figure = figure_of(measurement)
        values = result.setdefault(figure, {})
        for place, value in measurement.values.items():
            values[place] = figure.worst((value, values.get(place, value)))
    return result


def gpu_id(gpu: Gpu) -> str:
    """What stays a GPU's own wherever it is: its UUID, or its serial number; empty if it has none."""
    return gpu.get("uuid") or gpu.serial or ""


def whose(record: Record, figure: Figure, place: Where) -> GpuIds:
    """The GPUs that a figure is of: the one of a place, the two of a pair in their order, all of a node or of two, or
    all that did it together, sorted. Empty if one of them cannot be known again."""
    gpus = {gpu.place: gpu_id(gpu) for gpu in record.topology.gpus}
    if all(part.is_device for part in place.parts):
        ids = tuple(gpus.get(part, "") for part in place.parts)
    else:  # some of the GPUs are always the first ones
        nodes, ranks = {part.node for part in place.parts}, dict(figure.conditions).get("ranks")
        there = [known for at, known in gpus.items() if place == WORLD or at.node in nodes]
        ids = tuple(sorted(there[: ranks if isinstance(ranks, int) else None]))
    return ids if all(ids) else ()
