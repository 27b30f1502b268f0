"""The suite where it is not in a clone: in a wheel, and as the start of somebody's own checks."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.verdict.judgement import read
from tests.conftest import ACCEPTANCE, KEPT, REPORTS, ROOT, SECONDS

BEGUN = """
import pytest
from pytest_gpufleet.plugin.compat import RUN

@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    pool = session.config.stash[RUN].ranks.in_use
    print("begun:", pool is not None and pool.started)
"""
FEW = "harmful or (product_is_exact and bf16)"
# One check of each file, none of which takes long.
ONE_OF_EACH = (
    "harmful or grave or at_once or (product_is_exact and bf16) or pair_latency or (latency and broadcast) or phase_1 "
    "or (throughput_and_scaling and amp) or pcie_links_stayed or transceivers or fans_are or drives_are "
    "or paths_stayed or same_sum or both_stay_exact or (ranks_end_alike and transformer) or gpus.count "
    "or dcgm_diagnostic or fastest_transport or decoding_of_each or measures_as_before"
)


OUTSIDE = {**KEPT, "PYTHONPATH": ""}


def ended(command, folder, around=KEPT, status=0):
    """What a process printed that has ended so: on stdout, or on stderr if it failed."""
    command = list(map(str, command))
    found = subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == status, found.stdout + found.stderr
    return found.stderr if status else found.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment outside of the checkout with the wheel in it; all else it has from this Python's."""
    pytest.importorskip("hatchling", reason="builds the wheel")
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    ended([*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, ROOT], ROOT)
    (wheel,) = folder.glob("*.whl")
    ended([sys.executable, "-m", "venv", "--without-pip", folder / "env"], folder, OUTSIDE)
    (packages,) = (folder / "env" / "lib").glob("python3.*/site-packages")
    others = [place for place in sys.path if Path(place).name.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    python = folder / "env" / "bin" / "python"
    ended([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], folder, OUTSIDE)
    return python.parent


@pytest.mark.parametrize("called", ["gpufleet accept", "python -m pytest --pyargs pytest_gpufleet.acceptance"])
def test_an_installed_wheel_has_the_whole_suite(environment, tmp_path, called):
    present = Path("/dev/nvidiactl").exists()
    program, *arguments = called.split()
    options = ["-q", *(["--rehearse"] if present else []), "--fleet-level=burnin", "-k", FEW, "-p", "begun"]
    (tmp_path / "begun.py").write_text(BEGUN)
    printed = ended([environment / program, *arguments, *options], tmp_path, OUTSIDE)
    assert "begun: True" in printed
    cases = [case for name in shipped().checks for case in shipped().cases(name)]
    assert f"2 passed, {len(cases) - 2} deselected" in printed
    assert len(printed.splitlines()) < 20  # cron sends them by mail
    (folder,) = (tmp_path / "reports").iterdir()
    record = read(folder / "evidence.jsonl")
    suite = record.suite
    assert {suite.known_as(check): each.outcome for check, each in record.checks.items()} == {
        "test_1_inventory.py::test_no_harmful_variable": "passed",
        "test_4_each_gpu.py::test_matrix_product_is_exact[bf16]": "passed",
    }
    assert (record.verdict, record.altered, record.spoiled) == ("REHEARSAL", [], [])
    again = called.removeprefix("python -m ")
    assert record.run.command == f"{again} {shlex.join(options)}"
    assert record.run.command_line.typed("--gpus 8", whole_suite=True) == f"{again} --gpus 8"


def test_every_file_is_a_start_for_ones_own_checks(run_pytest):
    files = {f"checks/test_own_{path.stem[5:]}.py": path for path in ACCEPTANCE.glob("test_[0-9]*.py")}
    options = ("--rehearse", f"--fleet-dir={REPORTS}", "--fleet-level=burnin", "-k", ONE_OF_EACH)
    run = run_pytest("checks", *options, files=files)
    assert run.status == 0, run.text
    assert {check.partition("::")[0] for check in run.record.checks} == files.keys()
    assert set(run.outcomes.values()) == {"passed", "not applicable"}


@pytest.mark.parametrize("start", ["", "-m torch.distributed.run --nproc_per_node=2"], ids=["python", "torchrun"])
def test_who_starts_a_file_of_the_suite_without_pytest_is_told(start, tmp_path):
    copy = tmp_path / "checks"
    shutil.copytree(ACCEPTANCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("test_1_order.py", *(() if start else ("conftest.py", "__init__.py"))):
        status = 1 if start else 4  # torchrun's own, of ranks that failed
        printed = ended([sys.executable, *start.split(), copy / name], None, status=status)
        assert printed.count("tests nothing when Python or torchrun starts it: run `pytest") == 1
    for path in copy.glob("*.py"):
        assert re.search(r"^(import|from) pytest_gpufleet ", path.read_text(), re.MULTILINE), path.name


def test_a_file_that_does_something_by_itself_may_be_started(tmp_path):
    own = tmp_path / "test_own.py"
    for text in ("def test_it(): pass\nif __name__ == '__main__': print('ran')", "print('ran')"):
        own.write_text(f"import pytest_gpufleet\n{text}\n")
        assert ended([sys.executable, own], None) == "ran\n"


# ---------------------------------------------------------------- in a clone, where it is not installed
INSTALLED = Path(torch.__file__).parents[1]
NOBODY = 65534
READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # and writes no more than others


def lay_out_clone(folder):
    for name in ("src", "acceptance"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_without_installation(packages, folder, *arguments, without=(), status=0):
    """pytest with all packages of this Python but this one, and those of `without`."""
    packages.mkdir()
    for path in INSTALLED.iterdir():
        if "gpufleet" not in path.name and not path.name.startswith(without) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    command = [sys.executable, "-S", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return ended(command, folder, {**KEPT, "PYTHONPATH": str(packages)}, status)


def test_it_runs_from_its_root_and_a_changed_conftest_is_reported(tmp_path):
    packages, clone = tmp_path / "packages", lay_out_clone(tmp_path / "clone")
    with (clone / "conftest.py").open("a") as file:
        file.write("\n# changed\n")
    options = ("acceptance/test_3_exactness.py", "--rehearse=3", "-k", "all_reduce")
    printed = run_without_installation(packages, clone, *options)
    assert "REHEARSAL on 3 CPU ranks" in printed
    (folder,) = (clone / "reports").iterdir()
    record = read(folder / "evidence.jsonl")
    assert {check.outcome for check in record.checks.values()} == {"passed"}
    assert record.altered == ["../conftest.py"]


@pytest.mark.parametrize(("without", "named"), [
    (("cloudpickle", "msgspec"), "cloudpickle, msgspec"),
    (("jinja2", "pytest_html"), "jinja2"),  # pytest-html, where it is installed, needs it too
], ids=["messages", "report"])  # fmt: skip
def test_what_is_missing_is_named_in_one_sentence(tmp_path, without, named):
    packages, clone = tmp_path / "packages", lay_out_clone(tmp_path / "clone")
    how = {"without": without, "status": pytest.ExitCode.USAGE_ERROR}
    printed = run_without_installation(packages, clone, "acceptance", "--gpus=8", **how)
    (error,) = printed.strip().splitlines()
    how = f"{sys.executable} -m pip install {named.replace(',', '')}"
    assert error.endswith(f"pytest-gpufleet needs {named}: {how}")


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
        ended(command, own, {**homeless, "PYTHONPATH": str(checkout / "src")})
        (folder,) = (own / "reports").iterdir()
        record = read(folder / "evidence.jsonl")
        assert (record.verdict, record.altered, record.spoiled) == ("REHEARSAL", [], [])
        assert {check.outcome for check in record.checks.values()} == {"passed"}
        assert folder.stat().st_uid == NOBODY
