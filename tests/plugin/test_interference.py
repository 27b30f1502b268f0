"""Plugins and conftest files around the suite: what they cannot make pass, and what is told of them."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_gpufleet.plugin import interference, what_ran
from pytest_gpufleet.plugin.check_outcome import _outcome
from pytest_gpufleet.report.page.machine_section import facts
from pytest_gpufleet.verdict.verdict import conclude
from tests.conftest import ACCEPTANCE, RECORDED, ROOT, FleetRun

# As a machine that fails each of the checks below, of which something tries to make each pass.
DEFECTS = """
gpus[2]['ecc_mode'] = [0, 1]
gpus[2]['mig_mode'] = [1, 1]
gpus[2]['compute_mode'] = 3
gpus[2]['persistence_mode'] = 0
gpus[2]['power_limit_watts'] = 500.0
gpus[2]['application_clock_mhz'] = [1, 1]
gpus[2]['recovery_action'] = 2
gpus[2]['inforom_valid'] = False
host['shared_memory_bytes'] = 64 << 20
gpus[2]['pcie_width'] = 8
gpus[2]['nvlink_states'][4] = 0
for gpu in gpus: gpu['remapped_rows'] = Unavailable('NVML: Not Supported', False)
"""
ABOVE = """
from types import SimpleNamespace
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except BaseException:
        if item.name != "test_ecc_is_on":
            raise

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except BaseException:
        if pyfuncitem.name != "test_mig_is_off":
            raise
        return True

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_compute_mode_is_default":
            item.add_marker(pytest.mark.xfail)
        if item.name == "test_persistence_mode_is_on":
            item.obj = lambda machine: None
        if item.name == "test_nvlinks_are_up":
            item.obj = item.module.test_nvlinks_are_up = lambda **fixtures: None

def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_pcie_width_is_full":
        metafunc.parametrize("machine", [SimpleNamespace(gpus=())], ids=[pytest.HIDDEN_PARAM])

def pytest_runtest_logreport(report):
    if report.skipped and report.nodeid.endswith("test_no_memory_error_is_recorded"):
        report.outcome = "passed"

@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    session.exitstatus = 0

@pytest.fixture
def machine_now(machine):
    return lambda fact: [gpu[fact] for gpu in machine.gpus]
"""
LOADED = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return pyfuncitem.name == "test_power_limit_is_default" or None

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    if item.name == "test_application_clocks_are_default":
        call.excinfo = None
    report = yield
    if item.name == "test_no_recovery_is_pending":
        report.outcome, report.wasxfail = "passed", ""
    if item.name == "test_compute_mode_is_default":
        report.outcome = "passed"
    return report
"""
NAMED = """
import pytest
from pytest_gpufleet import not_applicable

def pytest_runtest_setup(item):
    if item.name == "test_inforom_is_valid":
        not_applicable("somebody says so")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if item.name == "test_shared_memory_is_large_enough":
        return pytest.TestReport(item.nodeid, item.location, {}, "passed", None, call.when)
"""
OUTCOMES = {
    "test_ecc_is_on": "failed",
    "test_mig_is_off": "failed",
    "test_compute_mode_is_default": "failed",
    "test_persistence_mode_is_on": "skipped",
    "test_power_limit_is_default": "skipped",
    "test_application_clocks_are_default": "failed",
    "test_no_recovery_is_pending": "failed",
    "test_inforom_is_valid": "not applicable",
    "test_shared_memory_is_large_enough": "failed",
    "test_pcie_links_stayed_clean": "passed",
    "test_pcie_width_is_full": "not applicable",
    "test_nvlinks_are_up": "skipped",
    "test_no_memory_error_is_recorded": "skipped",
}
# Code in the place of what the suite's files say, and a plugin that says that it is one of pytest's.
REPLACING = """
import types
import pytest

class Replaced(pytest.Module):
    def _getobj(self):
        module = types.ModuleType("replaced")
        vars(module).update(vars(super()._getobj()))
        exec(compile("def test_ecc_is_on(machine): pass", self.path, "exec"), vars(module))
        return module

def pytest_pycollect_makemodule(module_path, parent):
    return Replaced.from_parent(parent, path=module_path)

def pytest_collection_finish(session):
    for item in session.items:
        if item.name == "test_mig_is_off":
            item.obj.__code__ = (lambda machine: None).__code__
"""
HIDING = {
    "hiding-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hiding\nVersion: 1.0\n",
    "hiding-1.0.dist-info/entry_points.txt": "[pytest11]\nhiding = hiding\n",
    "hiding.py": "import _pytest.runner\n__name__, __file__ = '_pytest.hiding', _pytest.runner.__file__\n",
}
# What a project may well have beside the suite.
HEALTHY = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--site")

@pytest.fixture
def of_nobody():
    return 1

def pytest_generate_tests(metafunc):
    if "site" in metafunc.fixturenames:
        metafunc.parametrize("site", ["north", "south"])

def pytest_sessionfinish(session):
    pass

def pytest_gpufleet_finding(finding):
    pytest.fail("no dashboard")

def pytest_gpufleet_fault(fault):
    raise OSError("no queue of tickets")

def pytest_gpufleet_verdict(record):
    pytest.skip("nobody is there")
"""
BESIDE = """
import pytest

@pytest.fixture
def judge():
    return None

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield)
"""


@pytest.fixture
def beside_the_suite(run_pytest: Callable[..., FleetRun], tmp_path: Path) -> Callable[..., FleetRun]:
    """A run on the recorded machine of a folder that holds the suite and the files given."""

    def run(files: dict[str, str], *arguments: str, **environment: str) -> FleetRun:
        shutil.copytree(ACCEPTANCE, tmp_path / "acceptance")
        for name, text in {"pytest.ini": "[pytest]\n", **files}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(dedent(text))
        options = ("--gpus=4", "--fleet-dir=runs", "--fleet-interval=10", *RECORDED, f"--rootdir={tmp_path}")
        path = f"{tmp_path}:{ROOT}"
        return run_pytest(*options, "-c", tmp_path / "pytest.ini", *arguments, PYTHONPATH=path, **environment)

    return run


def test_no_hook_around_a_check_makes_it_pass_unseen(beside_the_suite: Any, tmp_path: Path) -> None:
    run = beside_the_suite(
        {"conftest.py": ABOVE, "loaded.py": LOADED, "named.py": NAMED},
        tmp_path / "acceptance",
        "-p",
        "loaded",
        "-k",
        " or ".join(OUTCOMES),
        CHANGE=DEFECTS,
        PYTEST_PLUGINS="named",
        PYTEST_ADDOPTS="--durations=1 --metadata token hunter2hunter2",
    )
    assert run.outcomes == OUTCOMES, run.text
    assert (run.record.verdict, run.status) == ("REJECTED", 1)
    told = {(each.kind, each.name, Path(each.file).name) for each in run.record.interference}
    assert told == {
        ("hook", "pytest_runtest_call", "conftest.py"),
        ("hook", "pytest_pyfunc_call", "conftest.py"),
        ("hook", "pytest_generate_tests", "conftest.py"),
        ("hook", "pytest_collection_modifyitems", "conftest.py"),
        ("hook", "pytest_pyfunc_call", "loaded.py"),
        ("hook", "pytest_runtest_makereport", "loaded.py"),
        ("hook", "pytest_runtest_makereport", "named.py"),
        ("hook", "pytest_runtest_setup", "named.py"),
        ("fixture", "machine_now", "conftest.py"),
    }
    # Without the failures that were seen all the same.
    checks = {name: replace(check, outcome="passed") for name, check in run.record.checks.items()}
    verdict, reasons = conclude(replace(run.record, checks=checks, faults=[]))
    assert verdict == "INCOMPLETE"
    assert {str(each) for each in run.record.interference} <= set(reasons)
    fixture = f"the fixture machine_now of {tmp_path / 'conftest.py'} took part in"
    assert f"{fixture} test_9_endurance.py::test_pcie_links_stayed_clean" in reasons
    page, session = dict(facts(run.record)["What else ran"]), run.record.sessions[0]
    assert "loaded.py" in page["Plugins of pytest"]
    assert str(tmp_path / "conftest.py") in page["conftest.py"]
    assert page["PYTEST_ADDOPTS"] == "--durations=1 --metadata token (hidden)"
    assert (page["PYTEST_PLUGINS"], page["-p"]) == ("named", f"no:cacheprovider {RECORDED[1]} loaded")
    assert session.ini_file == str(tmp_path / "pytest.ini")
    assert "loaded.py" in (run.folders[0] / "report.html").read_text()


def test_other_code_in_the_place_of_a_check_is_told(beside_the_suite: Any, tmp_path: Path) -> None:
    suite = tmp_path / "acceptance" / "test_1_inventory.py"
    files = {"conftest.py": REPLACING, **HIDING}
    run = beside_the_suite(files, suite, "-k", "ecc_is_on or mig_is_off", CHANGE=DEFECTS)
    assert run.outcomes == {"test_ecc_is_on": "passed", "test_mig_is_off": "skipped"}, run.text
    (told,) = run.record.interference
    assert (told.kind, told.name) == ("hook", "pytest_pycollect_makemodule")
    (session,) = run.record.sessions
    page = dict(facts(run.record)["What else ran"])
    assert str(tmp_path / "hiding.py") in [each.file for each in session.other_files]
    assert str(tmp_path / "hiding.py") in page["Other Python files"]
    assert str(suite) not in page["Other Python files"]
    assert page["PYTHONPATH"] == f"{tmp_path}:{ROOT}"


def test_what_python_imports_when_it_starts_is_on_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever it is; and what stands in the place of a package that only ranks import."""
    for name in ("sitecustomize", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "no-packages")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("sitecustomize")
    other = {Path(file).name for file in what_ran._other_files() if Path(file).parent == tmp_path}
    assert other == {"sitecustomize.py", "torch.py"}
    assert not [file for file in what_ran._other_files() if "-packages/" in file]


class Strange:
    """As packages put them in the place of a module of theirs."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"no {name} here")


def test_no_module_is_loaded_or_asked_to_be_on_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "at_first_use.py").write_text("raise ImportError('what it needs is not installed')")
    spec = importlib.util.spec_from_file_location("at_first_use", tmp_path / "at_first_use.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    for name, module in {"at_first_use": lazy, "strange": Strange(), "left_out": None}.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert str(tmp_path / "at_first_use.py") in {*what_ran._other_files()}


def test_what_leaves_the_suite_alone_is_only_on_record(beside_the_suite: Any, tmp_path: Path) -> None:
    files = {
        "conftest.py": HEALTHY,
        "checks/conftest.py": BESIDE,
        "checks/test_own.py": "def test_own(judge, site):\n    assert judge is None\n",
    }
    run = beside_the_suite(
        files, tmp_path / "acceptance", tmp_path / "checks", "-k", "ecc_is_on or gpus_are_alike or test_own"
    )
    assert set(run.outcomes.values()) == {"passed"}, run.text
    assert run.record.interference == []
    assert run.record.altered == []
    assert [Path(each.file).parent.name for each in run.record.sessions[0].conftests] == [
        tmp_path.name,
        "acceptance",
        "checks",
    ]


def test_a_fixture_in_the_place_of_judge_leaves_no_figures_and_is_told(beside_the_suite: Any, tmp_path: Path) -> None:
    judge = "import pytest\n@pytest.fixture\ndef judge():\n    return lambda *figures, **how: None\n"
    node = tmp_path / "acceptance" / "test_4_each_gpu.py::test_memory_bandwidth"
    run = beside_the_suite({"conftest.py": judge}, node, "--gpus=auto", "--rehearse=1")
    assert set(run.outcomes.values()) == {"passed"}, run.text
    _, reasons = conclude(replace(run.record, run=msgspec.structs.replace(run.record.run, rehearsal=False)))
    name = "test_4_each_gpu.py::test_memory_bandwidth"
    assert f"the fixture judge of {tmp_path / 'conftest.py'} took part in {name}" in reasons
    assert any(f"({name}): passed and left no figure of memory_bandwidth" in reason for reason in reasons)


def test_an_expected_failure_is_excused_only_where_pytest_says_so() -> None:
    def phase(outcome: str, **more: str) -> Any:
        kind = {name: outcome == name for name in ("passed", "failed", "skipped")}
        return SimpleNamespace(when="call", longrepr=None, longreprtext="", **kind, **more), AssertionError("so it is")

    assert _outcome([phase("skipped", wasxfail="known")]) == ("skipped", "known")
    assert _outcome([phase("passed", wasxfail="known")]) == ("failed", "AssertionError: so it is")
    assert _outcome([phase("passed")]) == ("failed", "AssertionError: so it is")


def test_a_body_is_that_of_the_check_after_which_it_is_called() -> None:
    body = interference.is_of_the_suite
    module = SimpleNamespace(test_a=body, test_b=body)

    def own(name: str, nodeid: str, path: str = interference.__file__) -> bool:
        item: Any = SimpleNamespace(obj=body, module=module, originalname=name, nodeid=nodeid, path=Path(path))
        return interference._is_its_own_body(item)

    assert own("test_a", "acceptance/interference.py::test_a[fp16]")
    assert not own("test_a", "acceptance/interference.py::test_b")
    assert not own("test_a", "acceptance/test_2_health.py::test_a")
    assert not own("test_a", "acceptance/interference.py::test_a", "elsewhere/what_ran.py")


def test_a_check_on_fewer_ranks_than_its_file_says_is_told(beside_the_suite: Any, tmp_path: Path) -> None:
    conftest = """
    import pytest

    def pytest_collection_modifyitems(items):
        for item in items:
            item.add_marker(pytest.mark.world_size(1))
    """
    node = tmp_path / "acceptance" / "test_4_each_gpu.py::test_matrix_product_is_exact[fp32]"
    run = beside_the_suite({"conftest.py": conftest}, node, "--gpus=auto", "--rehearse=2")
    assert set(run.outcomes.values()) == {"passed"}, run.text
    (told,) = run.record.interference
    assert (told.name, told.file) == ("pytest_collection_modifyitems", str(tmp_path / "conftest.py"))


@pytest.mark.parametrize(
    ("hook", "kind", "name"),
    [
        ("pytest_collection_modifyitems(items)", "hook", "pytest_collection_modifyitems"),
        ("pytest_runtest_logstart(nodeid)", "marker", "needs"),
    ],
)
def test_a_need_that_no_machine_meets_is_told(
    beside_the_suite: Any, tmp_path: Path, hook: str, kind: str, name: str
) -> None:
    """By which a check does not apply, whoever gave it to it, and when."""
    conftest = f"""
    import pytest

    kept = []

    def pytest_collection_finish(session):
        kept.extend(session.items)

    def {hook}:
        for item in locals().get("items", kept):
            item.add_marker(pytest.mark.needs(ranks=99))
    """
    node = tmp_path / "acceptance" / "test_1_inventory.py::test_ecc_is_on"
    run = beside_the_suite({"conftest.py": conftest}, node, CHANGE=DEFECTS)
    assert run.outcomes == {"test_ecc_is_on": "not applicable"}, run.text
    (told,) = run.record.interference
    assert (told.kind, told.name) == (kind, name)
    assert str(told) in run.record.reasons


def test_every_harmless_plugin_has_a_reason() -> None:
    assert all(interference.HARMLESS.values())


@pytest.mark.parametrize(
    ("file", "module", "harmless"),
    [
        ("SITE/pytest_benchmark/plugin.py", "pytest_benchmark.plugin", True),
        ("SITE/faker/contrib/pytest/plugin.py", "faker.contrib.pytest.plugin", True),
        ("SITE/pytest_timeout.py", "pytest_timeout", True),
        ("SITE/strange.py", "strange", False),
        ("elsewhere/conftest.py", "pytest_cov.conftest", False),
        ("elsewhere/pytest_cov.py", "pytest_cov", False),
    ],
)
def test_well_known_plugins_that_are_only_installed_are_not_held_against_a_machine(
    file: str, module: str, harmless: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    (site, *_) = {str(dist.locate_file("")) for _, dist in pytestconfig.pluginmanager.list_plugin_distinfo()}
    written: dict[str, Any] = {"__name__": module, "__file__": file.replace("SITE", str(Path(site)))}
    exec("def pytest_runtest_setup(item): ...", written)
    item: Any = SimpleNamespace(path=tmp_path / "test_1_inventory.py", config=pytestconfig)
    assert interference._of_others(written["pytest_runtest_setup"], item) == ("" if harmless else written["__file__"])
