"""How far below its reference a healthy machine may be, and a GPU below the others of its machine.

Healthy ones differ, and each comparison of a run can fail by chance. So the line of a comparison follows from three
things: how much healthy ones differ (Spread), how many comparisons the run makes, and the smallest fault that matters.
By this model fewer than one healthy machine in a thousand is rejected, over all comparisons of its run (Bonferroni)."""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from pytest_gpufleet.model.metric import SpreadRow

REJECTED = 0.001  # of healthy machines, over all comparisons of a run
CONFIDENCE = 0.95  # that the line is low enough, where the spread is known from few machines
# A default spread counts as much as one measured on so many machines and no more: a few lucky machines that agree do
# not draw the line too tightly, and ten machines of a model say half of what its spread is.
DEFAULT_IS_WORTH = 10
STEPS, HALVINGS = 400, 40


@dataclass(frozen=True)
class Line:
    """Of one comparison."""

    at: float  # by what fraction a value may be worse than what it is held against
    sd: float  # the standard deviation of that fraction among healthy ones
    df: float  # the degrees of freedom with which that is known

    @property
    def most(self) -> float:
        """The upper end of its confidence interval, 95 % one-sided: sqrt(df / chi2_0.05) times it."""
        return self.sd * factor(1.0, math.inf, self.df)


@dataclass(frozen=True)
class Spread:
    """Standard deviations of healthy ones, as fractions of the mean (of a ratio: as they are)."""

    within: float  # of GPUs in a machine
    between: float  # of the means of machines
    within_df: float = DEFAULT_IS_WORTH  # the degrees of freedom that each is known with
    between_df: float = DEFAULT_IS_WORTH
    matters: float = 0.0  # the smallest fault that does
    # Where the two were seen, in rows of a profile or in the default; None where the metric has no default.
    seen: tuple[SpreadRow, SpreadRow] | None = None

    def sd(self, places: int = 1) -> float:
        """Of the mean of so many places of any machine."""
        return math.hypot(self.between, self.within / math.sqrt(places))

    def machine_line(self, machines: float, gpus: int, comparisons: int) -> Line:
        """How much worse the mean of the `gpus` of a machine may be than a reference that is the mean of so many
        machines. Of a single GPU, how GPUs differ counts in full."""
        k = factor(_z(comparisons), machines, self.between_df)
        return Line(max(self.matters, k * self.sd(gpus)), self.sd(gpus) * math.sqrt(1 + 1 / machines), self.between_df)

    def gpu_line(self, gpus: int, comparisons: int) -> Line:
        """How much worse a GPU may be than the mean of the others of its machine, where they are `gpus` in all."""
        k, sd = factor(_z(comparisons), math.inf, self.within_df), self.within * math.sqrt(gpus / (gpus - 1))
        return Line(max(self.matters, k * sd), sd, self.within_df)


def pooled(default: float, seen: float, df: float) -> tuple[float, float]:
    """A default standard deviation and one that was seen with `df` degrees of freedom: as one, and its degrees."""
    together = DEFAULT_IS_WORTH + df
    return math.sqrt((DEFAULT_IS_WORTH * default**2 + df * seen**2) / together), together


def _z(comparisons: int) -> float:
    """How many standard deviations a healthy one may be off, if all of them were known."""
    return NormalDist().inv_cdf(1 - REJECTED / max(1, comparisons))


@cache
def factor(z: float, n: float, df: float) -> float:
    """How many times a standard deviation that is known with `df` degrees of freedom the line lies below the mean of
    `n` values, so that with a confidence of 95 % the true quantile `z` is not above it.

    One-sided tolerance factor (ISO 16269-6): the quantile of the noncentral t distribution at the confidence, with
    noncentrality z sqrt(n), divided by sqrt(n). By its definition, so that no table ends: the mean less k s is below
    the quantile with the probability E[Phi(sqrt(n) (k c - z))], over c = s / sigma, whose density is that of chi /
    sqrt(df). A mean that is known for certain, `n` infinite, leaves z over the lower quantile of c."""
    width = 10 / math.sqrt(2 * df)  # ten standard deviations of c
    low = max(0.0, 1 - width)
    step = (1 + width - low) / STEPS
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    points = [low + (index + 0.5) * step for index in range(STEPS)]
    weights = [step * math.exp(constant + (df - 1) * math.log(c) - df * c * c / 2) for c in points]

    def confidence(k: float) -> float:  # Phi(x) = erfc(-x / sqrt(2)) / 2
        off, known = (math.sqrt(n) * (k * c - z) for c in points), (float(k * c > z) for c in points)
        below = (math.erfc(-x / math.sqrt(2)) / 2 for x in off) if math.isfinite(n) else known
        return sum(weight * share for weight, share in zip(weights, below, strict=True))

    begin, end = 0.0, 100.0
    for _ in range(HALVINGS):
        middle = (begin + end) / 2
        begin, end = (middle, end) if confidence(middle) < CONFIDENCE else (begin, middle)
    return end
