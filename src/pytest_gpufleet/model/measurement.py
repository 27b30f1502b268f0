"""What was measured: on one rank, and everywhere."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from pytest_gpufleet.model import place
from pytest_gpufleet.model.codec import Amount, Finite
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.metric import METRICS, Metric, conditions, number, numbers
from pytest_gpufleet.model.place import Where


@dataclass(frozen=True)
class Sample:
    """The readings of all GPUs at `time` (seconds since the epoch): reading -> value, None where it cannot be had."""

    time: Amount
    gpus: tuple[dict[str, Amount | None], ...]


KNOWN = Metric("known", "of METRICS", "higher", "the one of METRICS that has the name of the measurement")


@dataclass(frozen=True)
class GpuState:
    """What a GPU was like while a figure was measured on it: means, and the energy it took; None: NVML has none."""

    temperature_c: Finite | None = None
    sm_clock_mhz: Finite | None = None
    power_watts: Finite | None = None
    energy_joules: Finite | None = None


@dataclass(frozen=True)
class Reading:
    """What a probe measured on one rank. `metric` is the name of one of METRICS, or a Metric of your own. `value` is in
    the metric's unit; `samples` are the repetitions it is the median of. `place` (or its text, like "gpu0-gpu5") is
    None for this rank's own GPU, WORLD where all ranks measured one thing together (then the worst rank's value
    counts), or what else was measured. `gpu_state`: of the GPU that the figure depends on, while it was measured."""

    metric: str | Metric
    value: float
    conditions: Mapping[str, Condition]
    samples: tuple[float, ...] = ()
    place: Where | None = None
    details: Mapping[str, Condition] = field(default_factory=dict)  # shown, never matched against limits
    gpu_state: GpuState | None = None

    def __post_init__(self) -> None:
        """Checked where it is made, so that a wrong one fails its own check, and the failure shows the line."""
        name = self.metric.name if isinstance(self.metric, Metric) else self.metric
        if not isinstance(name, str):
            raise TypeError(f"the metric of a Reading must be a Metric or the name of one, not {reprlib.repr(name)}")
        place = None if self.place is None else _where(self.place, f"the place of {name}")
        value = number(self.value, f"the value of {name}")
        _settle(self, name, place=place, value=value, samples=numbers(self.samples, f"the samples of {name}"))


@dataclass(frozen=True)
class Measurement:
    """A metric's value for every place, and the conditions it was measured under. `values` maps a place (or its text:
    "gpu3", "gpu0-gpu5", "node", "world") to a value in the metric's unit; `samples` holds the repetitions behind each
    value; `conditions` decide which limit applies; `details` are only shown; `gpu_states` says what each GPU was like
    meanwhile, where that was read. `definition` says what the metric is, so that evidence can be read where nobody
    knows the check that it comes from; left out, it is the one of METRICS. ValueError if there is none."""

    metric: str
    values: Mapping[Where, float]
    conditions: Mapping[str, Condition]
    samples: Mapping[Where, tuple[float, ...]] = field(default_factory=dict)
    details: Mapping[str, Condition] = field(default_factory=dict)
    definition: Metric = KNOWN
    gpu_states: Mapping[Where, GpuState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.definition is KNOWN:
            if self.metric not in METRICS:
                use = f"use one of {', '.join(METRICS)}, or give a Metric of your own"
                raise ValueError(f"there is no metric {self.metric!r}: {use}")
            object.__setattr__(self, "definition", METRICS[self.metric])
        values = _by_place(self.values, float, number, f"the value of {self.metric}")
        samples = _by_place(self.samples, tuple, numbers, f"the samples of {self.metric}")
        states = _by_place(self.gpu_states, GpuState, None, f"the state of the GPUs of {self.metric}")
        _settle(self, self.metric, values=values, samples=samples, gpu_states=states)

    @property
    def unit(self) -> str:
        return self.definition.unit

    @property
    def worst(self) -> tuple[Where, float]:
        """The place that did worst, and its value. NaN is worse than any number."""
        return min(self.values.items(), key=lambda item: goodness(item[1], self.definition))

    @property
    def spread(self) -> dict[Where, float]:
        """(highest - lowest) / median of the samples behind each value, for places with at least two."""
        every = {place: samples for place, samples in self.samples.items() if len(samples) > 1 and median(samples)}
        if self.definition.simultaneous:
            every = _without_common_course(every)
        usual = {place: abs(median(samples)) for place, samples in every.items()}
        return {place: (max(samples) - min(samples)) / usual[place] for place, samples in every.items() if usual[place]}


def _without_common_course(samples: Mapping[Where, tuple[float, ...]]) -> dict[Where, tuple[float, ...]]:
    """Simultaneous samples, each divided by what most places did at that moment, of their own means. Of an even number
    of places the middle is undecided: then that nothing changed has a vote too, so that of two places only one of which
    changed, none is taken to have changed with it."""
    if len(samples) < 2 or len({len(each) for each in samples.values()}) > 1:
        return dict(samples)
    votes = [[sample / fmean(each) for sample in each] for each in samples.values()]
    nothing = [] if len(votes) % 2 else [[1.0] * len(votes[0])]
    common = [median(at_one_moment) for at_one_moment in zip(*votes, *nothing, strict=True)]
    return {
        place: tuple(sample / course if course else sample for sample, course in zip(each, common, strict=True))
        for place, each in samples.items()
    }


def _settle(made: Reading | Measurement, name: str, **checked: Any) -> None:
    """Leave plain Python where an author may have given numbers and texts of other kinds."""
    for attribute in ("conditions", "details"):
        checked[attribute] = conditions(getattr(made, attribute), f"the {attribute} of {name}")
    for attribute, value in checked.items():
        object.__setattr__(made, attribute, value)


def _by_place(given: Mapping[Any, Any], kind: Any, checked: Any, what: str) -> dict[Where, Any]:
    """`kind`: of the values of which nothing is to be checked, as of nearly all; of a tuple all must be floats."""
    if not isinstance(given, Mapping):
        raise TypeError(f'{what} must be given by place, like {{"gpu0": 1.5}}, not {reprlib.repr(given)}')
    where = f"the places of {what}"
    found = {}
    for at, value in given.items():
        fine = type(value) is kind and (kind is not tuple or all(type(each) is float for each in value))
        if not fine and checked is None:
            raise TypeError(f"{what} must be a {kind.__name__}, not {reprlib.repr(value)}")
        found[at if isinstance(at, Where) else _where(at, where)] = value if fine else checked(value, f"{what} at {at}")
    return found


def _where(given: Any, what: str) -> Where:
    if not isinstance(given, Where | str):
        raise TypeError(f'{what} must be a place or its text, like "gpu0" or "world", not {reprlib.repr(given)}')
    return place.where(given)


def goodness(value: float, metric: Metric) -> float:
    """Higher is better, whatever the metric; NaN is worse than any number."""
    return -math.inf if math.isnan(value) else metric.sign * value
