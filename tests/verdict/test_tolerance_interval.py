"""Factors and intervals of calibration, against what was drawn by chance."""

import random
from statistics import NormalDist

import pytest

from pytest_gpufleet.verdict.across_runs.calibration import PORTION, Z, interval
from pytest_gpufleet.verdict.noise import factor

# By another way: the 95 % quantile of (z + U / sqrt(n)) / sqrt(chi2 / (n - 1)), from four million draws each.
DRAWN = {2: 49.43, 4: 9.201, 8: 5.689, 13: 4.787, 24: 4.170, 64: 3.673}


@pytest.mark.parametrize("n", DRAWN)
def test_factors_are_those_that_were_drawn(n: int) -> None:
    assert factor(Z, n, n - 1) == pytest.approx(DRAWN[n], rel=0.004)


def test_with_endless_data_the_factor_is_the_quantile() -> None:
    assert factor(Z, 1e7, 1e7) == pytest.approx(Z, abs=0.003)


def test_machines_of_one_gpu_are_independent_values() -> None:
    found = interval([[[value]] for value in (98.0, 100.0, 101.0, 101.0)], floor=0.0)
    assert (found.mean, found.s, found.k) == pytest.approx((100.0, 2**0.5, 9.214), abs=0.002)


def test_one_machine_says_nothing_of_how_machines_differ() -> None:
    found = interval([[[99.0], [101.0], [100.0]]], floor=0.3)
    assert (found.mean, found.s, found.k) == (100.0, 1.0, None)


def test_the_gpus_of_a_machine_are_not_so_many_machines() -> None:
    """Of 4 machines with 8 GPUs each that differ as machines: as uncertain as 4 values, and not as 32."""
    alike = interval([[[value]] * 8 for value in (98.0, 100.0, 101.0, 101.0)], floor=0.0)
    assert alike.k == pytest.approx(9.214, abs=0.002)
    # And where only the GPUs of a machine differ, far less uncertain.
    differ = interval([[[98.0], [100.0], [101.0], [101.0]]] * 4, floor=0.01)
    assert differ.k is not None
    assert 3.09 < differ.k < 5


def test_machines_that_agree_by_chance_still_differ_a_little() -> None:
    found = interval([[[100.0]], [[100.0]], [[100.0]], [[100.0]]], floor=0.3)
    assert (found.s, found.k) == pytest.approx((0.3, 9.214), abs=0.002)


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.0), (1.0, 1.0), (0.3, 1.0)])
@pytest.mark.parametrize("machines", [3, 6])
def test_the_promise_is_kept(between: float, within: float, machines: int) -> None:
    """Of many calibrations 95 % must have a limit that 99.9 % of all GPUs reach."""
    chance = random.Random(machines)
    reached = NormalDist(0.0, (between**2 + within**2) ** 0.5).inv_cdf(1 - PORTION)
    kept = 0
    for _ in range(200):
        middles = [chance.gauss(0.0, between) for _ in range(machines)]
        found = interval([[[chance.gauss(middle, within)] for _ in range(4)] for middle in middles], floor=0.0)
        assert found.k is not None
        kept += found.mean - found.k * found.s <= reached
    assert kept >= 0.91 * 200  # 95 %, less two and a half standard deviations of 200 trials
