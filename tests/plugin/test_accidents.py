"""What happens by accident: options, variables, plugins and files of a project, around the suite.

On a recorded machine, with a suite of two files. What failed stays failed and what was left out leaves the verdict
INCOMPLETE, whatever happens beside it, or there is no run at all."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import pytest

from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.verdict import concluded
from tests.conftest import ACCEPTANCE, RECORDED, REPORTS, ROOT
from tests.runs import facts_on_the_page

FILES = ("test_2_health.py", "test_9_endurance.py")
SUITE = {f"acceptance/{name}": ACCEPTANCE / name for name in ("conftest.py", *FILES)}
IN_FILES = re.compile("|".join(FILES)).match
# Every level asks for these files of the suite alone: a run of them can be ACCEPTED.
SMALL_SUITE = f"""
from pytest_gpufleet.model.suite import Suite

def pytest_configure():
    of_all = Suite.required
    Suite.required = lambda *asked, **named: [name for name in of_all(*asked, **named) if name.startswith({FILES})]
"""
OPTIONS = ("acceptance", "--gpus=4", "--fleet-level=quick", f"--fleet-dir={REPORTS}", *RECORDED)
DEFECT, FAILED = "gpus[2]['remapped_rows'] = [0, 1, 0, 1]", "test_no_memory_error_is_recorded"
XID = "acceptance/test_2_health.py::test_no_grave_xid_in_the_kernel_log"
STEPWISE = {"last_failed": XID, "last_test_count": None, "last_cache_date_str": "2026-11-23T00:00:00"}

# Plugins that are not installed here, as far as they touch the tests of others.
ASYNC = """
import asyncio, inspect, pytest

def pytest_addoption(parser):
    parser.addini("asyncio_mode", "")

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
        return True
"""
RANDOM_ORDER = """
import random, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    random.Random(7).shuffle(items)
"""
RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_addoption(parser):
    parser.addoption("--reruns", type=int)

def pytest_runtest_protocol(item, nextitem):
    for attempt in range(item.config.option.reruns + 1):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = attempt < item.config.option.reruns and any(report.failed for report in reports)
        for report in reports:
            if again and report.failed:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
        if not again:
            return True
        item._initrequest()
"""
FIXTURE = "import pytest\n\n@pytest.fixture\ndef machine():\n    return None\n"
ONCE_WRONG = "attempts = []\ndef test_it():\n    attempts.append(1)\n    assert len(attempts) > 1\n"


@dataclass(frozen=True)
class Accident:
    """Arguments, lines of the ini file, other files and variables."""

    arguments: tuple[str, ...] = ()
    ini: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, run, change=""):
        files = {**SUITE, "small.py": SMALL_SUITE, "pytest.ini": f"[pytest]\n{self.ini}\n", **self.files}
        return run(*OPTIONS, "-p", "small", *self.arguments, files=files, CHANGE=change, **self.variables)


def cached(name, value):
    return {f".pytest_cache/v/cache/{name}": json.dumps(value)}


def plugin(text):
    return {"arguments": ("-p", "other"), "files": {"other.py": text}}


CACHE = ("-p", "cacheprovider", "-p", "stepwise")
HARMLESS = {  # several at once, as far as they let each other be
    "-W error, --strict, a conftest.py above, --trace-config": Accident(
        ("-W", "error", "--strict-markers", "--strict-config", "--trace-config", "-n", "0"),
        ini="xfail_strict = true",
        files={"conftest.py": "import pytest\n\n@pytest.fixture\ndef site():\n    return 1\n"},
    ),
    "--import-mode=importlib, --doctest-modules": Accident(("--import-mode=importlib", "--doctest-modules")),
    "--import-mode=append, usefixtures, --timeout": Accident(
        ("--import-mode=append", "--timeout=0.01"), "usefixtures = tmp_path capsys", {"acceptance/__init__.py": ""}
    ),
    "asyncio_mode, random order": Accident(**plugin(ASYNC + RANDOM_ORDER), ini="asyncio_mode = auto"),
    "--reruns, -p no:html": Accident(
        ("-p", "other", "--reruns=2", "-p", "no:html", "-p", "no:metadata"), files={"other.py": RERUNS}
    ),
    "--lf, and none failed": Accident((*CACHE, "--lf")),
    "--ff, -p no:terminal": Accident((*CACHE, "--ff", "-p", "no:terminal"), files=cached("lastfailed", {XID: True})),
}
SHORTENED = {
    "-k": Accident(("-k", "xid or memory_error")),
    "--deselect": Accident((f"--deselect={XID}",)),
    "--ignore": Accident(("--ignore=acceptance/test_9_endurance.py",)),
    "--lf": Accident((*CACHE, "--lf"), files=cached("lastfailed", {XID: True})),
    "--sw": Accident((*CACHE, "--sw"), files=cached("stepwise", STEPWISE)),
    "addopts": Accident(ini="addopts = -k memory_error"),
    "session_timeout": Accident(ini="session_timeout = 0.01"),
    "a check marked as skipped": Accident(
        files={"conftest.py": "def pytest_collection_modifyitems(items):\n    items[0].add_marker('skip')\n"}
    ),
    "--setup-only": Accident(("--setup-only",)),
}
REFUSED = {
    "-n": (Accident(("-n", "2")), "-n and --dist do not go together"),
    "--dist": (Accident(("--dist=each", "--tx=popen")), "-n and --dist do not go together"),
    "a part of this plugin": (Accident(("-p", "no:gpufleet-output")), "leave out -p no:gpufleet-output"),
    "PYTEST_PLUGINS": (Accident(variables={"PYTEST_PLUGINS": "nowhere"}), "nowhere"),
    "a fixture machine": (Accident(files={"conftest.py": FIXTURE}), "the fixture machine of "),
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
def test_it_changes_nothing(what, run_pytest, monkeypatch):
    run = HARMLESS[what].run(run_pytest, DEFECT)
    assert [name for name, outcome in run.outcomes.items() if outcome == "failed"] == [FAILED], run.text
    assert (run.record.verdict, run.status) == ("REJECTED", 1), run.text
    checks = {name: replace(check, outcome="passed", failed_by="") for name, check in run.record.checks.items()}
    of_all = Suite.required
    monkeypatch.setattr(Suite, "required", lambda *how, **more: [*filter(IN_FILES, of_all(*how, **more))])
    assert concluded(replace(run.record, checks=checks, faults=[]))[0] == "ACCEPTED", run.text


def test_an_end_at_the_first_failure_changes_nothing_where_there_is_none(run_pytest):
    run = Accident(("--maxfail=1",)).run(run_pytest)
    assert (run.record.verdict, run.status) == ("ACCEPTED", 0), run.text


@pytest.mark.parametrize("what", SHORTENED)
def test_it_leaves_checks_out(what, run_pytest):
    run = SHORTENED[what].run(run_pytest)
    assert (run.record.verdict, run.status) == ("INCOMPLETE", 10), run.text


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused(what, run_pytest):
    accident, words = REFUSED[what]
    run = accident.run(run_pytest)
    assert (run.status in (1, 4), run.folders) == (True, []), run.text
    assert words in run.text


def test_a_test_that_is_run_again_until_it_passes_has_failed(run_pytest):
    files = {"other.py": RERUNS, "acceptance/test_own.py": ONCE_WRONG}
    run = Accident(("-p", "other", "--reruns=2"), files=files).run(run_pytest)
    assert (run.outcomes["test_it"], run.record.verdict, run.status) == ("failed", "REJECTED", 1), run.text


def test_warnings_that_are_errors_from_the_start_change_nothing(run_fresh):
    run = Accident(("--assert=plain",), variables={"PYTHONWARNINGS": "error"}).run(run_fresh)
    assert (run.record.verdict, run.status) == ("ACCEPTED", 0), run.text


def test_what_else_ran_is_on_record(run_fresh, tmp_path):
    site = tmp_path / "sitecustomize.py"
    site.write_text("import sys\nsys.ran = sys.modules.pop(__name__)\n")  # as who does not want to be seen
    other = "import sys\nassert sys.ran\n"
    around = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = Accident(("-p", "other"), files={"other.py": other, "conftest.py": ""}, variables=around).run(run_fresh)
    (session,) = run.record.sessions
    versions = {each.name: each.version for each in session.plugins}
    assert (versions["xdist"], versions["other"]) == (version("pytest-xdist"), "")
    sums = {each.file: each.sha256 for each in session.conftests}
    conftests = (run.root / "conftest.py", run.root / "acceptance/conftest.py")
    assert sums == {str(path): sha256(path) for path in (*conftests, site)}
    page = facts_on_the_page(run.record)
    assert f"xdist {versions['xdist']}" in page["Plugins of pytest"]
    assert str(run.root / "conftest.py") in page["conftest.py, sitecustomize.py"]
