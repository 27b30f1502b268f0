"""Checks whose figures miss their limits, and what they do then."""

import pytest

from pytest_gpufleet import LimitMissed, Measurement


# No measurement can give a negative rate, so it misses with a limit and without.
def rate(value):
    return Measurement("busbw", {"world": value}, {"collective": "all_reduce"})


def test_fine(judge):
    judge(rate(1.0), required=False)


def test_two(judge):
    judge(rate(-1.0), on_miss=lambda: "the first cable")
    judge(rate(-2.0), on_miss=lambda: "the second cable")
    judge(rate(1.0), required=False)


def test_loop_in_a_with(judge, tmp_path):
    with open(tmp_path / "file", "w"):
        for value in (-1.0, -2.0):
            (lambda: judge(rate(value)))()


def test_assertion_after_a_miss(judge):
    judge(rate(-1.0))
    assert "wrong" == "right"


def test_skip_after_a_miss(judge):
    judge(rate(-1.0))
    pytest.skip("enough")


@pytest.mark.xfail(raises=LimitMissed, strict=True)
def test_expected(judge):
    judge(rate(-1.0))


@pytest.fixture
def leak():
    yield
    raise OSError("cannot clean up")


def test_teardown_fails_too(judge, leak):
    judge(rate(-1.0))


@pytest.fixture
def measured_before(judge):
    judge(rate(-1.0))


def test_missed_in_a_fixture(measured_before):
    pass


@pytest.fixture
def measured_after(judge):
    yield
    judge(rate(-1.0))


def test_missed_after_the_body(measured_after):
    pass


def test_raised_by_hand():
    raise LimitMissed([], None, "a limit is missed")
