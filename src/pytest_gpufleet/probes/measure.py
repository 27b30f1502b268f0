"""A figure with everything that is needed to judge it later."""

import itertools
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.metric import KNOWN, METRICS, GpuState, Measurement, Metric, Reading, goodness
from pytest_gpufleet.model.place import WORLD, Where, grouped
from pytest_gpufleet.world.call import describe
from pytest_gpufleet.world.world import Rank, World

T = TypeVar("T")


def measure(world: World, probe: Callable[..., Any], *args: Any, **kwargs: Any) -> Measurement:
    """Run a probe, a function probe(rank, ...) -> Reading, on every rank of a world, and put the readings together.

    Of the place "world" the worst one counts, since a collective is as slow as its slowest rank; with ranks of several
    nodes there is the condition `nodes`. ValueError if the metric is unknown or ranks measured different things."""
    measurements = measure_all(world, probe, *args, **kwargs)
    if len(measurements) != 1:
        name, what = describe(probe), "; ".join(f"{one.metric} {dict(one.conditions)}" for one in measurements)
        raise ValueError(f"{name} measured {len(measurements)} things ({what}): use measure_all for those")
    return measurements[0]


def measure_all(world: World, probe: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Measurement]:
    """As `measure`, for a probe that gives a list of readings: one Measurement for each metric and its conditions."""
    answers = world.run(watched(probe), *args, **kwargs)
    by_rank = [(each if isinstance(each, list) else [each], state) for each, state in answers]
    for each in itertools.chain.from_iterable(readings for readings, _ in by_rank):
        if not isinstance(each, Reading):
            raise TypeError(f"{describe(probe)} must return a Reading or a list of them, not {reprlib.repr(each)}")
    # Its own state where a probe has looked itself, in the window that it timed.
    with_state = [[each if each.gpu_state else replace(each, gpu_state=at) for each in own] for own, at in by_rank]
    return together(world, with_state)


def watched(work: Callable[..., T]) -> Callable[..., tuple[T, GpuState | None]]:
    """For ranks: what `work` gives there, and what the GPU of the rank was like meanwhile."""

    @wraps(work)
    def on_rank(rank: Rank, *args: Any, **kwargs: Any) -> tuple[T, GpuState | None]:
        with Watch(rank.gpu) as watch:
            found = work(rank, *args, **kwargs)
        return found, watch.state()

    return on_rank


def together(world: World, by_rank: Sequence[Sequence[Reading]]) -> list[Measurement]:
    """The readings of each rank as one Measurement for each metric and its conditions."""
    every = ((index, reading) for index, readings in enumerate(by_rank) for reading in readings)
    groups = grouped(((each.metric, *sorted(each.conditions.items())), (index, each)) for index, each in every)
    return [_of_one_thing(world, group) for group in groups.values()]


def _of_one_thing(world: World, group: list[tuple[int, Reading]]) -> Measurement:
    first = group[0][1]
    silent = set(range(world.size)) - {index for index, _ in group}
    if first.place in (None, WORLD) and silent:
        raise ValueError(
            f"{world.name_of(group[0][0])} measured {first.metric} {dict(first.conditions)}, "
            f"{world.name_of(min(silent))} did not: a probe must measure the same thing on every rank"
        )
    definition = first.metric if isinstance(first.metric, Metric) else METRICS.get(first.metric, KNOWN)
    nodes = len(world.nodes) if first.place == WORLD else 1
    chosen: dict[Where, Reading] = {}
    for index, reading in group:
        place = reading.place or world.places[index]
        # Of several readings of one place the worst counts.
        if place not in chosen or goodness(reading.value, definition) < goodness(chosen[place].value, definition):
            chosen[place] = reading
    return Measurement(
        first.metric if isinstance(first.metric, str) else first.metric.name,
        {place: reading.value for place, reading in chosen.items()},
        {**first.conditions, "nodes": nodes} if nodes > 1 else first.conditions,
        {place: reading.samples for place, reading in chosen.items()},
        first.details,
        definition,
        {place: reading.gpu_state for place, reading in chosen.items() if reading.gpu_state is not None},
    )


def scaling_efficiency(alone: Measurement, many: Measurement) -> Measurement:
    """What `many`, the throughput of n GPUs together, is of the sum of what the same GPUs do `alone`, measured in one
    run with one recipe, so that a GPU which is slow by itself does not look like slow communication.

    `alone` may have more GPUs: the first n count. A comparison of ways to train keeps its `method`."""
    ranks = many.conditions["ranks"]
    assert isinstance(ranks, int)
    each = list(alone.values.values())[:ranks]
    if len(each) < ranks:
        raise ValueError(f"{many.metric} was measured on {ranks} ranks, and alone on {len(each)} of them")
    conditions = {"method": EACH_ALONE, **many.conditions}
    samples = tuple(sample / sum(each) for sample in many.samples.get(WORLD, ()))
    return Measurement("scaling_efficiency", {WORLD: many.values[WORLD] / sum(each)}, conditions, {WORLD: samples})
