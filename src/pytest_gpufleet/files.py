"""The files that a run leaves behind: where they go, and whether they can be written."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpufleet.verdict.evidence import Evidence

REPORT_BYTES = 4 << 20


def new_folder(parent: Path, name: str) -> Path:
    """A folder that no other run has, not even one that starts in the same second. UsageError if it cannot be made."""
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.is_dir():  # else another run was here first
                raise pytest.UsageError(
                    f"the report folder {folder} cannot be written ({error.strerror}): choose another with --fleet-dir"
                ) from None
    raise AssertionError("unreachable")


def check_writable(prometheus: Path | None) -> None:
    """UsageError if Prometheus' textfile could not be put in its place when the run is over."""
    if prometheus is None:
        return
    problem: str | None = "it is a folder" if prometheus.is_dir() else None
    try:
        tempfile.TemporaryFile(dir=prometheus.parent).close()
    except OSError as error:
        problem = error.strerror
    if problem:
        raise pytest.UsageError(f"--fleet-prometheus {prometheus} cannot be written: {problem}")


def no_room(folder: Path) -> str:
    """Why the report cannot be written to the run's folder, which is made again if it is gone; "" if it can."""
    probe = folder / "room-for-the-report"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(REPORT_BYTES))
        probe.unlink()
    except OSError as error:
        return f"the report cannot be written to {folder}: {error.strerror}"
    return ""


def write_results(evidence: Evidence, folder: Path, prometheus: Path | None) -> str:
    """What machines read: summary.json, and Prometheus' textfile if it was asked for. What went wrong, or ""."""
    from pytest_gpufleet.verdict import summary

    path = folder / summary.FILE
    try:
        path.write_text(summary.text(evidence.record, evidence.sha256), encoding="utf-8")
        if prometheus is not None:
            from pytest_gpufleet.report import prometheus as textfile

            path = prometheus
            textfile.write(path, evidence.record)
    except OSError as error:
        return f"{path} could not be written: {error.strerror}"
    return ""
