"""What other plugins, conftest files and options cannot make of a check."""

import shutil
from dataclasses import replace

import msgspec
import pytest

from pytest_gpufleet.verdict.verdict import conclude
from tests.conftest import ACCEPTANCE

# As plugins do that run a test once more, or that call its failure something else.
WHITEWASH = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""

ORDER = """
import pytest

@pytest.mark.at_the_end
def test_last():
    pass

def test_first():
    pass
"""


def test_a_failure_that_a_hook_calls_passed_is_one(fleet):
    run = fleet("def test_it(): assert 0", files={"conftest.py": WHITEWASH})
    (check,) = run.record.checks.values()
    assert check.outcome == "failed"
    assert run.status == 1


TEMPORARY = "from pytest_gpufleet.run import lifetime\nlifetime.ROOM_BYTES = 1 << 60"  # as the folder has not
EVIDENCE = "import os\ncalls = iter([0])\nos.posix_fallocate = lambda *_: os.fstat(next(calls, -1))"
FULL = {
    TEMPORARY: "make 1099511627776 MiB free there, or name another folder by TMPDIR",
    EVIDENCE: "make 64 MiB free there, or name another folder by --fleet-dir",
}


@pytest.mark.parametrize(("full", "words"), FULL.items(), ids=["temporary files", "evidence"])
def test_there_is_no_run_without_room(fleet, full, words):
    run = fleet(ORDER, "-p", "full", "--fleet-burn-in=72h", files={"full.py": full})
    assert (run.status, run.folders) == (4, [])
    (line,) = run.text.strip().splitlines()
    assert words in line


def test_a_changed_copy_of_the_suite_is_reported(run_pytest, tmp_path):
    copy = shutil.copytree(ACCEPTANCE, tmp_path / "changed_suite")
    health = copy / "test_2_health.py"
    health.write_text(health.read_text().replace("def test_", "def not_a_test_", 1))
    (copy / "test_10_own.py").write_text("def test_own(world): pass")
    run = run_pytest(copy, "--rehearse=2", "--fleet-dir=runs", "-k", "health or own")
    assert run.record.altered == ["test_2_health.py"]
    _, reasons = conclude(replace(run.record, run=msgspec.structs.replace(run.record.run, rehearsal=False)))
    reason = "test_2_health.py: not as it was shipped with this version, so it may check something else"
    assert reason in reasons
    assert "not as it was shipped with this version" in (run.folders[0] / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "text", "status"), [(["--continue-on-collection-errors"], "import nothing", 10), ([], "def (", 2)]
)
def test_a_file_that_cannot_be_imported_is_reported_and_no_interruption(fleet, options, text, status):
    run = fleet(ORDER, *options, files={"test_broken.py": text})
    # What belongs to the end runs there.
    assert (run.status, list(run.outcomes)) == (status, ["test_first", "test_last"] if options else [])
    assert run.record.broken == "a test file could not be imported, so its checks are missing: test_broken.py"
    assert run.record.broken in " ".join(run.text.split())
    assert "interrupted: writing the report" not in run.text
    for text in (run.text, (run.folders[0] / "report.html").read_text()):
        assert "--fleet-resume" not in text


# A child that was forked is none of the run, and ends as it likes.
OS_EXIT = """
import os

def test_child():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

class Silent(Exception):
    def __str__(self):
        os._exit(0)

def test_ends_all():
    raise Silent

def test_is_left_out():
    assert False
"""


def test_a_process_that_ends_itself_in_a_test_and_pytest_exit_accept_nothing(fleet):
    run = fleet(OS_EXIT)
    assert run.status == 10
    assert "os._exit(0) was called: the run ends here, with exit status 10" in run.text
    assert run.outcomes == {"test_child": "passed"}
    assert run.record.verdict is None
    exits = "import pytest\ndef test_exits(): pytest.exit('that will do', returncode=0)\n"
    run = fleet(f"{exits}def test_left_out(): assert False")
    assert (run.status, run.record.broken) == (10, "pytest.exit() ended the run: that will do")


@pytest.mark.parametrize("ending", [
    "def pytest_sessionstart(session): pytest.exit('at once', returncode=0)",
    "def pytest_sessionfinish(session): pytest.exit('after all', returncode=0)",
    "def pytest_terminal_summary(): os._exit(0)",
    "def pytest_unconfigure(): raise SystemExit",
])  # fmt: skip
def test_no_hook_makes_a_success_of_a_failure(fleet, ending):
    conftest = f"import os\nimport pytest\n\n@pytest.hookimpl(trylast=True)\n{ending}\n"
    run = fleet("def test_it(): assert False", files={"conftest.py": conftest})
    assert run.status == (10 if "sessionstart" in ending else 1)
