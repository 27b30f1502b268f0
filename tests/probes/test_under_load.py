"""Of two works that run at once, only the time that they share counts."""

from __future__ import annotations

import math

import pytest

from pytest_gpufleet.probes.collectives.under_load import beside


@pytest.mark.parametrize(("own", "others", "seconds"), [
    # The other ends in the midst of the third.
    ([0.0, 2.0, 4.0, 5.0, 6.0], [0.0, 1.0, 2.0, 3.0, 4.5], 2.0),
    # The other begins in the midst of the first.
    ([0.0, 1.0, 3.0, 5.0], [0.5, 5.5], 2.0),
    ([0.0, 1.0, 2.0, 3.0], [0.0, 10.0], 1.0),
])  # fmt: skip
def test_what_ran_alone_does_not_count(own, others, seconds):
    assert beside(own, others) == seconds


def test_of_works_that_never_met_there_is_no_figure():
    assert math.isnan(beside([0.0, 1.0, 2.0], [3.0, 4.0]))
