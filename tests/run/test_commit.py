"""Which commit a suite is of."""

import subprocess

import pytest

from pytest_gpufleet.hardware.tools import Untold
from pytest_gpufleet.run.opening import of_checkout


def git(folder, *arguments):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "suite.py").write_text("one\n")
    git(tmp_path, "add", "suite.py")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_the_commit_of_a_checkout_and_whether_it_was_changed(checkout, monkeypatch):
    head = git(checkout, "rev-parse", "HEAD")
    git(checkout, "tag", "v1")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as a hook of git has it
    assert of_checkout(checkout) == head
    (checkout / "new.py").write_text("not of the suite\n")
    assert of_checkout(checkout) == head
    (checkout / "suite.py").write_text("two\n")
    assert of_checkout(checkout) == f"{head}-dirty"


def test_what_is_installed_inside_somebody_elses_checkout_has_no_commit(checkout):
    (checkout / "lib").mkdir()
    assert of_checkout(checkout / "lib") == ""


def test_without_git_nothing_is_told(checkout):
    def absent(*_, **__):
        raise Untold("git is not installed")

    assert of_checkout(checkout, absent) == ""
