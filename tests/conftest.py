"""How tests start a pytest of their own: a real process with real ranks, in a folder of its own."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import dedent

import pytest

from pytest_gpufleet.model.language import current_language
from pytest_gpufleet.report import page as report_page
from pytest_gpufleet.verdict.judgement import read
from tests.forked import Forked, Started, Zygote

ROOT = Path(__file__).parents[1]
ACCEPTANCE = ROOT / "acceptance"
EVIDENCE = ROOT / "tests" / "recorded"  # of real machines
INNER = ROOT / "tests" / "inner"  # test modules that tests give to a pytest of their own
RECORDED = ("-p", "tests.machine.recorded")  # options: on a recorded machine
LONGEST = (  # in seconds of the clock, which are not those of the cores: some wait
    "acceptance/test_acceptance.py", "probes/test_culprit.py", "probes/test_training.py", "world/test_faults.py",
    "commands/test_tools.py", "plugin/test_plugin.py",
    "plugin/test_many_nodes.py", "acceptance/test_elsewhere.py", "world/test_start.py", "nodes/test_agent.py",
    "run/test_orphans.py", "run/test_hard_end.py", "acceptance/test_burn_in.py",
)  # fmt: skip
# Hosts of namespaces, where a busy machine's silence is taken for death: they have the machine to themselves (`make
# hosts`).
ALONE = ("nodes/test_faults_of_nodes.py",)
FILES = {"evidence.jsonl", "junit.xml", "report.html", "report.txt", "summary.json"}  # of a run that ended
REPORTS = "runs"  # not pytest-gpufleet's own default, so that a report in a wrong place shows
SECONDS = 600  # far more than any run takes: a run that hangs must not hang the tests
PATIENCE_SECONDS = 600.0  # what is waited for hangs for an hour if it is not ended
TURN_SECONDS = 0.01  # between two looks
# Hundreds of processes that import the same modules: where no bytecode is kept, they compile most of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Not what would change results, but where NVLink multicast is switched off it must stay so. Where CI is set, pytest
# writes whole messages into its summary.
DROPPED = ("PYTEST_", "CUDA_", "NCCL_", "COV_", "CI", "BUILD_NUMBER")
KEPT = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED) or name == "NCCL_NVLS_ENABLE"}


def comes_true(condition):
    """Whether it does in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(TURN_SECONDS)
    return True


def as_on_a_terminal():
    """For `preexec_fn`: whoever runs these tests under nohup or in the background has these signals ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def lead_the_terminal():
    """For `preexec_fn` of a process with a session of its own: its standard input is the terminal of the session."""
    as_on_a_terminal()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@dataclass(frozen=True)
class FleetRun:
    """A pytest process that has ended. `text` is what it printed, stdout and stderr in one."""

    status: int
    text: str
    root: Path

    @property
    def folders(self):
        """The report folders it made."""
        return sorted((self.root / REPORTS).glob("*")) if (self.root / REPORTS).is_dir() else []

    @cached_property
    def record(self):
        (folder,) = self.folders
        return read(folder / "evidence.jsonl")

    @property
    def outcomes(self):
        """Outcome of each test by its name, without file and class."""
        return {check.id.rsplit("::", 1)[-1]: check.outcome for check in self.record.checks.values()}

    def check(self, name):
        (check,) = (check for check in self.record.checks.values() if check.id.endswith(f"::{name}"))
        return check


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for():
    """No machine loses its power here. Evidence is forced onto the disk line by line, 330 lines a run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_figures_are_drawn_once():
    """matplotlib takes seconds for the pictures of a run, and most of the pages that are made here show the same."""

    def once(draw, of):
        drawn = {}

        def drawing(*shown):
            known = repr((current_language(), of(*shown)))
            if known not in drawn:
                drawn[known] = draw(*shown)
            return drawn[known]

        return drawing

    figures = once(report_page._curves, lambda *shown: shown)
    telemetry = once(report_page._telemetry, lambda record: (record.telemetry, record.topology, record.spans))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "_curves", figures)
        patch.setattr(report_page, "_telemetry", telemetry)
        yield


def pytest_configure(config):
    """Pythons are forked: those that tests start, those that what they test starts, and the workers that run the tests.
    `forked.Started` starts one all the same."""
    if subprocess.Popen is not Forked:  # as it is in a worker
        zygote = Zygote()
        patch = pytest.MonkeyPatch()
        patch.setattr(Forked, "nursery", staticmethod(zygote.nursery))
        patch.setattr(subprocess, "Popen", Forked)
        config.add_cleanup(zygote.end)
        config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(items):
    """The files that take longest come first: one that came last would run beside workers with nothing to do."""
    if not os.environ.get("GPUFLEET_ALONE"):
        skipped = pytest.mark.skip(reason="needs the machine to itself: make hosts")
        alone = {ROOT / "tests" / name for name in ALONE}
        for item in items:
            if item.path in alone:
                item.add_marker(skipped)
    order = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def lay_out(root, files):
    for name, content in {"pytest.ini": "[pytest]\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content.read_text() if isinstance(content, Path) else dedent(content))
    return root


def runs(start, folders):
    def run(*arguments, files=None, **environment):
        root = lay_out(folders.mktemp("run"), files or {})
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
        around = {**KEPT, "PYTHONPATH": str(ROOT), **environment}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with start(command, cwd=root, env=around, text=True, **streams) as process:
            try:
                text, _ = process.communicate(timeout=SECONDS)
            except BaseException:
                process.kill()
                raise
        return FleetRun(process.returncode, text, root)

    return run


@pytest.fixture(scope="session")
def run_pytest(tmp_path_factory):
    """run_pytest(*arguments, files={name: text or file}, **environment): pytest in a process and folder of its own."""
    return runs(Forked, tmp_path_factory)


@pytest.fixture
def in_a_session(tmp_path):
    """in_a_session(*arguments): pytest in tmp_path, in a session of its own. What it prints is in the file `log`."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        with (tmp_path / "log").open("w") as log:
            run = subprocess.Popen(
                command, cwd=tmp_path, env={**KEPT, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=as_on_a_terminal,
            )  # fmt: skip
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill()  # its nodes and ranks end by themselves
        run.wait()


PLANTED = """
import os
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker("fresh_world")  # what is planted stays on a rank

@pytest.fixture(autouse=True)
def fault(world):
    world.run(plant, os.environ["FAULT"])
"""


@pytest.fixture(scope="session")
def planted(run_pytest):
    """planted(text, fault, *arguments, files={}, **environment): with the text's `plant(rank, fault)` on every rank."""

    def run(text, fault, *arguments, files=None, **around):
        options = ("-p", "faulty", f"--fleet-dir={REPORTS}")
        files = {"faulty.py": text + PLANTED, **(files or {})}
        return run_pytest(*arguments, *options, files=files, PYTHONPATH=".", FAULT=fault, **around)

    return run


@pytest.fixture(scope="session")
def run_fresh(tmp_path_factory):
    """The same in a fresh Python, as are those that it starts: for tests about what is imported."""
    return runs(Started, tmp_path_factory)


@pytest.fixture(scope="session")
def fleet(run_pytest):
    """fleet(test_module, *arguments, ranks=2, files={}): a test module, as text or a file, rehearsed on CPU ranks."""
    return rehearsal(run_pytest)


def rehearsal(run):
    """`fleet` by run_pytest or by run_fresh."""

    def rehearse(module, *arguments, ranks=2, files=None, **environment):
        options = (f"--rehearse={ranks}", f"--fleet-dir={REPORTS}")
        return run(*options, *arguments, files={"test_inner.py": module, **(files or {})}, **environment)

    return rehearse
