"""Which commit a suite is of; and what was typed to start a run can be typed again, with more, for the whole suite."""

import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.model.events import STARTED_BY
from pytest_gpufleet.model.suite import PACKAGED
from pytest_gpufleet.run.lifetime import command_line, of_checkout
from tests.conftest import ACCEPTANCE as SUITE, ROOT


def git(folder, *arguments):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "src" / "pytest_gpufleet"
    for folder in (package, tmp_path / "acceptance"):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("one\n")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "link").symlink_to("acceptance")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return package


def test_the_commit_of_a_checkout_and_whether_it_was_changed(checkout, monkeypatch):
    root = checkout.parents[1]
    head = git(root, "rev-parse", "HEAD")
    git(root, "tag", "v1")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(root / "of another repository"))
    assert of_checkout(checkout) == head
    (root / "new.py").write_text("not of the suite\n")
    (checkout / "a.py").touch()
    assert of_checkout(checkout) == head
    (checkout / "a.py").write_text("two\n")
    assert of_checkout(checkout) == f"{head}-dirty"
    (checkout / "a.py").unlink()
    assert of_checkout(checkout) == f"{head}-dirty"


def test_what_has_no_commit(checkout):
    """Installed inside somebody else's checkout, as by `pip install --target`; without git; or in one of others."""
    root = checkout.parents[1]
    for package in (root / "lib" / "pytest_gpufleet", root / "lib" / "python3" / "site-packages" / "pytest_gpufleet"):
        package.mkdir(parents=True)
        assert of_checkout(package) == ""
    assert of_checkout(checkout, Mock(side_effect=Unreadable("git is not installed"))) == ""
    if os.geteuid() == 0:  # who alone can give a file to others
        os.chown(root / ".git", 65534, 65534)
        assert of_checkout(checkout) == ""


EACH = "acceptance/test_4_each_gpu.py"
THERE = f"{SUITE}/test_4_each_gpu.py"
PYARGS, BY_PACKAGE = "--pyargs", f"pytest --pyargs {PACKAGED}"
PART = ["--gpus", "8", "-k", "bandwidth or soak"]
TYPED = "--gpus 8 -k 'bandwidth or soak'"
QUOTED = """--gpus 8 -k '"'"'bandwidth or soak'"'"'"""  # the same within '...'
TO_MAKE = f"make accept ARGS='{QUOTED}'"


@pytest.mark.parametrize(("caller", "arguments", "typed", "whole"), [
    ("", [EACH, *PART], f"pytest {EACH} {TYPED}", "pytest acceptance/ --gpus 8"),
    ("", [*PART, f"{THERE}::test_soak", "a"], f"pytest {TYPED} {THERE}::test_soak a", f"pytest {SUITE}/ --gpus 8"),
    ("", [PYARGS, f"{PACKAGED}.x", *PART], f"pytest {PYARGS} {PACKAGED}.x {TYPED}", f"{BY_PACKAGE} --gpus 8"),
    ("gpufleet accept", [PYARGS, PACKAGED, *PART], f"gpufleet accept {TYPED}", "gpufleet accept --gpus 8"),
    ("gpufleet accept", [f"{SUITE}", *PART], f"gpufleet accept {TYPED}", "gpufleet accept --gpus 8"),  # in a clone
    ("make accept", ["acceptance/", *PART], TO_MAKE, "make accept ARGS='--gpus 8'"),
    ("make accept", ["acceptance/"], "make accept", None),
    ("rm -rf", ["acceptance/"], "pytest acceptance/", None),  # whatever somebody has set
])  # fmt: skip
def test_what_was_typed_can_be_typed_again(monkeypatch, caller, arguments, typed, whole):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(STARTED_BY, caller)
    line = command_line(arguments)
    assert line.typed() == typed
    made = {"make accept": "make accept ARGS='--fleet-resume DIR'", TO_MAKE: f"{TO_MAKE[:-1]} --fleet-resume DIR'"}
    assert line.typed("--fleet-resume DIR") == made.get(typed, f"{typed} --fleet-resume DIR")
    assert whole is None or line.typed("--gpus 8", whole_suite=True) == whole


def test_make_says_that_it_starts_the_suite():
    (recipe,) = (line for line in Path(ROOT, "Makefile").read_text().splitlines() if "/pytest acceptance/" in line)
    assert recipe.strip().startswith(f'{STARTED_BY}="make accept" $(BIN)/pytest acceptance/ ')
    assert recipe.endswith(" $(ARGS)")
