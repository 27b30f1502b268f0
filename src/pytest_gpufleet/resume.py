"""Going on where a run that died or was interrupted has stopped.

What an earlier run found against the machine is never lost on the way: its health problems go into the new evidence and
reject the machine again, and checks that failed are named beside a new verdict.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.commands.command import CommandFailed
from pytest_gpufleet.commands.folder import EVIDENCE, stated_sums
from pytest_gpufleet.hardware.topology import GpuTopology
from pytest_gpufleet.session import CUT_SHORT
from pytest_gpufleet.verdict.evidence import Check, Record, read, sha256
from pytest_gpufleet.verdict.finding import Finding
from pytest_gpufleet.verdict.levels import check_name

# What must be the same for figures of two runs to stand in one report.
RUN_FACTS = (
    "level",
    "burn_in_seconds",
    "gpus",
    "gpus_present",
    "rehearsal",
    "ranks",
    "profile",
    "profile_sha256",
    "environment",
    "plugin",
    "python",
    "pytest",
)
SOFTWARE = ("driver", "cuda", "cudnn", "nccl", "torch")
GPU_FACTS = ("uuid", "name", "serial", "vbios", "memory_bytes", "pci_bus_id")
# Files and checks that say what the machine is like now: never carried over.
ALWAYS_AGAIN = ("test_1_inventory.py::", "test_2_health.py::", "test_9_endurance.py::test_nvlinks_stayed_clean")


def load(folder: Path) -> Record:
    """The record of the run in `folder`. UsageError if there is none, if it is not as that run left it, or if the run
    came to its end with an answer."""
    try:
        record, digest = read(folder / EVIDENCE), sha256(folder / EVIDENCE)
        others = [name for name, stated in stated_sums(folder).items() if stated and stated != digest]
    except (OSError, ValueError, CommandFailed) as error:
        raise pytest.UsageError(f"--fleet-resume {folder}: no evidence of a run can be read there ({error})") from None
    if not record.run:
        raise pytest.UsageError(f"--fleet-resume {folder}: its evidence does not say what run it was")
    if others:
        raise pytest.UsageError(
            f"--fleet-resume {folder}: {' and '.join(others)} was made of other evidence: {EVIDENCE} was changed later"
        )
    if record.verdict in ("ACCEPTED", "REJECTED") and record.exit_status not in CUT_SHORT:
        raise pytest.UsageError(
            f"--fleet-resume {folder}: that run came to its end ({record.verdict}): there is nothing to resume; "
            "start a new run"
        )
    return record


def check_same(folder: Path, then: Record, run: dict[str, Any], topology: GpuTopology) -> None:
    """UsageError that names what differs between the run to resume and this one."""
    differences = [
        f"{name} was {before!r}, is {now!r}"
        for name, before, now in (
            *((name, then.run.get(name), run.get(name)) for name in RUN_FACTS),
            *((name, getattr(then.topology, name), getattr(topology, name)) for name in SOFTWARE),
            ("the list of GPUs", _gpus(then.topology), _gpus(topology)),
        )
        if before != now
    ]
    if differences:
        what = "; ".join(differences)
        raise pytest.UsageError(f"--fleet-resume {folder}: this is not the same machine and setup: {what}")


def _gpus(topology: GpuTopology) -> list[list[Any]]:
    return [[getattr(gpu, name) for name in GPU_FACTS] for gpu in topology.gpus]


def history(folder: Path, then: Record) -> list[dict[str, Any]]:
    """The runs that a new one goes on with, the first one first: name, begin, and the checks that failed there."""
    failed = [check.id for check in then.checks.values() if check.outcome == "failed"]
    return [*then.run.get("resumed", []), {"run": _name(folder), "utc": then.run.get("utc"), "failed": failed}]


def _name(folder: Path) -> str:
    return folder.resolve().name


def _carried_over(folder: Path, then: Record) -> list[tuple[Check, list[Finding]]]:
    """The checks of a run that need not run again: they passed, left nothing unjudged and do not tell what the machine
    is like now. Each keeps the name of the run that it ran in first."""
    carried = []
    for check in then.checks.values():
        findings = [finding for finding in then.findings if finding.check == check.id]
        unjudged = not then.run.get("rehearsal") and any(finding.state == "not judged" for finding in findings)
        if check.outcome == "passed" and not unjudged and not check_name(check.id).startswith(ALWAYS_AGAIN):
            carried.append((replace(check, run=check.run or _name(folder)), findings))
    return carried


def events(folder: Path, then: Record) -> list[tuple[str, dict[str, Any]]]:
    """The events by which the new run's evidence takes over checks that need not run again, and all that was found
    against the health of a GPU."""
    carried = [
        event
        for check, findings in _carried_over(folder, then)
        for event in (
            *(("finding", {"finding": finding.to_json()}) for finding in findings),
            ("check_finished", {"check": asdict(check)}),
        )
    ]
    told = tuple(f"(in run {earlier['run']})" for earlier in then.run.get("resumed", []))
    here = f" (in run {_name(folder)})"
    worsened = [
        ("health", {"check": check, "problems": [problem + ("" if problem.endswith(told) else here)]})
        for check, problem in then.worsened
    ]
    return carried + worsened
