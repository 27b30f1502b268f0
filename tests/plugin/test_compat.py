"""What the plugin takes from pytest beyond its public names is there, and is what it is taken for."""

from types import SimpleNamespace

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


def test_the_terminal(pytestconfig):
    stream = compat.terminal(pytestconfig)
    assert stream is None or stream.writable()
    none = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=lambda name: None))
    assert compat.terminal(none) is None


def test_the_writers_of_reports(run_pytest):
    conftest = """
    from pytest_gpufleet.plugin import compat

    def pytest_collection_finish(session):
        junit = compat.stop_report_writers(session.config)
        assert junit.logfile.endswith("junit.xml")
    """
    files = {"conftest.py": conftest, "test_inner.py": "def test_it(): pass"}
    run = run_pytest("--junitxml=junit.xml", "--html=report.html", "--self-contained-html", files=files)
    assert run.status == 0, run.text
    assert {path.name for path in run.root.iterdir()} >= {"conftest.py", "test_inner.py"}
    assert not (run.root / "junit.xml").exists()
    assert not (run.root / "report.html").exists()


def test_an_option_that_takes_an_argument_only_behind_an_equals_sign(run_pytest):
    conftest = """
    from pytest_gpufleet.plugin import compat

    def pytest_addoption(parser):
        parser.addoption("--sugar", nargs="?")
        compat.takes_no_argument_alone(parser, "--sugar", "one")

    def pytest_report_header(config):
        return f"sugar: {config.getoption('sugar')} {config.args}"
    """
    files = {"conftest.py": conftest, "test_inner.py": "def test_it(): pass"}
    assert "sugar: one ['test_inner.py']" in run_pytest("--sugar", "test_inner.py", files=files).text
    assert "sugar: two ['test_inner.py']" in run_pytest("--sugar=two", "test_inner.py", files=files).text
    assert "sugar: None" in run_pytest("test_inner.py", files=files).text


def test_a_skip_is_told_where_the_test_stands(run_pytest):
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


def test_assertions_are_explained_by_what_was_given(monkeypatch):
    monkeypatch.setattr("_pytest.assertion.util._reprcompare", None)
    compat.explain_assertions_by(lambda operator, left, right: f"{left} is {right} no more")
    with pytest.raises(AssertionError, match="1 is 2 no more"):
        assert int("1") == int("2")


def test_a_configuration_beside_that_of_the_session(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    config = compat.configuration(["-c", "/dev/null", "--noconftest", "-vv"])
    told = config.hook.pytest_assertrepr_compare(config=config, op="==", left=[1, 2], right=[1, 3])
    assert told[0][0] == "[1, 2] == [1, 3]"
    assert config.get_verbosity() == 2
