"""However the controller ends, no rank outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import as_on_a_terminal

HANGING = """
import os, time
import pytest

def tell_pids(rank):
    with open(f"pid{rank.index}", "w") as file:
        file.write(f"{os.getpid()}")
    os.rename(f"pid{rank.index}", f"ready{rank.index}")

def hang(rank):
    import collections, itertools
    if rank.index == 0:
        collections.deque(itertools.repeat(None), maxlen=0)  # holds the GIL: no thread of the rank can end it
    time.sleep(3600)

def test_hang(world):
    world.run(tell_pids)
    world.run(hang)
"""
ENDING = """
import os
import pytest

def tell_pids(rank):
    with open(f"ready{rank.index}", "w") as file:
        file.write(f"{os.getpid()}")

def test_first(world):
    world.run(tell_pids)
    %s

def test_second(world):
    world.run(lambda rank: None)
"""
RANKS = 2


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def controller(tmp_path):
    """start(module, *arguments) -> Popen of a pytest in a session of its own, which owns tmp_path."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    started = []

    def start(module, *arguments):
        (tmp_path / "test_inner.py").write_text(module)
        command = [sys.executable, "-m", "pytest", f"--rehearse={RANKS}", "--fleet-dir=out", *arguments]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True, preexec_fn=as_on_a_terminal
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def rank_pids(folder):
    files = [folder / f"ready{rank}" for rank in range(RANKS)]
    assert wait_until(lambda: all(file.exists() for file in files), 60), (folder / "log").read_text()
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT], [signal.SIGINT, signal.SIGINT]],
    ids=["SIGKILL", "SIGTERM", "terminal closed", "Ctrl-C", "Ctrl-C twice"],
)
def test_signal_to_the_controller(controller, tmp_path, signals):
    process = controller(HANGING)
    pids = rank_pids(tmp_path)
    assert all(map(alive, pids))
    for number in signals:
        os.killpg(process.pid, number)  # as a terminal does: to the whole group of the controller
    assert wait_until(lambda: not any(map(alive, pids)), 2.0)
    process.wait(30)


@pytest.mark.parametrize(
    ("body", "arguments", "status"),
    [
        ("assert False", ["-x"], 1),
        ("assert False", ["--maxfail=1"], 1),
        ("pytest.exit('enough')", [], 2),
        ("os._exit(9)", [], 9),
        ("raise SystemExit(7)", [], 1),
    ],
    ids=["-x", "--maxfail", "pytest.exit", "os._exit", "SystemExit"],
)
def test_end_of_the_session(controller, tmp_path, body, arguments, status):
    process = controller(ENDING % body, *arguments)
    pids = rank_pids(tmp_path)
    assert process.wait(60) == status, (tmp_path / "log").read_text()
    assert wait_until(lambda: not any(map(alive, pids)), 2.0)


def test_internal_error(controller, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_runtest_logreport(report):\n    if report.when == 'call': 1 / 0\n"
    )
    process = controller(ENDING % "pass")
    pids = rank_pids(tmp_path)
    assert process.wait(60) == 3, (tmp_path / "log").read_text()
    assert wait_until(lambda: not any(map(alive, pids)), 2.0)


def test_interrupted_run_is_never_accepted_and_leaves_its_report(controller, tmp_path):
    process = controller(HANGING)
    rank_pids(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 2
    assert "the run was interrupted" in (tmp_path / "log").read_text()
    assert list(tmp_path.glob("out/*/report.html"))
