"""Who is worse than its like: a place than its peers, a run or a host than most, a GPU than it was itself."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.measurement import Measurement, goodness
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.place import Where

TOLERANCE = 0.03  # of what has no tolerance among peers
SIGMAS = 3
FIXED = {"ratio": 1.0, "K": 100.0}  # by unit: a ratio is a fraction already; one kelvin counts as a per cent
MAD_TO_SIGMA = 1.4826  # of a normal distribution (Rousseeuw and Croux 1993)

GpuIds = tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A metric under conditions; the places that it has a value for are another matter."""

    name: str
    conditions: tuple[tuple[str, Condition], ...]
    # Not part of what makes two figures the same: a later version may word it otherwise.
    metric: Metric = field(compare=False)

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.metric.peer_tolerance is None else self.metric.peer_tolerance

    def worst(self, values: Iterable[float]) -> float:
        """NaN is worse than any number."""
        return min(values, key=lambda value: goodness(value, self.metric))

    def scale(self, reference: float) -> float:
        """What a difference is a fraction of: the value that it is held against, but for those that can be next to
        nothing, like the share of communication, and kelvin above the peers."""
        return FIXED.get(self.metric.unit, abs(reference))

    def share(self, difference: float, reference: float) -> float:
        """A difference as a fraction of what it is held against."""
        return _fraction(difference, self.scale(reference))


def figure_of(measurement: Measurement) -> Figure:
    return Figure(measurement.metric, tuple(sorted(measurement.conditions.items())), measurement.definition)


@dataclass(frozen=True)
class Outlier:
    """A place of a run that is worse than `reference` by the fraction `worse`, where `allowed` may be; of NaN by 1.
    `among`: how many values were held against it.

    Of a machine over time also the GPUs that it is of, and the value in each run that has one, in their order.
    """

    run: str
    place: Where
    figure: Figure
    value: float
    reference: float
    worse: float
    allowed: float
    among: int
    identity: str = ""
    gpus: GpuIds = ()
    history: Mapping[str, float] = field(default_factory=dict)


def outliers(
    figure: Figure,
    values: Mapping[tuple[str, Where], float],
    reference: float | Mapping[tuple[str, Where], float],
    allowed: float,
    *,
    relative: bool = False,
) -> list[Outlier]:
    """Which of these values, by run and place, are worse than their reference by more than `allowed`. Nothing is worse
    than what is no number, or than 0. `relative`: a ratio too is worse by a
    fraction of its reference."""
    found = []
    for (run, place), value in values.items():
        usual = reference[run, place] if isinstance(reference, Mapping) else reference
        difference = figure.metric.sign * (usual - value)
        worse = _fraction(difference, usual) if relative else figure.share(difference, usual)
        worse = 1.0 if math.isnan(value) else worse
        if math.isfinite(usual) and worse > allowed:
            found.append(Outlier(run, place, figure, value, usual, worse, allowed, len(values)))
    return found


def beside_most(figure: Figure, values: Mapping[tuple[str, Where], float]) -> list[Outlier]:
    """Those that are worse than the median by more than the tolerance among peers (3 % at least) and by more than three
    standard deviations, by the median absolute deviation. Of two the second is held against the first."""
    numbers = [value for value in values.values() if math.isfinite(value)]
    if len(values) < 2 or not numbers:
        return []
    reference, noise = next(iter(values.values())), 0.0
    if len(values) > 2:
        reference = median(numbers)
        noise = SIGMAS * MAD_TO_SIGMA * median(abs(number - reference) for number in numbers)
    return outliers(figure, values, reference, max(TOLERANCE, figure.tolerance, figure.share(noise, reference)))


def _fraction(difference: float, reference: float) -> float:
    return difference / abs(reference) if reference else math.nan
