"""Runs side by side: what each measured, by what it is, for many nodes of one model, or for one machine over time."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median

from pytest_gpufleet.machine.gpu_facts import COUNTERS
from pytest_gpufleet.machine.health import worsened
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, that_count
from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.metric import goodness
from pytest_gpufleet.model.place import WORLD, Where, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import outliers
from pytest_gpufleet.verdict.fleet.equality import Difference, not_compared, other_bits, unlike
from pytest_gpufleet.verdict.noise import Spread, pooled
from pytest_gpufleet.verdict.outliers import MOST_KELVIN, Figure, GpuIds, Outlier, figure_of, healthy_spread


def held_to_limits(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What the suite holds against a limit, or would. What is only shown, as of small messages, is too unsteady."""
    return (finding for finding in findings if finding.required or finding.limit is not None)


def to_compare(runs: Mapping[str, Record]) -> set[Figure]:
    return {figure for record in runs.values() for figure in figures(held_to_limits(record.findings))}


def figures(findings: Iterable[Finding]) -> dict[Figure, dict[Where, float]]:
    """Each figure that counts and its value for every place, in their order; the worst one if it was measured twice.
    One of which nothing could be measured, as temperatures of CPU ranks, is none."""
    result: dict[Figure, dict[Where, float]] = {}
    for finding in (each for each in that_count(findings) if each.measurement.values):
        figure = figure_of(finding.measurement)
        values = result.setdefault(figure, {})
        for place, value in finding.measurement.values.items():
            values[place] = figure.worst((value, values.get(place, value)))
    return result


def whose(record: Record, figure: Figure, place: Where) -> GpuIds:
    """The GPUs of a place, a pair (in its order), nodes, or all together (sorted); empty if one has no lasting name."""
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
    """A figure of all runs."""

    figure: Figure
    worst: tuple[tuple[Where, float] | None, ...]  # of each run the place that did worst; None if it has none
    median: float  # over all places of all runs
    spread: float  # (highest - lowest) / median
    outliers: int


@dataclass(frozen=True)
class RunComparison:
    """Runs beside each other; or (`over_time`) by their time those of one machine, the last held against the others."""

    runs: Mapping[str, Record]
    notes: tuple[str, ...]  # what makes them hard to compare, like other GPUs or software
    compared: int  # how many figures they have in common; over time each of every place
    worse: tuple[Outlier, ...]  # the worst first
    rows: tuple[ComparedFigure, ...] = ()
    other_bits: tuple[Difference, ...] = ()  # in the fingerprints of machines that must have the same
    faults: tuple[Fault, ...] = ()  # counters of errors that grew over time and must not
    over_time: bool = False

    @property
    def bad(self) -> bool:
        """Whether there is anything that should not be, or nothing to compare."""
        return bool(self.worse or self.other_bits or self.faults) or not self.compared


def compare(runs: Mapping[str, Record]) -> RunComparison:
    """Set two or more runs side by side. A place is an outlier if it is worse than the same place of most runs by more
    than matters and by more than healthy machines of its part number differ (`outliers.beside_most`); of two runs the
    second is held against the first. Figures that have no limit in any run and require none, like the bandwidth of
    small messages, are shown and never outliers. Fingerprints are equal or not."""
    measured = {name: figures(record.findings) for name, record in runs.items()}
    judged = to_compare(runs)
    comparisons = sum(len(of_run[figure]) for of_run in measured.values() for figure in of_run.keys() & judged)
    rows, worse, alone = [], [], 0
    for figure in dict.fromkeys(figure for of_run in measured.values() for figure in of_run):
        values = {name: of_run[figure] for name, of_run in measured.items() if figure in of_run}
        if len(values) < 2:
            alone += 1
            continue
        found = _outliers(figure, values, runs, comparisons) if figure in judged else []
        worse += found
        numbers = [each for of_run in values.values() for each in of_run.values() if math.isfinite(each)] or [math.nan]
        middle, of_runs = median(numbers), (values.get(name, {}).items() for name in runs)
        worst = (min(each, key=lambda item: goodness(item[1], figure.metric), default=None) for each in of_runs)
        spread = (max(numbers) - min(numbers)) / abs(middle) if middle else 0.0
        rows.append(ComparedFigure(figure, tuple(worst), middle, spread, len(found)))
    notes = [*(each.text for each in unlike(runs)), *not_compared(runs)]
    if alone:
        one = "1 measurement is in one of the runs only: not compared"
        more = "{count} measurements are in one of the runs only: not compared"
        notes.append(Said(one if alone == 1 else more, count=alone))
    worse.sort(key=lambda outlier: -outlier.worse)
    return RunComparison(runs, tuple(notes), len(rows), tuple(worse), tuple(rows), tuple(other_bits(runs)))


def _outliers(
    figure: Figure, values: Mapping[str, Mapping[Where, float]], runs: Mapping[str, Record], comparisons: int
) -> list[Outlier]:
    found, first = [], next(iter(values))
    healthy = healthy_spread(figure, runs[first].topology)
    for place in dict.fromkeys(place for of_run in values.values() for place in of_run):
        at_place = {(name, place): of_run[place] for name, of_run in values.items() if place in of_run}
        boards = grouped((runs[at[0]].topology.boards(place), (at, value)) for at, value in at_place.items())
        usual = values[first].get(place) if len(values) == 2 else None
        for group in map(dict, boards.values()):
            beside, least = group, healthy.matters
            if len(group) == 1 < len(boards):  # alone with its part number
                beside, least = at_place, outliers.BETWEEN_BOARDS
            slow = outliers.beside_most(figure, beside, healthy.sd(), comparisons, least, reference=usual)
            found += [each for each in slow if (each.run, each.place) in group]
    return [replace(each, identity=runs[each.run].topology.identity(each.place)) for each in found]


MATTERS = 0.01  # the smallest change that does
# GPUs 0, 1 and 3 of a machine of 4x H200 that ran twice differed from run to run by a quarter of what its GPUs differ
# among themselves: matrix products by 0.07 to 0.45 %, training by 0.14 %.
REPEAT = 1 / 3
MAD_TO_SIGMA = 1.4826  # of a normal distribution (Rousseeuw and Croux 1993)
# Degrees of freedom of each second difference: 0.37 by the median of the deviations, and each shares two runs with the
# next, which halves it.
WORTH = 0.2


@dataclass(frozen=True)
class _Measured:
    """A figure of one run: by GPUs its values and places, their mean temperature, and what a kelvin costs."""

    values: Mapping[GpuIds, float]
    places: Mapping[GpuIds, Where]
    temperature: float | None
    per_kelvin: float

    def at_temperature_of(self, now: "_Measured", sign: int) -> dict[GpuIds, float]:
        """What one GPU is warmer than the others stays."""
        known = self.temperature is not None and now.temperature is not None
        kelvin = self.temperature - now.temperature if known else 0.0  # type: ignore[operator]
        factor = 1 + sign * now.per_kelvin * max(-MOST_KELVIN, min(MOST_KELVIN, kelvin))
        return {gpus: factor * value for gpus, value in self.values.items()}


def drift(runs: Mapping[str, Record]) -> RunComparison:
    """Hold each GPU of the last of two or more runs against what it did itself in the earlier ones.

    A GPU is known by its UUID, in whatever slot or machine it was; a pair by its two GPUs; what several did together by
    all of them. A figure is the same where metric and all conditions are, so methods are never mixed; those that no run
    held against a limit are left out. Where the cost of a kelvin is known, figures are taken at the temperature of the
    last run. The reference is the median of the better half of the earlier runs, which a slow drift does not draw
    along. A figure got worse if it did by more than MATTERS and by more than figures differ from run to run: by REPEAT,
    and as four runs or more of the machine itself show it. The more figures are compared, the more may be by chance."""
    runs = dict(sorted(runs.items(), key=lambda item: item[1].run.utc.seconds))
    *_, last = runs
    judged = to_compare(runs)
    measured = {name: _measured(record, judged) for name, record in runs.items()}
    before = {}
    for figure, now in measured[last].items():
        earlier = [of_run[figure] for name, of_run in measured.items() if name != last and figure in of_run]
        at_one = (each.at_temperature_of(now, figure.metric.sign) for each in earlier)
        of_gpus = grouped(item for values in at_one for item in values.items())
        before[figure] = {gpus: values for gpus, values in of_gpus.items() if gpus in now.values}
    compared = sum(map(len, before.values()))
    worse: list[Outlier] = []
    for figure, of_gpus in before.items():
        now, healthy = measured[last][figure], healthy_spread(figure, runs[last].topology)
        sd, df = pooled(REPEAT * (healthy.within or healthy.between), *noise(of_gpus.values(), figure))
        drifts = Spread(sd, 0.0, within_df=df, matters=MATTERS if healthy.seen else healthy.matters)
        for gpus, values in of_gpus.items():
            numbers = sorted(filter(math.isfinite, values), key=lambda value: -goodness(value, figure.metric))
            good = numbers[: math.ceil(len(numbers) / 2)] or [math.nan]  # than which nothing is worse
            allowed, value = drifts.gpu_line(len(good) + 1, compared).at, {(last, now.places[gpus]): now.values[gpus]}
            for each in outliers.outliers(figure, value, median(good), allowed):
                of_runs = ((name, of_run[figure].values) for name, of_run in measured.items() if figure in of_run)
                history = {name: of_run[gpus] for name, of_run in of_runs if gpus in of_run}
                identity = runs[last].topology.identity(each.place)
                worse.append(replace(each, identity=identity, gpus=gpus, history=history))
    worse.sort(key=lambda each: (-each.worse, each.place))
    notes = (*(each.text for each in unlike(runs)), *_moved(runs))
    return RunComparison(runs, notes, compared, tuple(worse), faults=_counters([*runs.values()]), over_time=True)


def _measured(record: Record, wanted: Collection[Figure]) -> dict[Figure, _Measured]:
    found, of_figure = {}, grouped((figure_of(finding.measurement), finding) for finding in record.findings)
    for figure, values in figures(record.findings).items():
        if figure in wanted:
            places = {ids: place for place in values if (ids := whose(record, figure, place))}
            states = (state for each in of_figure[figure] for state in each.measurement.gpu_states.values())
            known = [state.temperature_c for state in states if state.temperature_c is not None]
            slopes = (tolerance.per_kelvin for each in of_figure[figure] for tolerance in each.tolerances)
            of_gpus = {ids: values[place] for ids, place in places.items()}
            found[figure] = _Measured(of_gpus, places, fmean(known) if known else None, max(slopes, default=0.0))
    return found


def noise(histories: Iterable[list[float]], figure: Figure) -> tuple[float, float]:
    """The standard deviation of a figure from run to run as a fraction, from all GPUs of the machine, and with how many
    degrees of freedom; both 0 if none has three runs. By second differences x1 - 2 x2 + x3, to which a steady drift
    adds nothing, and whose variance is 6 times that of one run. Their median, which one unsteady GPU does not widen."""
    found = [
        abs(figure.share(one - 2 * two + three, two)) / math.sqrt(6)
        for history in histories
        for one, two, three in zip(history, history[1:], history[2:], strict=False)
    ]
    numbers = [each for each in found if math.isfinite(each)]
    return (MAD_TO_SIGMA * median(numbers), WORTH * len(numbers)) if numbers else (0.0, 0.0)


def _counters(runs: list[Record]) -> tuple[Fault, ...]:
    """Counters of errors that grew since the first run of their GPU, and must not."""
    first = {gpu.lasting_id: (gpu, record) for record in reversed(runs[:-1]) for gpu in record.topology.gpus}
    faults: list[Fault] = []
    for gpu in runs[-1].topology.gpus:
        if gpu.lasting_id and gpu.lasting_id in first:
            before, record = first[gpu.lasting_id]
            minutes = (runs[-1].run.utc.seconds - record.run.utc.seconds) / 60
            faults += worsened(before, replace(gpu, facts={name: gpu[name] for name in COUNTERS}), minutes)
    return tuple(faults)


def _moved(runs: Mapping[str, Record]) -> list[str]:
    """GPUs of the last run that were elsewhere before or that no earlier run has, and those that it lacks."""
    *earlier, last = runs
    before = {gpu.lasting_id: (gpu, name) for name in earlier for gpu in runs[name].topology.gpus if gpu.lasting_id}
    notes: list[str] = []
    for gpu in (each for each in runs[last].topology.gpus if each.lasting_id):
        old, name = before.pop(gpu.lasting_id, (None, ""))
        if old is None:
            notes.append(Said("{gpu}: in none of the earlier runs", gpu=gpu.identity))
        elif (was := (runs[name].hosts[old.node], old.pci_bus_id)) != (runs[last].hosts[gpu.node], gpu.pci_bus_id):
            text, host = "{gpu} of {host}: was at {bus} of {old} in {run}", runs[last].hosts[gpu.node]
            notes.append(Said(text, gpu=gpu.identity, host=host, bus=was[1], old=was[0], run=name))
    gone = "{gpu}: in {run}, and not in {last}"
    return notes + [Said(gone, gpu=gpu.identity, run=name, last=last) for gpu, name in before.values()]
