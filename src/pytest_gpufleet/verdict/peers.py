"""Places held against their peers: GPUs of one model and board in the same run, or pairs of such GPUs linked alike."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.measurement import Measurement, goodness
from pytest_gpufleet.model.metric import Tolerance
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.verdict.outliers import Figure, Outlier, figure_of, outliers

# The GPUs of three healthy boards of 4x NVIDIA H200 were up to 10 K apart under full load (53 to 63 C, 2026-11-21).
# What is warmer than that has a fault of its cooling, which must not excuse it.
MOST_KELVIN = 10.0


def slower_than_peers(
    measurement: Measurement, tolerances: Iterable[Tolerance], topology: GpuTopology
) -> dict[Where, float] | None:
    """Places worse than their peers by more than any of these tolerances, and by what fraction of the mean of the
    others; None where no place has peers enough.

    A place that gave no number at all is as slow as can be. Nothing is slower than peers that reach nothing.
    """
    found = outliers_among_peers(measurement, tolerances, topology)
    return None if found is None else {place: each.worse for place, each in found.items()}


def outliers_among_peers(
    measurement: Measurement, tolerances: Iterable[Tolerance], topology: GpuTopology
) -> dict[Where, Outlier] | None:
    """Of each place the worst."""
    slower: dict[Where, Outlier] = {}
    figure, sign, compared = figure_of(measurement), measurement.definition.sign, False
    for tolerance in tolerances:
        for peers, judged in _groups(measurement, tolerance, topology):
            compared = True
            for each in _slower(figure, at_one_temperature(measurement, peers, sign * tolerance.per_kelvin), tolerance):
                if each.place in judged and (each.place not in slower or each.worse > slower[each.place].worse):
                    slower[each.place] = each
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
) -> Iterator[tuple[list[Where], set[Where]]]:
    """Places that are peers of each other, and those among them that are held against the others. At a NUMA node only
    those are peers that share a PCIe switch with as many others. Where all GPUs show the same NUMA node, nobody knows
    who is near whom: virtual machines hide it."""
    places, near = list(measurement.values), tolerance.peers == "numa node"
    if near and len({topology.processors_near(place) for place in places}) < 2:
        return
    by_board = places if tolerance.peers in ("part number", "others of the model") else []
    board = {place: (topology.kind(place), topology.boards(place)) for place in by_board}
    of_board = Counter(board.values())
    alike: dict[Where, object] = {place: topology.kind(place) for place in places}
    if tolerance.peers == "part number":
        alike = dict(board)
    elif near:
        alike = {at: (kind, topology.processors_near(at), topology.switch_neighbours(at)) for at, kind in alike.items()}
    for peers in grouped((alike[place], place) for place in places).values():
        judged = {
            at for at in peers if tolerance.peers != "others of the model" or of_board[board[at]] < tolerance.least
        }
        if judged and len(peers) >= tolerance.least:
            yield peers, judged


def at_one_temperature(measurement: Measurement, peers: list[Where], per_kelvin: float) -> dict[Where, float]:
    """The values that these peers would reach at their mean temperature, if the temperature of each is known."""
    states = [measurement.gpu_states.get(place) for place in peers]
    temperatures = [state.temperature_c for state in states if state and state.temperature_c is not None]
    values = {place: measurement.values[place] for place in peers}
    if not per_kelvin or len(temperatures) < len(peers):
        return values
    mean = fmean(temperatures)
    warmer = (max(-MOST_KELVIN, min(MOST_KELVIN, each - mean)) for each in temperatures)
    corrected = (1 + per_kelvin * kelvin for kelvin in warmer)
    return {place: value * factor for (place, value), factor in zip(values.items(), corrected, strict=True)}
