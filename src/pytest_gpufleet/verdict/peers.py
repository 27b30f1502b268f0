"""Places held against their peers: GPUs of one model and board in the same run, or pairs of such GPUs linked alike."""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, median

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Reference, Tolerance
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.verdict.outliers import Outlier, figure_of, outliers

# The GPUs of three healthy boards of 4x NVIDIA H200 were up to 10 K apart under full load (53 to 63 C, 2026-11-21).
# What is warmer than that has a fault of its cooling, which must not excuse it.
MOST_KELVIN = 10.0


def slower_than_peers(
    measurement: Measurement, tolerances: Iterable[Tolerance], topology: GpuTopology
) -> dict[Where, float] | None:
    """Places worse than their peers by more than any of these tolerances, and by what fraction of the reference; None
    where no place has peers enough.

    A place that gave no number at all is as slow as can be. Nothing is slower than peers that reach nothing.
    """
    found = outliers_among_peers(measurement, tolerances, topology)
    return None if found is None else {place: each.worse for place, each in found.items()}


def outliers_among_peers(
    measurement: Measurement, tolerances: Iterable[Tolerance], topology: GpuTopology
) -> dict[Where, Outlier] | None:
    """Of each place the worst."""
    slower: dict[Where, Outlier] = {}
    figure, sign = figure_of(measurement), measurement.definition.sign
    groups = [(each, peers) for given in tolerances for each, peers in _groups(measurement, given, topology)]
    if not groups:
        return None
    for tolerance, peers in groups:
        values = at_one_temperature(measurement, peers, sign * tolerance.per_kelvin)
        usual = _reference(tolerance.reference, values.values(), sign)
        of_group = {("", place): value for place, value in values.items()}
        for each in outliers(figure, of_group, usual, tolerance.worse, relative=True):
            if each.place not in slower or each.worse > slower[each.place].worse:
                slower[each.place] = each
    return {place: slower[place] for place in measurement.values if place in slower}


def _groups(
    measurement: Measurement, tolerance: Tolerance, topology: GpuTopology
) -> list[tuple[Tolerance, list[Where]]]:
    """Places that are peers of each other, with what may differ among them: all of a model by `across`, and those whose
    boards have one part number by `worse`. At a NUMA node only those are that share a PCIe switch with as many others.
    Where all GPUs show the same NUMA node, nobody knows who is near whom: virtual machines hide it."""
    places, near = list(measurement.values), tolerance.within == "numa node"
    if near and len({topology.processors_near(place) for place in places}) < 2:
        return []
    alike = {
        place: (topology.kind(place), near and (topology.processors_near(place), topology.switch_neighbours(place)))
        for place in places
    }
    of_model = grouped((alike[place], place) for place in places).values()
    of_board = grouped(((alike[place], topology.boards(place)), place) for place in places).values()
    usual = max(tolerance.worse, measurement.definition.peer_tolerance or 0.0)
    wider = replace(tolerance, worse=usual if tolerance.across is None else tolerance.across)
    found = [*((tolerance, peers) for peers in of_board), *((wider, peers) for peers in of_model)]
    return [(each, peers) for each, peers in found if len(peers) >= tolerance.least]


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


def _reference(which: Reference, values: Iterable[float], sign: int) -> float:
    """What these values are held against; NaN if none is a number. The better half of three is the best one: it never
    has more than half of them."""
    numbers = sorted((value for value in values if not math.isnan(value)), reverse=sign > 0)
    if not numbers:
        return math.nan
    better_half = fmean(numbers[: max(1, len(numbers) // 2)])
    return {"best": numbers[0], "better half": better_half, "median": median(numbers)}[which]
