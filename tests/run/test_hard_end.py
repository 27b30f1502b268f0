"""--fleet-deadline: a run is over in time, whatever hangs, and leaves a verdict with its report."""

import json
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from pytest_gpufleet.cli import main
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.plugin.options import _obstacles
from pytest_gpufleet.plugin.supervision import STUCK
from pytest_gpufleet.run import lifetime
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import DEADLINE
from pytest_gpufleet.world.engines.processes import look as alive
from tests.conftest import FILES, REPORTS, comes_true, rehearsal
from tests.run.test_orphans import controller
from tests.run.test_webhook import receiver

__all__ = ["controller", "receiver"]

# The clock of the run stands still until a test moves it: to a day less the time that is left.
CLOCK = """
from pathlib import Path
from types import SimpleNamespace
from pytest_gpufleet.run import interruption
import time

NOW = Path.cwd() / "now"

def monotonic():
    return float(NOW.read_text() or 0) if NOW.exists() else 0.0

interruption.time = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
"""
TOLD, OVER = 86400 - 20, 86400 - 5  # the run is told to end; it has not done so in time
MOVE = """
import os
from pathlib import Path

def now(time):
    Path("next").write_text(str(time))
    os.rename("next", "now")
"""
HANGS_ON_A_RANK = f"""
import os, time, torch
{MOVE}
def hang(rank):
    Path(f"pid{{rank.index}}").write_text(str(os.getpid()))
    torch.distributed.barrier()
    if rank.index == 0:
        now({TOLD})
    time.sleep(3600)

def test_first(): pass
def test_hangs(nccl_group): nccl_group.run(hang)
def test_never(): pass
"""
HANGS_HERE = f"""
import re, time
{MOVE}
def test_first(): FIRST
def test_hangs():
    now({OVER})
    HANG
def test_never(): pass
"""
SWALLOWS = f"""while True:
        try: time.sleep(3600)
        except KeyboardInterrupt: now({OVER})"""
HOLDS = "re.match('(a+)+$', 'a' * 64 + 'b')"


@pytest.fixture
def late(fleet):
    """late(module): its run, which has a deadline of a day on a clock that only its tests move."""

    def run(module, *arguments, **files):
        return fleet(module, "--fleet-deadline=1d", *arguments, files={"conftest.py": CLOCK, **files})

    return run


def test_a_hang_on_a_rank_ends_in_time_with_a_report(late):
    run = late(HANGS_ON_A_RANK)
    assert (run.status, run.record.broken) == (10, DEADLINE), run.text
    assert run.outcomes == {"test_first": "passed"}
    (folder,) = run.folders
    assert {path.name for path in folder.iterdir()} == FILES
    assert not [path for path in run.root.glob("pid*") if alive(int(path.read_text()))]
    assert f" --fleet-resume {REPORTS}/{folder.name}\n" in run.text
    assert run.record.run.deadline_seconds == 86400
    assert main(["verify", str(folder)]) == 0


@pytest.mark.parametrize(("hang", "first", "status"), [(SWALLOWS, "time.sleep(1)", 10), (HOLDS, "assert False", 1)])
def test_a_controller_that_cannot_end_is_ended_and_what_had_failed_stays_failed(late, hang, first, status, receiver):
    receiver.statuses += [503]  # for which there is no second try in the last seconds
    module = HANGS_HERE.replace("HANG\n", f"{hang}\n").replace("FIRST", first)
    run = late(module, "--fleet-prometheus=told.prom", "--fleet-webhook", receiver.url)
    assert (run.status, run.record.broken) == (status, DEADLINE), run.text
    assert run.outcomes == {"test_first": "failed" if status == 1 else "passed"}
    assert run.record.lasted >= run.check("test_first").seconds  # of the run, not of its supervisor's last seconds
    (folder,) = run.folders
    assert {path.name for path in folder.iterdir()} == FILES - {"junit.xml"}
    assert json.loads((folder / "summary.json").read_text())["exit_status"] == status
    assert 'gpufleet_exit_status{host="' in (run.root / "told.prom").read_text()
    assert main(["verify", str(folder)]) == 0
    assert len(receiver.heard) == 1


def test_a_report_that_cannot_be_written_leaves_the_verdict_that_was_told(late):
    hook = f"""import pytest, re
{MOVE}
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    now({OVER})
    {HOLDS}
"""
    run = late("def test_it(): assert False", **{"conftest.py": CLOCK + hook})
    assert (run.status, run.record.exit_status, run.record.broken) == (1, 1, ""), run.text
    (folder,) = run.folders
    assert {path.name for path in folder.iterdir()} == FILES
    assert main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("more", [[], ["--fleet-resume=earlier"]], ids=["new", "resumed"])
def test_a_driver_that_hangs_when_it_is_asked_for_its_gpus_is_no_reason_to_wait(run_pytest, more):
    stuck = f"""{CLOCK}{MOVE}
from pytest_gpufleet.run import target
target.find = lambda *given: (now({OVER}), time.sleep(3600))
"""
    options = ("--gpus=8", f"--fleet-dir={REPORTS}", "--fleet-deadline=1d", *more)
    run = run_pytest(*options, files={"test_inner.py": "def test_never(): pass", "conftest.py": stuck})
    assert (run.status, run.record.verdict, run.record.broken) == (10, "INCOMPLETE", DEADLINE), run.text
    assert run.record.spoiled == [STUCK]
    assert "test_gpu_count): not run: the deadline came first" in " ".join(run.record.reasons)


def test_a_run_that_is_over_in_time_is_as_without_a_deadline(fleet, late):
    """The burn-in of a rehearsal is short, and fits."""
    assert fleet("def test_it(): pass", "--fleet-deadline=10m", "--fleet-level=burnin").status == 0
    assert late("def test_it(): assert False").status == 1


def test_the_child_of_a_session_never_goes_on_with_what_its_program_does(run_fresh):
    run = rehearsal(run_fresh)("def test_it(): pass", "--fleet-deadline=1d", "--fleet-level=none")
    assert (run.status, run.text.count("none")) == (4, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_is_for_the_run(controller, tmp_path, number):
    hanging = HANGS_ON_A_RANK.replace(f"now({TOLD})", "Path('hanging').touch()")
    process = controller(hanging, "--fleet-deadline=1d")
    assert comes_true((tmp_path / "hanging").exists)
    process.send_signal(number)
    assert process.wait(60) == (2 if number == signal.SIGINT else -number)
    assert comes_true(lambda: not any(alive(int(path.read_text())) for path in tmp_path.glob("pid*")))
    (folder,) = tmp_path.glob("out/*")
    if number != signal.SIGKILL:
        assert {path.name for path in folder.iterdir()} == FILES
        assert read(folder / "evidence.jsonl").broken != DEADLINE


def test_a_deadline_that_is_too_short_is_refused_before_anything_starts():
    obstacle = next(filter(None, _obstacles(Options(gpus=8, deadline=30.0))))
    assert "too short to start and to write a report: give 60s or more" in obstacle


@pytest.mark.parametrize(("seconds", "fits"), [(7200.0, False), (7160.0, False), (7130.0, True)])
@pytest.mark.parametrize(("level", "asked"), [("burnin", "burn_in"), ("standard", "burn_in"), ("burnin", "bound")])
def test_a_burn_in_that_takes_longer_than_the_deadline_is_refused(seconds, fits, level, asked):
    """Of what 8 GPUs compute in 60 % of the time a bound is a third."""
    run = Run(Options(deadline=7200.0, level=level, **{asked: seconds if asked == "burn_in" else seconds * 4.8 / 3}))
    run.own_machine = SimpleNamespace(rehearsal_ranks=0, size=8)
    with nullcontext() if fits or level == "standard" else pytest.raises(Refused, match="does not fit"):
        lifetime.check_deadline(run)
