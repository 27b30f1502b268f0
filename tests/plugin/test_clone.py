"""A clone of the repository runs where it is not installed, and says what it needs where that is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_gpufleet.model.record import read
from tests.conftest import ACCEPTANCE, KEPT, ROOT, SECONDS

INSTALLED = Path(torch.__file__).parents[1]
ONE_ON_RANKS = "acceptance/test_3_exactness.py"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("src", "acceptance"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


@pytest.fixture
def run_without_installation(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """pytest with all packages of this Python but this one, and those of `without`."""

    def run(folder: Path, *arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        packages = tmp_path / "packages"
        packages.mkdir()
        for path in INSTALLED.iterdir():
            if "gpufleet" not in path.name and not path.name.startswith(without) and path.suffix != ".pth":
                (packages / path.name).symlink_to(path)
        command = [sys.executable, "-S", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        environment = {**KEPT, "PYTHONPATH": str(packages)}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)

    return run


def test_it_runs_from_its_root(clone, run_without_installation):
    ended = run_without_installation(clone, ONE_ON_RANKS, "--rehearse", "-k", "all_reduce")
    assert "REHEARSAL on 2 CPU ranks" in ended.stdout, ended.stdout + ended.stderr
    (folder,) = (clone / "reports").iterdir()
    record = read(folder / "evidence.jsonl")
    assert {check.outcome for check in record.checks.values()} == {"passed"}
    assert record.altered == []


def test_it_runs_from_another_folder_and_a_changed_conftest_is_told(clone, tmp_path, run_without_installation):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with (clone / "conftest.py").open("a") as file:
        file.write("\n# changed\n")
    suite = os.path.relpath(clone / "acceptance" / "test_1_inventory.py", elsewhere)
    ended = run_without_installation(elsewhere, "--rehearse=3", suite, "-k", "gpu_count")
    (folder,) = (elsewhere / "reports").iterdir()
    record = read(folder / "evidence.jsonl")
    assert (record.run.ranks, record.verdict) == (3, "REHEARSAL"), ended.stdout + ended.stderr
    assert record.altered == ["../conftest.py"]


def test_what_is_missing_is_named_in_one_sentence(clone, run_without_installation):
    ended = run_without_installation(clone, "acceptance", "--gpus=8", without=("cloudpickle", "msgspec"))
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    (error,) = ended.stderr.strip().splitlines()
    how = f"{sys.executable} -m pip install cloudpickle msgspec"
    assert error.endswith(f"pytest-gpufleet needs cloudpickle, msgspec: {how}")


def test_where_it_is_installed_the_plugin_is_loaded_once(run_fresh):
    """By the root's conftest.py, which stands above the tests of this repository too."""
    ended = run_fresh(ACCEPTANCE / "test_1_inventory.py", "--rehearse", "--collect-only", "-k", "gpu_count")
    assert "1/" in ended.text
    assert ended.status == 0, ended.text
