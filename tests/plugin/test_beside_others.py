"""What this plugin leaves as it is in the pytest of others."""

from __future__ import annotations

import pytest

from tests.conftest import REPORTS, Runs

ENDINGS = """
    import gc
    import sys
    import weakref

    import pytest
    from pytest_gpufleet import Measurement, not_applicable, not_judged

    HELD = []

    class Thing:
        pass

    @pytest.fixture
    def thing():
        held = Thing()
        HELD.append(weakref.ref(held))
        yield held
        del held

    @pytest.fixture
    def ends_badly(thing):
        yield
        raise OSError(thing)

    @pytest.fixture
    def begins_badly(thing):
        raise OSError(thing)

    def test_passes(thing):
        pass

    @pytest.mark.parametrize("ending", [AssertionError, pytest.skip, not_applicable, not_judged, pytest.xfail])
    def test_ends(thing, ending):
        raise ending(str(thing))  # all but the first raise by themselves

    @pytest.mark.xfail
    def test_is_expected_to_fail(thing):
        raise OSError(thing)

    def test_setup(begins_badly):
        pass

    def test_teardown(ends_badly):
        raise OSError("first")

    @pytest.mark.spmd
    def test_on_ranks(rank):
        assert rank.index == 0

    def test_of_the_world(thing, world):
        def fail(rank):
            raise OSError(rank.index)

        world.run(fail)

    def test_misses(thing, judge):
        judge(Measurement("busbw", {"cpu0": -1.0}, {"collective": "all_reduce", "bytes": 8}))
        raise OSError(thing)

    def test_nothing_is_left():
        sys.last_value = sys.last_exc = sys.last_traceback = None  # pytest's own, for its debugger
        gc.collect()
        assert len(HELD) == 11
        assert [held for held in HELD if held() is not None] == []
"""


@pytest.mark.parametrize("options", [(), ("--rehearse=2", f"--fleet-dir={REPORTS}")], ids=["plain", "rehearsal"])
def test_nothing_of_an_ended_test_stays_alive(run_pytest: Runs, options: tuple[str, ...]) -> None:
    """Frames of a traceback hold whatever the test had: buffers, models, open files."""
    run = run_pytest("-v", "--tb=no", *options, files={"test_inner.py": ENDINGS})
    assert "test_nothing_is_left PASSED" in run.text, run.text
    assert "5 failed, 2 passed, 3 skipped, 2 xfailed, 2 errors" in run.text, run.text
