"""What pytest's own lines say of a run: a failure once, what stands for GPUs before the first test, and who is late."""

import pytest

from pytest_gpufleet.world.engines.protocol import Death
from pytest_gpufleet.world.failure import collect
from tests.conftest import RECORDED

OWN = """
import pytest

@pytest.mark.spmd
def test_raises(rank):
    \"\"\"A check of mine\"\"\"
    raise ValueError(f"the needle of rank {rank.index}")
"""


@pytest.mark.parametrize(("options", "times"), [((), 1), (("-rf",), 2), (("--tb=no",), 1)])
def test_a_failure_is_shown_once(run_pytest, options, times):
    run = run_pytest("--rehearse=1", "--fleet-dir=runs", *options, files={"test_inner.py": OWN})
    assert (run.status, run.text.count("rank 0 of 1, CPU: raised ValueError: the ")) == (1, times), run.text
    assert "A check of mine" in run.text
    assert "the needle of rank 0" in (run.folders[0] / "report.txt").read_text()


def test_who_gives_no_option_reads_first_that_it_is_a_rehearsal(run_pytest):
    run = run_pytest(files={"test_inner.py": OWN})
    assert 0 < run.text.find("REHEARSAL on 2 CPU ranks") < run.text.find("test_inner.py F"), run.text
    assert run.text.count("REHEARSAL") == 1
    assert run.folders == []


def test_a_site_says_in_its_ini_file_what_runs_are_made_of(run_pytest):
    files = {"pytest.ini": "[pytest]\ngpus = 4\nfleet_level = quick\n", "test_inner.py": "def test_it(): pass"}
    run = run_pytest("--fleet-dir=runs", *RECORDED, files=files)
    assert (run.record.run.gpus, run.record.run.level) == ("4", "quick")
    rehearsed = run_pytest("--rehearse=1", "--fleet-dir=runs", files=files).record.run
    assert (rehearsed.rehearsal, rehearsed.level) == (True, "quick")


def test_the_package_of_the_plugin_is_not_its_suite(run_pytest):
    run = run_pytest("--pyargs", "pytest_gpufleet")
    (line,) = filter(None, run.text.splitlines())
    assert (run.status, "pytest_gpufleet.acceptance" in line) == (4, True)


class Silent:
    """An engine of which rank 0 may die and nobody answers, and its clock."""

    def __init__(self, *deaths):
        self.now, self._deaths = 0.0, [*deaths]

    def wait(self, seconds):
        self.now += seconds
        return [self._deaths.pop()] if self._deaths else []


def test_a_call_that_hangs_says_whom_it_waits_for_after_half_a_minute():
    assert waited(Silent()) == [(seconds, {0, 3}) for seconds in (30, 60, 120, 240)]
    assert waited(Silent(Death(0, "by SIGKILL"))) == []  # the others have but a moment left


def waited(engine):
    heard = []
    collect(engine, 1, (0, 3), 300.0, lambda: False, lambda: engine.now, lambda *text: heard.append(text))
    return heard
