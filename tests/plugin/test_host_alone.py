"""Tests that need the host to themselves: processes that are nodes of one host run them one after the other."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_gpufleet.verdict.judgement import read
from tests.conftest import KEPT, RECORDED, REPORTS, ROOT, lay_out

DEVICES = """
    import os
    from pathlib import Path
    from pytest_gpufleet.machine import local_node
    from pytest_gpufleet.plugin import markers

    local_node.DEVICES = Path(os.environ["DEVICES"])
    if "IMPATIENT" in os.environ:
        markers.GPUS_A_HOST = 0
"""
# Says that it is there, and ends when its input does.
ALONE = """
    import sys
    import pytest

    @pytest.mark.host_alone
    def test_alone():
        print("it is there")
        sys.stdin.read()
"""
AGAIN = """
    @pytest.mark.host_alone
    def test_alone_again():
        pass
"""
THERE, WAITS = "it is there", "needs this host to itself and waits for"
ON_GPUS, ON_CPUS = ("--gpus=1", *RECORDED), ("--rehearse=1",)


@dataclass
class Node:
    process: subprocess.Popen[str]
    root: Path

    def says(self, what):
        """The line in which it says so, as soon as it does. StopIteration if it ends before."""
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if what in line)

    def ends(self):
        self.process.communicate()

    @property
    def record(self):
        (folder,) = (self.root / REPORTS).glob("*")
        return read(folder / "evidence.jsonl")

    @property
    def outcomes(self):
        return [check.outcome for check in self.record.checks.values()]


@pytest.fixture
def node(tmp_path):
    """node(name, *options): a run of its own on the host whose device files are in tmp_path."""
    devices, started = tmp_path / "dev", []
    devices.mkdir()
    (devices / "nvidiactl").touch()

    def start(name, *options, more="", **variables):
        root = lay_out(tmp_path / name, {"devices_there.py": DEVICES, "test_alone.py": ALONE + more})
        around = {**KEPT, "DEVICES": str(devices), "PYTHONPATH": f"{ROOT}:{root}", "PYTHONUNBUFFERED": "1", **variables}
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "devices_there", *options,
                   f"--fleet-dir={REPORTS}", "test_alone.py"]  # fmt: skip
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=root, env=around, text=True, **pipes)
        started.append(process)
        return Node(process, root)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def two(node):
    """The first has its turn, for which the second waits."""
    first = node("first", *ON_GPUS)
    first.says(THERE)
    second = node("second", *ON_GPUS)
    assert f"process {first.process.pid} of " in second.says(WAITS)
    return first, second


@pytest.mark.parametrize("end", [Node.ends, lambda first: first.process.kill()], ids=["ends", "is killed"])
def test_the_second_waits_until_the_first_has_done(two, end):
    first, second = two
    assert not second.record.started
    end(first)
    second.says(THERE)
    second.ends()
    assert second.outcomes == ["passed"]


def test_nobody_waits_for_ever_for_who_keeps_the_host(node):
    """Anybody who may open the device can: that is said once, and the run goes on."""
    first = node("first", *ON_GPUS)
    first.says(THERE)
    second = node("second", *ON_GPUS, more=AGAIN, IMPATIENT="1")
    second.says(WAITS)
    second.says(THERE)
    rest, _ = second.process.communicate()
    assert WAITS not in rest
    assert second.outcomes == ["passed"] * 2
    (why,) = second.record.spoiled
    assert f"process {first.process.pid} of " in why
    assert second.record.verdict == "INCOMPLETE"


def test_who_waits_can_be_ended(two):
    first, second = two
    second.process.terminate()
    second.ends()
    assert (second.record.verdict, second.outcomes) == ("INCOMPLETE", [])
    assert first.process.poll() is None


def test_a_rehearsal_takes_no_turn_and_waits_for_none(node):
    on_gpus, on_cpus = node("gpus", *ON_GPUS), node("cpus", *ON_CPUS)
    on_gpus.says(THERE)
    on_cpus.says(THERE)
    on_cpus.ends()
    assert on_cpus.outcomes == ["passed"]


def test_waiting_is_no_part_of_a_tests_time(pytestconfig):
    """Of wrappers, the last of the list is around all others."""
    hooks = [each.plugin_name for each in pytestconfig.hook.pytest_runtest_protocol.get_hookimpls() if each.wrapper
             or each.hookwrapper]  # fmt: skip
    assert hooks[-1] == "gpufleet-markers"
    assert "timeout" in hooks
