"""Runs side by side: what each measured, by what it is, for one node over time or many nodes of one model."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, that_count
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.measurement import goodness
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.fleet.equality import Difference, not_compared, other_bits, unlike
from pytest_gpufleet.verdict.outliers import (
    BETWEEN_BOARDS,
    Figure,
    GpuIds,
    Outlier,
    beside_most,
    figure_of,
    healthy_spread,
)


def held_to_limits(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What the suite holds against a limit, or would. What is only shown, as of small messages, is too unsteady."""
    return (finding for finding in findings if finding.required or finding.limit is not None)


def to_compare(runs: Mapping[str, Record]) -> set[Figure]:
    return {figure for record in runs.values() for figure in figures(held_to_limits(record.findings))}


def figures(findings: Iterable[Finding]) -> dict[Figure, dict[Where, float]]:
    """Each figure that counts and its value for every place, in their order; the worst one if it was measured twice."""
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


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of all runs. `worst`: for each run the place that did worst and its value, None if it has none. `median`
    and `spread` ((highest - lowest) / median) are over all places of all runs."""

    figure: Figure
    worst: tuple[tuple[Where, float] | None, ...]
    median: float
    spread: float
    outliers: int


@dataclass(frozen=True)
class RunComparison:
    """Runs beside each other; or (`over_time`) by their time those of one machine, the last held against the others.

    `notes`: what makes them hard to compare, like other GPUs or software. `compared`: how many figures they have in
    common; over time each of every place. `rows`: these figures. `other_bits`: in the fingerprints of machines that
    must have the same. `faults`: counters of errors that grew over time and must not."""

    runs: Mapping[str, Record]
    notes: tuple[str, ...]
    compared: int
    worse: tuple[Outlier, ...]  # the worst first
    rows: tuple[ComparedFigure, ...] = ()
    other_bits: tuple[Difference, ...] = ()
    faults: tuple[Fault, ...] = ()
    over_time: bool = False

    @property
    def bad(self) -> bool:
        """Whether there is anything that should not be, or nothing to compare."""
        return bool(self.worse or self.other_bits or self.faults) or not self.compared


def compare(runs: Mapping[str, Record]) -> RunComparison:
    """Set two or more runs side by side, each known by its name.

    A place is an outlier if it is worse than the same place of most runs by more than matters and by more than healthy
    machines of its part number differ (`outliers.beside_most`). Of two runs the second is held against the first.
    Fingerprints are equal or not: who differs from more than half of the machines with the same GPUs and libraries is
    known, of two nobody can say which. A ratio is worse by the difference itself. Figures that have no limit in any run
    and require none, like the bandwidth of small messages, are shown and never outliers."""
    measured = {name: figures(record.findings) for name, record in runs.items()}
    judged = to_compare(runs)
    every = dict.fromkeys(figure for of_run in measured.values() for figure in of_run)
    comparisons = sum(len(of_run[figure]) for of_run in measured.values() for figure in of_run.keys() & judged)
    rows, outliers, alone = [], [], 0
    for figure in every:
        values = {name: of_run[figure] for name, of_run in measured.items() if of_run.get(figure)}
        if len(values) < 2:  # 0: no run has measured it, as temperatures of CPU ranks
            alone += len(values)
            continue
        found = _outliers(figure, values, runs, comparisons) if figure in judged else []
        outliers += found
        numbers = [each for of_run in values.values() for each in of_run.values() if math.isfinite(each)] or [math.nan]
        middle, of_runs = median(numbers), (values.get(name, {}).items() for name in runs)
        worst = (min(each, key=lambda item: goodness(item[1], figure.metric), default=None) for each in of_runs)
        spread = (max(numbers) - min(numbers)) / abs(middle) if middle else 0.0
        rows.append(ComparedFigure(figure, tuple(worst), middle, spread, len(found)))
    notes = [*(each.text for each in unlike(runs)), *_exchanged(runs), *not_compared(runs)]
    if alone:
        one = "1 measurement is in one of the runs only: not compared"
        more = "{count} measurements are in one of the runs only: not compared"
        notes.append(Said(one if alone == 1 else more, count=alone))
    outliers.sort(key=lambda outlier: -outlier.worse)
    return RunComparison(runs, tuple(notes), len(rows), tuple(outliers), tuple(rows), tuple(other_bits(runs)))


def _outliers(
    figure: Figure, values: Mapping[str, Mapping[Where, float]], runs: Mapping[str, Record], comparisons: int
) -> list[Outlier]:
    found, first = [], next(iter(values))
    healthy = healthy_spread(figure, runs[first].topology)
    for place in dict.fromkeys(place for of_run in values.values() for place in of_run):
        at_place = {(name, place): of_run[place] for name, of_run in values.items() if place in of_run}
        boards = grouped((runs[at[0]].topology.boards(place), (at, value)) for at, value in at_place.items())
        groups, least = [dict(each) for each in boards.values()], healthy.matters
        if len(groups) > 1 and min(map(len, groups)) == 1:  # alone with its part number: beside all
            groups, least = [at_place], BETWEEN_BOARDS
        usual = values[first].get(place) if len(values) == 2 else None
        for group in groups:
            found += beside_most(figure, group, healthy.spread.sd(), comparisons, least, reference=usual)
    return [replace(each, identity=runs[each.run].topology.identity(each.place)) for each in found]


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
