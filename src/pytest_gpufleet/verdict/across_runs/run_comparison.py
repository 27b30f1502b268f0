"""Runs side by side: what each measured, by what it is, for one node over time or many nodes of one model."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.finding import Finding, that_count
from pytest_gpufleet.model.gpu import SOFTWARE
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.measurement import Measurement, goodness
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.fleet.equality import Difference, models, not_compared, other_bits

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

    def worse_by(self, value: float, reference: float) -> float:
        """By what fraction of what it is held against a value is worse, 1 of NaN; negative if it is better."""
        return 1.0 if math.isnan(value) else self.share(self.metric.sign * (reference - value), reference)


def figure_of(measurement: Measurement) -> Figure:
    return Figure(measurement.metric, tuple(sorted(measurement.conditions.items())), measurement.definition)


def held_to_limits(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings that the suite holds against a limit, or would if there were one. What is only shown, like the
    bandwidth of small messages, is too unsteady for that."""
    return (finding for finding in findings if finding.required or finding.limit is not None)


def to_compare(runs: Mapping[str, Record]) -> set[Figure]:
    return {figure for record in runs.values() for figure in figures(held_to_limits(record.findings))}


def figures(findings: Iterable[Finding]) -> dict[Figure, dict[Where, float]]:
    """Each figure that counts and its value for every place, in the order of the findings; the worst one if it was
    measured twice."""
    result: dict[Figure, dict[Where, float]] = {}
    for finding in that_count(findings):
        figure = figure_of(finding.measurement)
        values = result.setdefault(figure, {})
        for place, value in finding.measurement.values.items():
            values[place] = figure.worst((value, values.get(place, value)))
    return result


def whose(record: Record, figure: Figure, place: Where) -> GpuIds:
    """The GPUs that a figure is of: the one of a place, the two of a pair in their order, all of a node or of two, or
    all that did it together, sorted. Empty if one of them cannot be known again."""
    gpus = {gpu.place: gpu.lasting_id for gpu in record.topology.gpus}
    if all(part.is_device for part in place.parts):
        ids = tuple(gpus.get(part, "") for part in place.parts)
    else:  # some of the GPUs are always the first ones
        nodes, ranks = {part.node for part in place.parts}, dict(figure.conditions).get("ranks")
        there = [known for at, known in gpus.items() if place == WORLD or at.node in nodes]
        ids = tuple(sorted(there[: ranks if isinstance(ranks, int) else None]))
    return ids if all(ids) else ()


TOLERANCE = 0.03
SIGMAS = 3
MAD_TO_SIGMA = 1.4826  # of a normal distribution (Rousseeuw and Croux 1993)


@dataclass(frozen=True)
class Outlier:
    """A place of a run that is worse than the same place of the others, by a fraction of their median.

    A ratio is worse by the difference itself, NaN by 1. With two runs there is no median: `reference` is the value of
    the first.
    """

    run: str
    place: Where
    identity: str
    figure: Figure
    value: float
    reference: float
    worse: float


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of all runs. `worst`: for each run the place that did worst and its value, None if it has none.

    `median` and `spread` ((highest - lowest) / median) are over all places of all runs.
    """

    figure: Figure
    worst: tuple[tuple[Where, float] | None, ...]
    median: float
    spread: float
    outliers: int


@dataclass(frozen=True)
class RunComparison:
    """`notes` says what makes the runs hard to compare: other GPUs, other software, figures that only some have."""

    runs: Mapping[str, Record]
    notes: tuple[str, ...]
    rows: tuple[ComparedFigure, ...]
    outliers: tuple[Outlier, ...]  # the worst first
    other_bits: tuple[Difference, ...] = ()  # in the fingerprints of machines that must have the same


def compare(runs: Mapping[str, Record]) -> RunComparison:
    """Set two or more runs side by side, each known by its name.

    A place is an outlier if it is worse than the median of the same place over all runs by more than 3 % (or the
    metric's own tolerance among peers, if that is wider) and by more than three standard deviations, estimated from the
    median absolute deviation, which one bad node does not spoil. Of two runs the second is held against the first.
    Fingerprints are equal or not: who differs from more than half of the machines with the same GPUs and libraries is
    known, of two nobody can say which. A ratio is worse by the difference itself. Figures that have no limit in any run
    and require none, like the bandwidth of small messages, are shown and never outliers.
    """
    measured = {name: figures(record.findings) for name, record in runs.items()}
    judged = to_compare(runs)
    every = dict.fromkeys(figure for of_run in measured.values() for figure in of_run)
    rows, outliers, alone = [], [], 0
    for figure in every:
        values = {name: of_run[figure] for name, of_run in measured.items() if of_run.get(figure)}
        if len(values) < 2:  # 0: no run has measured it, as temperatures of CPU ranks
            alone += len(values)
            continue
        found = _outliers(figure, values, runs) if figure in judged else []
        outliers += found
        rows.append(_row(figure, values, runs, len(found)))
    notes = [*differences(runs), *_exchanged(runs), *not_compared(runs)]
    if alone:
        one = "1 figure is in one of the runs only: not compared"
        more = "{count} figures are in one of the runs only: not compared"
        notes.append(Said(one if alone == 1 else more, count=alone))
    outliers.sort(key=lambda outlier: -outlier.worse)
    return RunComparison(runs, tuple(notes), tuple(rows), tuple(outliers), tuple(other_bits(runs)))


def _outliers(figure: Figure, values: Mapping[str, Mapping[Where, float]], runs: Mapping[str, Record]) -> list[Outlier]:
    found = []
    for place in dict.fromkeys(place for of_run in values.values() for place in of_run):
        at_place = {name: of_run[place] for name, of_run in values.items() if place in of_run}
        for name, (reference, worse) in worse_ones(at_place, figure).items():
            identity = runs[name].topology.identity(place)
            found.append(Outlier(name, place, identity, figure, at_place[name], reference, worse))
    return found


def worse_ones(values: Mapping[str, float], figure: Figure) -> dict[str, tuple[float, float]]:
    """Which of these runs' values are too far on the bad side: their reference, and how much worse as a fraction."""
    numbers = [value for value in values.values() if math.isfinite(value)]
    if len(values) < 2 or not numbers:
        return {}
    names = list(values)
    if len(values) == 2:
        reference, names, noise = values[names[0]], names[1:], 0.0
    else:
        reference = median(numbers)
        noise = SIGMAS * MAD_TO_SIGMA * median(abs(number - reference) for number in numbers)
    if not math.isfinite(reference):
        return {}
    tolerance = max(TOLERANCE, figure.metric.peer_tolerance or 0.0, figure.share(noise, reference))
    worse = {name: (reference, figure.worse_by(values[name], reference)) for name in names}
    return {name: found for name, found in worse.items() if found[1] > tolerance}


def _row(
    figure: Figure, values: Mapping[str, Mapping[Where, float]], runs: Mapping[str, Record], outliers: int
) -> ComparedFigure:
    numbers = [value for of_run in values.values() for value in of_run.values() if math.isfinite(value)] or [math.nan]
    middle, found = median(numbers), (values.get(name, {}).items() for name in runs)
    return ComparedFigure(
        figure,
        tuple(min(each, key=lambda item: goodness(item[1], figure.metric), default=None) for each in found),
        middle,
        (max(numbers) - min(numbers)) / abs(middle) if middle else 0.0,
        outliers,
    )


def differences(runs: Mapping[str, Record]) -> list[str]:
    """In what the runs' machines and software differ: "driver differs: 580.95 (node7, node8), 575.57 (node9)"."""
    facts = {
        "GPU model": {name: models(record) for name, record in runs.items()},
        **{
            what: {name: getattr(run.topology, fact) or "unknown" for name, run in runs.items()}
            for fact, what in SOFTWARE.items()
        },
    }
    return [
        Said(
            "{fact} differs: {values}",
            fact=Said(fact),
            values=", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items()),
        )
        for fact, of in facts.items()
        if len(owners := grouped((value, name) for name, value in of.items())) > 1
    ]


def _exchanged(runs: Mapping[str, Record]) -> list[str]:
    """Places of one host that another GPU came to between two runs."""
    notes: list[str] = []
    seen: dict[tuple[str, Where], tuple[str, str]] = {}
    for name, record in runs.items():
        for gpu in record.topology.gpus:
            at = (record.run.host, gpu.place)
            before, run = seen.get(at, (gpu.uuid, name))
            if before != gpu.uuid:
                text = "{place} of {host} is another GPU in {now} than in {before}: now {gpu}"
                notes.append(Said(text, place=gpu.place, host=at[0], now=name, before=run, gpu=gpu.identity))
            seen[at] = (gpu.uuid, name)
    return notes
