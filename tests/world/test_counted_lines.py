"""Coverage counts the lines that run on ranks, and leaves the checks of the suite alone."""

import json
import subprocess
import sys

import pytest

from tests.conftest import KEPT, ROOT, SECONDS, lay_out

pytest.importorskip("pytest_cov")

# A test that fails on a rank is counted up to where it fails; what nobody calls is not.
FILES = {
    "mine.py": """
        def by_the_marker(index):
            if index:
                return "one"
            return "none"

        def by_run():
            return 1

        def fails():
            raise ValueError("on a rank")

        def by_nobody():
            return 2
        """,
    "test_inner.py": """
        import pytest

        import mine

        @pytest.mark.spmd
        def test_marked(rank):
            assert mine.by_the_marker(rank.index)

        def test_run(world):
            assert world.run(lambda rank: mine.by_run()) == [1, 1]

        @pytest.mark.spmd
        def test_fails(rank):
            mine.fails()
        """,
}
RAN, NOT_RAN = {3, 4, 5, 8, 11}, {14}
OPTIONS = ("--rehearse=2", "--fleet-dir=runs", "-p", "no:cacheprovider", "-p", "no:xdist")


def measured(folder, *command):
    """What coverage knows of mine.py after this command of Python: its lines that ran, and those that did not."""
    environment = {**KEPT, "PYTHONPATH": f"{ROOT}:{folder}"}
    for arguments in (command, ("-m", "coverage", "json", "-q", "-o", "lines.json")):
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert ended.returncode in (0, 1), ended.stdout + ended.stderr
        assert "CoverageWarning" not in ended.stdout + ended.stderr
    found = json.loads((folder / "lines.json").read_text())["files"]["mine.py"]
    return set(found["executed_lines"]), set(found["missing_lines"])


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (("-m", "pytest", "--cov=mine", "--cov-report="), ""),
        (("-m", "coverage", "run", "-m", "pytest"), "source = .\nbranch = true"),
        (("-m", "pytest", "--cov=mine", "--cov-report="), "patch = subprocess"),
    ],
    ids=["pytest-cov", "coverage run", "subprocesses too"],
)
def test_lines_that_run_on_ranks_are_counted(tmp_path, command, settings):
    lay_out(tmp_path, {**FILES, ".coveragerc": f"[run]\n{settings}\n"})
    ran, missing = measured(tmp_path, *command, *OPTIONS, "test_inner.py")
    assert ran >= RAN
    assert missing == NOT_RAN


def test_ranks_count_nothing_of_the_suite(tmp_path):
    """It would slow what is measured there. A check is known by the name of its file and its own."""
    check = """
        import sys

        def test_memory_holds_patterns(world):
            assert world.run(lambda rank: "coverage" in sys.modules) == [False, False]
        """
    settings = "[run]\npatch = subprocess\n"
    lay_out(tmp_path, {"mine.py": FILES["mine.py"], "test_4_each_gpu.py": check, ".coveragerc": settings})
    measured(tmp_path, "-m", "pytest", "--cov=.", *OPTIONS, "test_4_each_gpu.py")
