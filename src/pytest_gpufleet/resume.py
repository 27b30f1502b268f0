"""Going on where a run that died has stopped."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.hardware.topology import GpuTopology
from pytest_gpufleet.verdict.evidence import Check, Record, read
from pytest_gpufleet.verdict.finding import Finding

# What must be the same for figures of two runs to stand in one report.
RUN_FACTS = (
    "level",
    "gpus",
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


def load(folder: Path) -> Record:
    """The record of the run in `folder`. UsageError if there is none."""
    try:
        record = read(folder / "evidence.jsonl")
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--fleet-resume {folder}: no evidence of a run can be read there ({error})") from None
    if not record.run:
        raise pytest.UsageError(f"--fleet-resume {folder}: its evidence does not say what run it was")
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


def carried_over(folder: Path, then: Record) -> list[tuple[Check, list[Finding]]]:
    """The checks of a run that need not run again: they passed and left nothing unjudged. Each keeps the name of the
    run that it ran in first."""
    carried = []
    for check in then.checks.values():
        findings = [finding for finding in then.findings if finding.check == check.id]
        unjudged = not then.run.get("rehearsal") and any(finding.state == "not judged" for finding in findings)
        if check.outcome == "passed" and not unjudged:
            carried.append((replace(check, run=check.run or folder.resolve().name), findings))
    return carried


def events(carried: list[tuple[Check, list[Finding]]]) -> list[tuple[str, dict[str, Any]]]:
    """The events by which the new run's evidence takes over what was carried."""
    return [
        event
        for check, findings in carried
        for event in (
            *(("finding", {"finding": finding.to_json()}) for finding in findings),
            ("check_finished", {"check": asdict(check)}),
        )
    ]
