"""What this plugin leaves as it is in the pytest of others."""

import json

import pytest

from pytest_gpufleet.plugin import compat
from tests.conftest import REPORTS

ENDINGS = """
    import gc, sys, weakref
    import pytest
    from pytest_gpufleet import Measurement, not_applicable, not_judged

    HELD = []

    @pytest.fixture(params=["", "setup", "teardown"])
    def thing(request):
        held = {"a model", "its data"}  # of which there are weak references
        HELD.append(weakref.ref(held))
        if request.param == "setup":
            raise OSError(held)
        yield held
        if request.param == "teardown":
            raise OSError(held)

    only = pytest.mark.parametrize("thing", [""], indirect=True)

    @pytest.mark.parametrize("ending", [print, OSError, pytest.skip, not_applicable, not_judged, pytest.xfail])
    def test_ends(thing, ending):
        ended = ending(str(thing))
        if ending is OSError:
            raise ended

    @only
    @pytest.mark.xfail
    def test_is_expected_to_fail(thing):
        raise OSError(thing)

    @only
    @pytest.mark.parametrize("first", [0])
    def test_of_the_world(thing, first, world):
        world.run(lambda rank: rank.index // first)

    @only
    def test_misses(thing, judge):
        judge(Measurement("busbw", {"cpu0": -1.0}, {"collective": "all_reduce", "bytes": 8}))
        raise OSError(thing)

    def test_nothing_is_left():
        sys.last_value = sys.last_exc = sys.last_traceback = None  # pytest's own, for its debugger
        gc.collect()
        assert [held() is None for held in HELD] == [True] * 21
"""


@pytest.mark.parametrize("options", [(), ("--rehearse=2", f"--fleet-dir={REPORTS}")], ids=["plain", "rehearsal"])
def test_nothing_of_an_ended_test_stays_alive(run_pytest, options):
    """Frames of a traceback hold whatever the test had: buffers, models, open files."""
    run = run_pytest("-v", "--tb=no", *options, files={"test_inner.py": ENDINGS})
    assert "test_nothing_is_left PASSED" in run.text, run.text


SUBTESTS = """
    def test_each_rank(world, subtests):
        for number, found in enumerate(world.run(lambda rank: rank.index)):
            with subtests.test(rank=number):
                assert found == 0

    def test_all_well(subtests, world):
        with subtests.test("link"):
            assert True
"""


def test_a_check_with_subtests_fails_once_and_others_report_it_too(run_pytest):
    """As docs/trackers.md has it: subtests of pytest 9, and a CTRF report beside ours."""
    pytest.importorskip("_pytest.subtests")
    pytest.importorskip("ctrf")
    options = ("--rehearse=2", f"--fleet-dir={REPORTS}", "--ctrf=ctrf.json")
    run = run_pytest(*options, files={"test_inner.py": SUBTESTS})
    assert (run.status, run.outcomes) == (1, {"test_each_rank": "failed", "test_all_well": "passed"})
    results = json.loads((run.root / "ctrf.json").read_text())["results"]
    assert (results["summary"]["tests"], results["summary"]["failed"]) == (2, 1)


@pytest.fixture
def tmp_path(tmp_path):
    """Made of the one that it hides."""
    return tmp_path / "deeper"


def test_the_fixtures_of_a_test(request, tmp_path):
    hidden, own = compat.fixture_definitions(request.node)["tmp_path"]
    assert hidden.func.__module__ == "_pytest.tmpdir"
    assert (own.func.__module__, own.argnames) == (__name__, ("tmp_path",))
    assert compat.argument_names(request.node) == ("request", "tmp_path")


def test_a_skip_is_reported_where_the_test_stands(run_pytest):
    files = {
        "test_inner.py": """
        from pytest_gpufleet import not_applicable
        from pytest_gpufleet.plugin import compat

        def test_raised():
            raise compat.skip_of_the_test("of the test")

        def test_not_applicable():
            not_applicable("no such hardware")
    """
    }
    run = run_pytest("-rs", files=files)
    assert "SKIPPED [1] test_inner.py:5: of the test" in run.text
    assert "SKIPPED [1] test_inner.py:8: not applicable: no such hardware" in run.text
