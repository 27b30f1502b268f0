"""How far from the mean of known-good machines a healthy one may be: one-sided tolerance intervals.

ISO 16269-6, for values that are independent. For several GPUs of few machines after R. W. Mee and D. B. Owen, Improved
Factors for One-Sided Tolerance Limits for Balanced One-Way ANOVA Random Models, Journal of the American Statistical
Association 78 (1983).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

PORTION, CONFIDENCE = 0.999, 0.95
STEPS, HALVINGS = 400, 40


@dataclass(frozen=True)
class Interval:
    """Of one GPU of any other machine: `mean` less (or more) `k` times `s` is what 99.9 % of them reach, with a
    confidence of 95 %. `k` is None where one machine says nothing of how machines differ."""

    mean: float
    s: float
    k: float | None


def interval(machines: Sequence[Sequence[Sequence[float]]], floor: float) -> Interval:
    """The interval of a figure: for each machine and each of its places the values of all runs.

    Machines, GPUs of one machine and runs of one GPU vary each by themselves, with degrees of freedom of their own:
    eight GPUs of one board are not eight machines. The three variances add up, with degrees of freedom after
    Satterthwaite. Machines differ by a standard deviation of `floor` at least.
    """
    places = [[fmean(values) for values in machine] for machine in machines]
    means = [fmean(machine) for machine in places]
    between, between_df = _pooled([means])
    within, within_df = _pooled(places)
    runs, runs_df = _pooled([values for machine in machines for values in machine])
    mean, rest = fmean(means), within + runs
    if not between_df:
        return Interval(mean, math.sqrt(rest), None)
    between = max(between, floor**2)
    variance = between + rest
    parts = ((between, between_df), (within, within_df), (runs, runs_df))
    df = variance**2 / sum(part**2 / part_df for part, part_df in parts if part_df)
    # As many independent values would know the mean as well as these machines do.
    n = len(machines) * variance / between
    return Interval(mean, math.sqrt(variance), factor(n, df))


def _pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The variance of values about the mean of their group, and its degrees of freedom."""
    df = sum(len(group) - 1 for group in groups)
    squares = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    return (squares / df, df) if df else (0.0, 0)


@cache
def factor(n: float, df: float) -> float:
    """k of a mean of `n` values and a standard deviation with `df` degrees of freedom: the quantile of the noncentral t
    distribution at the confidence, with noncentrality z sqrt(n), divided by sqrt(n).

    By its definition, so that no table ends: the mean less k s is below the quantile of the portion with the
    probability E[Phi(sqrt(n) (k c - z))], over c = s / sigma, whose density is that of chi / sqrt(df).
    """
    z = NormalDist().inv_cdf(PORTION)
    width = 10 / math.sqrt(2 * df)  # ten standard deviations of c
    low = max(0.0, 1 - width)
    step = (1 + width - low) / STEPS
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    points = [low + (index + 0.5) * step for index in range(STEPS)]
    weights = [step * math.exp(constant + (df - 1) * math.log(c) - df * c * c / 2) for c in points]
    begin, end = 0.0, 100.0
    for _ in range(HALVINGS):
        k = (begin + end) / 2
        confidence = sum(
            weight * math.erfc(math.sqrt(n / 2) * (z - k * c)) / 2 for c, weight in zip(points, weights, strict=True)
        )
        begin, end = (k, end) if confidence < CONFIDENCE else (begin, k)
    return end
