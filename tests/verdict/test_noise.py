"""Factors of one-sided tolerance intervals, against what was drawn by chance."""

from statistics import NormalDist

import pytest

from pytest_gpufleet.verdict.noise import factor

Z = NormalDist().inv_cdf(0.999)
# By another way: the 95 % quantile of (z + U / sqrt(n)) / sqrt(chi2 / (n - 1)), from four million draws each.
DRAWN = {2: 49.43, 4: 9.201, 8: 5.689, 13: 4.787, 24: 4.170, 64: 3.673}


@pytest.mark.parametrize("n", DRAWN)
def test_factors_are_those_that_were_drawn(n: int) -> None:
    assert factor(Z, n, n - 1) == pytest.approx(DRAWN[n], rel=0.004)


def test_with_endless_data_the_factor_is_the_quantile() -> None:
    assert factor(Z, 1e7, 1e7) == pytest.approx(Z, abs=0.003)
