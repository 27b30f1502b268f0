"""The suite where it is not in a clone: in a wheel, and as the start of somebody's own checks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ACCEPTANCE, REPORTS, ROOT, FleetRun

SRC = ROOT / "src" / "pytest_gpufleet"
# One check of each file, none of which takes long.
ONE_OF_EACH = (
    "harmful or grave or at_once or (product_is_exact and bf16) or pair_latency or (latency and broadcast) or phase_1 "
    "or batch_sizes or pcie_links_stayed or transceivers or fans_are or drives_are or paths_stayed "
    "or same_sum or both_stay_exact or (ranks_end_alike and transformer)"
)


def test_a_wheel_holds_the_suite(run_fresh: Callable[..., FleetRun], tmp_path: Path) -> None:
    """As pyproject.toml has it laid out, with the same checks under the same names."""
    (target,) = re.findall(r'^"acceptance" = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SRC, tmp_path / SRC.name, ignore=ignored)
    shutil.copytree(ACCEPTANCE, tmp_path / target, ignore=ignored)
    options = ("--rehearse", f"--fleet-dir={REPORTS}", "-k", "harmful or (product_is_exact and bf16)")
    run = run_fresh("--pyargs", target.replace("/", "."), *options, PYTHONPATH=str(tmp_path))
    assert run.status == 0, run.text
    assert run.outcomes == {
        "test_no_harmful_variable": "passed",
        "test_matrix_product_is_exact[bf16]": "passed",
    }
    suite = run.record.suite
    known = {case for name in suite.checks for case in suite.cases(name)}
    assert {suite.known_as(check) for check in run.record.checks} <= known
    assert run.record.altered == []


def test_every_file_is_a_start_for_ones_own_checks(run_pytest: Callable[..., FleetRun]) -> None:
    files = {f"checks/test_own_{path.stem[5:]}.py": path for path in ACCEPTANCE.glob("test_[0-9]*.py")}
    options = ("--rehearse", f"--fleet-dir={REPORTS}", "--fleet-level=burnin", "-k", ONE_OF_EACH)
    run = run_pytest("checks", *options, files=files)
    assert run.status == 0, run.text
    assert {check.partition("::")[0] for check in run.record.checks} == files.keys()
    assert set(run.outcomes.values()) == {"passed", "not applicable"}
