"""Which commit a suite is of."""

import os
import subprocess

import pytest

from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.run.opening import of_checkout


def git(folder, *arguments):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """The package in it."""
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


def test_the_commit_of_a_checkout_and_whether_it_was_changed(checkout):
    root = checkout.parents[1]
    head = git(root, "rev-parse", "HEAD")
    git(root, "tag", "v1")
    assert of_checkout(checkout) == head
    (root / "new.py").write_text("not of the suite\n")
    (checkout / "a.py").touch()
    assert of_checkout(checkout) == head
    (checkout / "a.py").write_text("two\n")
    assert of_checkout(checkout) == f"{head}-dirty"
    (checkout / "a.py").unlink()
    assert of_checkout(checkout) == f"{head}-dirty"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to others")
def test_a_repository_of_somebody_else_is_not_asked(checkout):
    assert of_checkout(checkout) != ""
    os.chown(checkout.parents[1] / ".git", 65534, 65534)
    assert of_checkout(checkout) == ""


def test_what_has_no_commit(checkout):
    """Installed inside somebody else's checkout, as by `pip install --target`; or without git."""
    root = checkout.parents[1]
    for package in (root / "lib" / "pytest_gpufleet", root / "lib" / "python3" / "site-packages" / "pytest_gpufleet"):
        package.mkdir(parents=True)
        assert of_checkout(package) == ""

    def absent(*_, **__):
        raise Unreadable("git is not installed")

    assert of_checkout(checkout, absent) == ""
