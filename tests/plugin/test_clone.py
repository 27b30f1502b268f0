"""A clone of the repository runs where it is not installed, and says what it needs where that is missing."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from pytest_gpufleet.verdict.reading import read
from tests.conftest import ACCEPTANCE, KEPT, ROOT, SECONDS

INSTALLED = Path(torch.__file__).parents[1]
NOBODY = 65534
READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # and writes no more than others
FEW = "harmful or (product_is_exact and bf16)"
ONE_ON_RANKS = "acceptance/test_3_exactness.py"


def lay_out_clone(folder):
    for name in ("src", "acceptance"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def clone(tmp_path):
    return lay_out_clone(tmp_path / "clone")


@pytest.fixture
def run_without_installation(tmp_path):
    """pytest with all packages of this Python but this one, and those of `without`."""

    def run(folder, *arguments, without=()):
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


def test_it_runs_from_another_folder_and_a_changed_conftest_is_reported(clone, tmp_path, run_without_installation):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with (clone / "conftest.py").open("a") as file:
        file.write("\n# changed\n")
    suite = os.path.relpath(clone / "acceptance" / "test_1_inventory.py", elsewhere)
    ended = run_without_installation(elsewhere, "--rehearse=3", suite, "-k", "gpu_count")
    (folder,) = (elsewhere / "reports").iterdir()
    record = read(folder / "evidence.jsonl")
    assert (record.run.ranks, record.verdict) == (3, "REHEARSAL"), ended.stdout + ended.stderr
    assert record.altered == ["../conftest.py"]


@pytest.mark.parametrize(("without", "named"), [
    (("cloudpickle", "msgspec"), "cloudpickle, msgspec"),
    (("jinja2", "pytest_html"), "jinja2"),  # pytest-html, where it is installed, needs it too
], ids=["messages", "report"])  # fmt: skip
def test_what_is_missing_is_named_in_one_sentence(clone, run_without_installation, without, named):
    ended = run_without_installation(clone, "acceptance", "--gpus=8", without=without)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    (error,) = ended.stderr.strip().splitlines()
    how = f"{sys.executable} -m pip install {named.replace(',', '')}"
    assert error.endswith(f"pytest-gpufleet needs {named}: {how}")


def test_where_it_is_installed_the_plugin_is_loaded_once(run_pytest):
    """By the root's conftest.py, which stands above the tests of this repository too."""
    ended = run_pytest(ACCEPTANCE / "test_1_inventory.py", "--rehearse", "--collect-only", "-k", "gpu_count")
    assert "1/" in ended.text
    assert ended.status == 0, ended.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_without_privileges_runs_a_checkout_that_nobody_can_write_to():
    """From a folder of its own, without a home. The one privilege it has is to read this interpreter wherever it is."""
    program = shutil.which("setpriv")
    if program is None:
        pytest.skip("setpriv of util-linux is not installed")
    with tempfile.TemporaryDirectory() as place:  # not below tmp_path, into which only root may look
        checkout, own = Path(place, "checkout"), Path(place, "own")
        own.mkdir()
        lay_out_clone(checkout)
        for path in (checkout, *checkout.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        os.chmod(place, 0o755)
        os.chown(own, NOBODY, NOBODY)
        became = [program, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *READS_ALL]
        command = [*became, sys.executable, "-m", "pytest", checkout / "acceptance", "--rehearse", "-q", "-k", FEW]
        homeless = {name: value for name, value in KEPT.items() if name != "HOME"}
        environment = {**homeless, "PYTHONPATH": str(checkout / "src")}
        ended = subprocess.run(
            list(map(str, command)), cwd=own, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (folder,) = (own / "reports").iterdir()
        record = read(folder / "evidence.jsonl")
        assert (record.verdict, record.altered, record.spoiled) == ("REHEARSAL", [], [])
        assert {check.outcome for check in record.checks.values()} == {"passed"}
        assert folder.stat().st_uid == NOBODY
