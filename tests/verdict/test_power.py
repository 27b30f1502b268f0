"""What the model says is found and rejected, held against machines made by chance."""

import random
from statistics import fmean

import pytest

from pytest_gpufleet.verdict.noise import Spread
from pytest_gpufleet.verdict.power import Line, found, of_gpu, of_machine, rejected, size_found

KNOWN = Spread(0.008, 0.01, within_df=10_000, between_df=10_000)  # as good as certain
MACHINES, GPUS, DRAWN = 3, 8, 4000


def machine(by_chance: random.Random, slow: float, gpus: int) -> list[float]:
    """The values of a machine whose first GPUs are slow."""
    mean = 1 + by_chance.gauss(0, KNOWN.between)
    every = [mean + by_chance.gauss(0, KNOWN.within) for _ in range(GPUS)]
    return [value * (1 - slow) if number < gpus else value for number, value in enumerate(every)]


@pytest.mark.parametrize("size", [0.0, 0.015, 0.03])
def test_as_many_are_found_as_the_model_says(size):
    by_chance, line = random.Random(31), 0.02
    of_one, of_all = of_gpu(KNOWN, GPUS, 1, 0), of_machine(KNOWN, MACHINES, GPUS, 1, 0)
    one = every_one = 0
    for _ in range(DRAWN):
        values = machine(by_chance, size, 1)
        one += values[0] < fmean(values[1:]) * (1 - line)
        reference = fmean(fmean(machine(by_chance, 0, 0)) for _ in range(MACHINES))
        every_one += fmean(machine(by_chance, size, GPUS)) < reference * (1 - line)
    for seen, expected in ((one, of_one), (every_one, of_all)):
        at_this_line = Line(line, expected.seen, expected.most)
        assert seen / DRAWN == pytest.approx(found(size, at_this_line), abs=0.03)
    assert rejected(of_one) == pytest.approx(0.001, rel=0.1)


def test_a_spread_of_few_machines_may_be_larger_and_no_probability_is_above_what_either_says():
    unsure = of_gpu(Spread(0.01, 0.01, within_df=10), 2, 100, 0.02)
    assert unsure.most / unsure.seen == pytest.approx(1.593, abs=0.01)  # sqrt(10 / 3.94), by tables of chi2
    assert found(unsure.at - unsure.seen, unsure) == pytest.approx(0.159, abs=0.001)
    assert found(unsure.at + unsure.most, unsure) == pytest.approx(0.841, abs=0.001)
    assert found(size_found(0.95, unsure), unsure) == pytest.approx(0.95)


def test_without_noise_everything_beyond_the_line_is_found():
    assert [found(size, Line(0.01, 0, 0)) for size in (0.005, 0.02)] == [0, 1]
    assert rejected(Line(0.01, 0, 0)) == 0
