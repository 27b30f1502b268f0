"""What pytest's own lines say of a run: a failure once, and what stands for GPUs before the first test."""

import pytest

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
