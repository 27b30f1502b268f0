"""The fixture judge: it records and returns, and what missed fails the check when its body has ended."""

import pytest

from tests.conftest import RECORDED

MODULE = """
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

    def test_dashboard_is_down(judge):
        judge(rate(7.0), required=False)
"""
CONFTEST = """
    import pytest
    from pytest_gpufleet import WORLD

    def pytest_gpufleet_finding(finding):
        if finding.measurement.values == {WORLD: 7.0}:
            pytest.skip("no dashboard")
"""
# Outcome, what failed it, and how many figures are on record.
EXPECTED = {
    "fine": ("passed", "", 1),
    "two": ("failed", "limits", 3),
    "loop_in_a_with": ("failed", "limits", 2),
    "assertion_after_a_miss": ("failed", "other", 1),
    "skip_after_a_miss": ("failed", "other", 1),  # by other limits it would be a skip and no pass
    "expected": ("skipped", "", 1),
    "teardown_fails_too": ("failed", "other", 1),
    "missed_in_a_fixture": ("failed", "limits", 1),
    "missed_after_the_body": ("failed", "other", 1),
    "raised_by_hand": ("failed", "other", 0),  # no figure of it is on record that could be judged again
    "dashboard_is_down": ("passed", "", 1),
}


@pytest.fixture(scope="module")
def run(run_here):
    files = {"test_inner.py": MODULE, "conftest.py": CONFTEST}
    options = ("--gpus=4", "--fleet-dir=runs", *RECORDED, "-W", "error::pytest.PytestWarning")
    return run_here(*options, files=files)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_miss_fails_its_check_whatever_comes_after(run, name):
    check = run.check(f"test_{name}")
    figures = sum(finding.check == check.id for finding in run.record.findings)
    assert (check.outcome, check.failed_by, figures) == EXPECTED[name], check.message


def test_every_cause_comes_before_the_figures(run):
    lines = run.check("test_two").message.splitlines()
    assert lines[:2] == ["the first cable", "the second cable"]
    assert [line.split()[1] for line in lines if "which no measurement can give" in line] == ["-1", "-2"]


def test_what_a_body_raised_after_a_miss_is_told_beside_the_figure(run):
    told = run.text.partition("= gpufleet =")[2].partition("test_inner.py::test_assertion_after_a_miss\n    ")[2]
    figure, text = told.find("-1 GB/s"), told.find("assert 'wrong' == 'right'")
    assert 0 < figure < text < told.find("test_skip_after_a_miss")


def test_a_hook_that_raises_fails_no_check(run):
    assert run.check("test_dashboard_is_down").outcome == "passed"
    assert "pytest_gpufleet_finding of a conftest or plugin raised Skipped: no dashboard" in run.text
