"""However the controller ends, no rank outlives it, and whatever it can still write is there."""

import os
import signal
import subprocess
import sys

import pytest

from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.world.engines.processes import look as alive
from tests.conftest import FILES, comes_true, lay_out, lead_the_terminal

TELLS_PIDS = """
import os, subprocess, time
import pytest

def tell_pids(rank):
    child = subprocess.Popen(["sleep", "3600"], preexec_fn=os.setpgrp)  # in a process group of its own
    with open(f"pid{rank.index}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(f"pid{rank.index}", f"ready{rank.index}")
"""
HANGING = f"""{TELLS_PIDS}
def hang(rank):
    import collections, itertools
    if rank.index == 0:
        collections.deque(itertools.repeat(None), maxlen=0)  # holds the GIL: no thread of the rank can end it
    time.sleep(3600)

def test_hang(world):
    world.run(tell_pids)
    world.run(hang)
"""
ENDING = f"""{TELLS_PIDS}
def test_first(world):
    world.run(tell_pids)
    %s

def test_second(world):
    world.run(lambda rank: None)
"""
RANKS = 2


@pytest.fixture
def controller(tmp_path, in_a_session):
    """controller(module, *arguments): a rehearsal on two ranks in a session of its own, whose folder is tmp_path."""

    def start(module, *arguments):
        lay_out(tmp_path, {"test_inner.py": module})
        return in_a_session(f"--rehearse={RANKS}", "--fleet-dir=out", *arguments)

    return start


def rank_pids(folder):
    files = [folder / f"ready{rank}" for rank in range(RANKS)]
    assert comes_true(lambda: all(file.exists() for file in files)), (folder / "log").read_text()
    return [int(pid) for file in files for pid in file.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_to_the_controller(controller, tmp_path, number):
    process = controller(HANGING)
    pids = rank_pids(tmp_path)
    assert all(map(alive, pids))
    for _ in range(2 if number == signal.SIGINT else 1):
        os.killpg(process.pid, number)  # as a terminal does: to the whole group of the controller
    assert comes_true(lambda: not any(map(alive, pids)))
    assert process.wait(60) == (2 if number == signal.SIGINT else -number), (tmp_path / "log").read_text()
    (folder,) = tmp_path.glob("out/*")
    left = {"evidence.jsonl", "report.txt"} if number == signal.SIGKILL else FILES
    assert {path.name for path in folder.iterdir()} == left


def test_controller_and_fork_server_are_killed_at_once(controller, tmp_path):
    """By the out-of-memory killer, say. What ranks have started in groups of their own has nobody left to end it."""
    process = controller(HANGING)
    first, *children, second, last = rank_pids(tmp_path)
    for pid in (process.pid, alive(first).parent):
        os.kill(pid, signal.SIGSTOP)
    for pid in (alive(first).parent, process.pid, *children, last):
        os.kill(pid, signal.SIGKILL)
    assert comes_true(lambda: not alive(first) and not alive(second))
    assert process.wait(60) == -signal.SIGKILL


def test_a_terminal_that_is_closed_takes_no_report_away(tmp_path):
    """As by a lost connection: SIGHUP, and from then on nothing can be written to the terminal."""
    lay_out(tmp_path, {"pytest.ini": "[pytest]", "test_inner.py": HANGING})
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "pytest", f"--rehearse={RANKS}", "--fleet-dir=out"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    session = {"start_new_session": True, "preexec_fn": lead_the_terminal}
    with subprocess.Popen(command, cwd=tmp_path, **session, **streams) as process:
        os.close(theirs)
        try:
            assert comes_true(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(RANKS)))
        finally:
            os.close(ours)
        assert process.wait(60) == -signal.SIGHUP
    (folder,) = tmp_path.glob("out/*")
    assert {path.name for path in folder.iterdir()} == FILES
    assert read(folder / "evidence.jsonl").broken == "the run was ended by SIGHUP"


BROKEN = "def pytest_runtest_logreport(report): report.when == 'call' and 'BROKEN' in os.environ and 1 / 0"


@pytest.mark.parametrize(("body", "status"), [
    ("assert False", 1),  # with -x
    ("pytest.exit('enough')", 2),
    ("os._exit(9)", 9),
    ("raise SystemExit(7)", 1),
    ("os.environ['BROKEN'] = 'yes'", 3),  # an internal error
])  # fmt: skip
def test_end_of_the_session(controller, tmp_path, body, status):
    (tmp_path / "conftest.py").write_text(f"import os\n{BROKEN}")
    process = controller(ENDING % body, *(["-x"] if body == "assert False" else []))
    pids = rank_pids(tmp_path)
    assert process.wait(60) == status, (tmp_path / "log").read_text()
    assert comes_true(lambda: not any(map(alive, pids)))


# The same signal again at every step after the first one, while report and results are written.
AGAIN = """
import atexit, os, signal
import pytest

DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
atexit.register(lambda: print("afterwards:", signal.getsignal(signal.SIGNAL) in DEFAULT))

def again():
    os.kill(os.getpid(), signal.SIGNAL)

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    again()

def pytest_terminal_summary():
    again()

def pytest_unconfigure():
    again()
"""
INTERRUPTED = """
import os, signal

def test_it():
    try:
        os.kill(os.getpid(), signal.SIGNAL)
    finally:
        print("cleaning up", flush=True)
"""


@pytest.mark.parametrize(
    ("name", "what", "status"), [("SIGINT", "interrupted", 2), ("SIGTERM", "ended by SIGTERM", -signal.SIGTERM)]
)
def test_a_signal_is_answered_at_once_and_a_second_one_takes_no_report_away(controller, tmp_path, name, what, status):
    (tmp_path / "conftest.py").write_text(AGAIN.replace("SIGNAL", name))
    process = controller(INTERRUPTED.replace("SIGNAL", name), "-s")
    assert process.wait(60) == status, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    (folder,) = tmp_path.glob("out/*")
    told = f"{what}: writing the report to out/{folder.name}, a few seconds ..."
    assert text.count(told) == 1
    assert text.index(told) < text.index("cleaning up")
    assert {path.name for path in folder.iterdir()} == FILES
    assert read(folder / "evidence.jsonl").broken == f"the run was {what}"
    assert f" --fleet-resume out/{folder.name}\n" in text
    assert "--fleet-resume" in (folder / "report.html").read_text()
    assert "afterwards: True" in text
    assert "Traceback" not in text
    assert "KeyboardInterrupt" not in text  # nor the place in the code at which it came
    assert text.index("--fleet-resume") < text.index(f"! Interrupted: {what} !")


def test_a_signal_before_the_first_test_is_collected_leaves_a_report_too(controller, tmp_path):
    start = "@pytest.hookimpl(trylast=True)\ndef pytest_sessionstart(): os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "conftest.py").write_text(f"import os, pytest, signal\n{start}")
    assert controller("def test_it(): pass").wait(60) == 2, (tmp_path / "log").read_text()
    (folder,) = tmp_path.glob("out/*")
    assert {path.name for path in folder.iterdir()} == FILES
    assert read(folder / "evidence.jsonl").broken == "the run was interrupted"


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 0), ("SIGTERM", -signal.SIGTERM)])
def test_a_signal_while_the_report_of_a_whole_run_is_written_does_not_take_it_away(controller, tmp_path, name, status):
    (tmp_path / "conftest.py").write_text(AGAIN.replace("SIGNAL", name))
    assert controller("def test_it(): pass").wait(60) == status, (tmp_path / "log").read_text()
    (folder,) = tmp_path.glob("out/*")
    assert {path.name for path in folder.iterdir()} == FILES
    record = read(folder / "evidence.jsonl")
    assert (record.broken, record.exit_status) == ("", 0)
    assert "--fleet-resume" not in (tmp_path / "log").read_text()
