"""How small a fault a comparison finds, and how often it rejects what is healthy.

All by the model of verdict/noise.py: a healthy value is the mean of its kind times 1 + between + within, both normal.
A second measurement changes nothing here: how much healthy ones differ is for the most part of the chips, which are
the same when they are measured again. So what is found is found twice, and a healthy one that misses misses twice.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from pytest_gpufleet.verdict.noise import Spread, factor, gpu_line, machine_line

NORMAL = NormalDist()


@dataclass(frozen=True)
class Line:
    """Of one comparison: by what fraction a value may be worse than what it is held against (`at`), and the standard
    deviation of that fraction among healthy ones: by the spread that is known (`seen`), and with this at the upper end
    of its confidence interval, 95 % one-sided (`most`)."""

    at: float
    seen: float
    most: float


def of_machine(spread: Spread, machines: int, gpus: int, comparisons: int, matters: float) -> Line:
    """The mean of a machine's GPUs against a reference of so many machines, which is itself off by their spread."""
    seen = math.hypot(spread.between, spread.within / math.sqrt(gpus)) * math.sqrt(1 + 1 / machines)
    at = machine_line(spread, machines, gpus, comparisons, matters)
    return Line(at, seen, seen * _upper(spread.between_df))


def of_gpu(spread: Spread, gpus: int, comparisons: int, matters: float) -> Line:
    """A GPU against the mean of the others, where they are `gpus` in all."""
    seen = spread.within * math.sqrt(gpus / (gpus - 1))
    return Line(gpu_line(spread, gpus, comparisons, matters), seen, seen * _upper(spread.within_df))


def _upper(df: float) -> float:
    """How many times one that is known with so many degrees of freedom the true standard deviation may be:
    sqrt(df / chi2_0.05)."""
    return factor(1.0, math.inf, df)


def found(size: float, line: Line) -> float:
    """The probability that what is slower by the fraction `size` is found, by whichever of the two standard deviations
    finds less of it: below the line that is the smaller one."""
    return min(_cdf(size - line.at, line.seen), _cdf(size - line.at, line.most))


def size_found(probability: float, line: Line) -> float:
    """From what size on a fault is found with a probability of at least one half."""
    return line.at + NORMAL.inv_cdf(probability) * line.most


def rejected(line: Line) -> float:
    """The probability that the comparison rejects what is healthy, at most."""
    return _cdf(-line.at, line.most)


def _cdf(above: float, sd: float) -> float:
    return NORMAL.cdf(above / sd) if sd else float(above >= 0)
