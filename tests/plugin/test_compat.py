"""What the plugin takes from pytest beyond its public names is there, and is what it is taken for."""

import pytest

from pytest_gpufleet.plugin import compat


@pytest.fixture
def tmp_path(tmp_path):
    """Made of the one that it hides."""
    return tmp_path / "deeper"


def test_the_fixtures_of_a_test(request, tmp_path):
    hidden, own = compat.fixture_definitions(request.node)["tmp_path"]
    assert hidden.func.__module__ == "_pytest.tmpdir"
    assert (own.func.__module__, own.argnames) == (__name__, ("tmp_path",))
    assert compat.arguments(request.node) == {"request": request, "tmp_path": tmp_path}


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


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="subtests came with pytest 9")
def test_a_failed_subtest_fails_its_check(fleet):
    run = fleet(
        """
        def test_links(subtests, world):
            for gpu in range(4):
                with subtests.test("link", gpu=gpu):
                    assert gpu % 2 == 0

        def test_all_well(subtests, world):
            with subtests.test("link"):
                assert True
        """
    )
    outcomes = {check.id.partition("::")[2]: check.outcome for check in run.record.checks.values()}
    assert outcomes == {"test_links": "failed", "test_all_well": "passed"}
    assert run.record.verdict == "REHEARSAL"
    assert run.status == 1
