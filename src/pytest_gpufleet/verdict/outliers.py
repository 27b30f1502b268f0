"""Outliers: a place worse than its peers, a run or a host worse than most, a GPU worse than it was itself."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.metric import Measurement, Metric, Tolerance, goodness
from pytest_gpufleet.model.place import GpuTopology, Where, grouped
from pytest_gpufleet.verdict.noise import Spread, pooled
from pytest_gpufleet.verdict.profile import SAME, Profile, choose, of_every_gpu

# By unit: a ratio is a fraction already, of which a per cent of next to nothing would be none; a kelvin is a per cent.
FIXED = {"ratio": 1.0, "K": 100.0}
GpuIds = tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A metric under conditions; the places that it has a value for are another matter."""

    name: str
    conditions: tuple[tuple[str, Condition], ...]
    metric: Metric = field(hash=False)  # by name is enough

    def worst(self, values: Iterable[float]) -> float:
        """NaN is worse than any number."""
        return min(values, key=lambda value: goodness(value, self.metric))

    def scale(self, reference: float) -> float:
        """What a difference is a fraction of."""
        return FIXED.get(self.metric.unit, abs(reference))

    def share(self, difference: float, reference: float, relative: bool = False) -> float:
        """A difference as a fraction of what it is held against; `relative`: of ratios and kelvin too."""
        scale = abs(reference) if relative else self.scale(reference)
        return difference / scale if scale else math.nan


def figure_of(measurement: Measurement) -> Figure:
    return Figure(measurement.metric, tuple(sorted(measurement.conditions.items())), measurement.definition)


@dataclass(frozen=True)
class Outlier:
    """A place of a run that is worse than `reference` by the fraction `worse`, where `allowed` may be; of NaN by 1."""

    run: str
    place: Where
    figure: Figure
    value: float
    reference: float
    worse: float
    allowed: float
    identity: str = ""
    gpus: GpuIds = ()  # of a machine over time those that it is of
    history: Mapping[str, float] = field(default_factory=dict)  # and the value in each run that has one, in their order


def outliers(
    figure: Figure, values: Mapping[tuple[str, Where], float], usual: float, allowed: float, *, relative: bool = False
) -> list[Outlier]:
    """Which of these values, by run and place, are worse than the `usual` one by more than `allowed`. Nothing is worse
    than what is no number, or than 0. `relative`: a ratio too is worse by a fraction."""
    found = []
    for (run, place), value in values.items() if math.isfinite(usual) else ():
        difference = figure.metric.sign * (usual - value)
        worse = 1.0 if math.isnan(value) else figure.share(difference, usual, relative)
        if worse > allowed:
            found.append(Outlier(run, place, figure, value, usual, worse, allowed))
    return found


# Boards of two part numbers of the H200 differ by up to 3.7 % in one figure. Who is alone with its part number is held
# against the other boards of its model, and may be so much worse.
BETWEEN_BOARDS = 0.05


def healthy_spread(figure: Figure, topology: GpuTopology, defaults: Profile | None = None) -> Spread:
    """Of machines like this one, with their part number, by the shipped profile; or by `defaults` alone."""
    measured = Measurement(figure.name, {}, dict(figure.conditions), definition=figure.metric)
    profile = defaults or choose(None, [gpu.name for gpu in topology.gpus]) or of_every_gpu()
    part = str(measured.conditions.get("part", "")) if defaults else topology.part or SAME
    return profile.spread_for(measured, topology.fabric, part)


# How much healthy ones differ as the better half of them shows it, which slow ones do not widen: the best tenth of a
# normal distribution is 1.2816 standard deviations above its median. Its variance is 1.9 s^2 / n, that of the usual
# estimate 0.5: one value is worth so much of a degree of freedom.
AS_SIGMAS, WORTH = 1.2816, 0.27
FEWEST = 10  # values, of which one is the best tenth: two slow ones of three would show a spread that is none


def beside_most(
    figure: Figure,
    values: Mapping[tuple[str, Where], float],
    default: float,
    comparisons: int,
    matters: float,
    *,
    independent: int = 0,
    reference: float | None = None,
) -> list[Outlier]:
    """Those of one kind that are worse than most of them by more than `matters` and by more than healthy ones differ.

    Their standard deviation is what these values show, together with the `default`, both as fractions; `comparisons`:
    how many are made in all. Places that are found are left out and the rest is looked at again, so that a very slow
    one hides no other. `independent`: how many of the values are, where places of one machine go together. `reference`:
    what they are held against, if not what the better half reaches at least."""
    found: list[Outlier] = []
    left = dict(values)
    while True:
        usual, healthy = usual_and_spread(figure, left.values(), default, matters, independent)
        allowed = healthy.gpu_line(max(2, len(left)), comparisons).at
        if not (slow := outliers(figure, left, usual if reference is None else reference, allowed)):
            return found
        found += slow
        left = {at: value for at, value in left.items() if at not in {(each.run, each.place) for each in slow}}


def usual_and_spread(
    figure: Figure, values: Iterable[float], default: float, matters: float, independent: int = 0
) -> tuple[float, Spread]:
    """What the better half of these reaches at least, NaN if none is a number; and how much healthy ones differ."""
    numbers = sorted(filter(math.isfinite, values), key=lambda value: -goodness(value, figure.metric)) or [math.nan]
    n, usual = len(numbers), numbers[(len(numbers) - 1) // 2]
    sd, df = pooled(default, 0.0, 0.0)
    if n >= FEWEST:
        tenths = quantiles(numbers, n=10, method="inclusive")
        best = figure.share(abs(tenths[-1 if figure.metric.better == "higher" else 0] - usual), usual)
        if math.isfinite(best):
            sd, df = pooled(default, best / AS_SIGMAS, WORTH * (min(n, independent or n) - 1))
    return usual, Spread(sd, 0.0, within_df=df, matters=matters)


# The GPUs of three healthy boards of 4x NVIDIA H200 were up to 10 K apart under full load (53 to 63 C, 2026-11-21).
# What is warmer than that has a fault of its cooling, which must not excuse it.
MOST_KELVIN = 10.0


def slower_than_peers(
    measurement: Measurement, tolerances: Iterable[Tolerance], topology: GpuTopology
) -> dict[Where, float] | None:
    """Places worse than their peers by more than any of these tolerances, and by what fraction of the mean of the
    others; None where none has peers enough. No number is as slow as can be; nothing is slower than peers at 0."""
    slower: dict[Where, float] = {}
    figure, sign, compared = figure_of(measurement), measurement.definition.sign, False
    for tolerance in tolerances:
        for peers, judged in _groups(measurement, tolerance, topology):
            compared = True
            for each in _slower(figure, at_one_temperature(measurement, peers, sign * tolerance.per_kelvin), tolerance):
                if each.place in judged:
                    slower[each.place] = max(each.worse, slower.get(each.place, each.worse))
    return {place: slower[place] for place in measurement.values if place in slower} if compared else None


def _slower(figure: Figure, values: Mapping[Where, float], tolerance: Tolerance) -> list[Outlier]:
    """Those worse than the mean of the others by more than they may be. Several that are slow are no measure for each
    other: as many as half of them are left out of the mean, most first, if the best of these is worse than the rest by
    more than it may be (after B. Rosner, Percentage Points for a Generalized ESD Many-Outlier Procedure, Technometrics
    25 (1983)). Then the rest is looked at again."""
    ranked = sorted(values.items(), key=lambda item: goodness(item[1], figure.metric))  # NaN first
    numbers, broken = [value for _, value in ranked], sum(map(math.isnan, values.values()))
    for count in range(max(len(ranked) // 2, broken), 0, -1):
        rest, slow = numbers[max(count, broken) :], {("", at): value for at, value in ranked[count - 1 : count]}
        usual = fmean(rest) if rest else math.nan
        if outliers(figure, slow, usual, tolerance.worse, relative=True):
            slow = {("", at): value for at, value in ranked[:count]}
            found = outliers(figure, slow, usual, tolerance.worse, relative=True)
            return found + _slower(figure, dict(ranked[count:]), tolerance)
    return []


def _groups(
    measurement: Measurement, tolerance: Tolerance, topology: GpuTopology
) -> list[tuple[list[Where], set[Where]]]:
    """Places that are peers, and those of them that are held against the others. At a NUMA node only those are peers
    that share a PCIe switch with as many others. Virtual machines show the same NUMA node for all: nobody is near."""
    places = tuple(measurement.values)
    key = (places, tolerance.peers, tolerance.least)
    if key in topology.known:
        return topology.known[key]  # type: ignore[no-any-return]
    near, others = tolerance.peers == "numa node", tolerance.peers == "others of the model"
    if near and len({topology.processors_near(place) for place in places}) < 2:
        return []
    board = {place: topology.board(place) for place in places}
    of_board = Counter(board.values())
    alike: dict[Where, object] = {place: kind for place, (kind, _) in board.items()}
    if tolerance.peers == "part number":
        alike = dict(board)
    elif near:
        alike = {at: (kind, topology.processors_near(at), topology.switch_neighbours(at)) for at, kind in alike.items()}
    found = topology.known[key] = []
    for peers in grouped((alike[place], place) for place in places).values():
        judged = {at for at in peers if not others or of_board[board[at]] < tolerance.least}
        if judged and len(peers) >= tolerance.least:
            found.append((peers, judged))
    return found


def at_one_temperature(measurement: Measurement, peers: list[Where], per_kelvin: float) -> dict[Where, float]:
    """What these peers would reach at their mean temperature, if that of each is known; NaN of one that is infinite."""
    states = [measurement.gpu_states.get(place) for place in peers]
    temperatures = [state.temperature_c for state in states if state and state.temperature_c is not None]
    values = {place: each if math.isfinite(each := measurement.values[place]) else math.nan for place in peers}
    if not per_kelvin or len(temperatures) < len(peers):
        return values
    mean = fmean(temperatures)
    warmer = (max(-MOST_KELVIN, min(MOST_KELVIN, each - mean)) for each in temperatures)
    corrected = (1 + per_kelvin * kelvin for kelvin in warmer)
    return {place: value * factor for (place, value), factor in zip(values.items(), corrected, strict=True)}
