"""Whether what a run is to write can be written: Refused before it begins, not a loss when it ends."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.safe_files import STREAMS, open_regular

TEMPORARY_BYTES = 64 << 20  # the photographs that the suite has decoded take 23 MB, all else less
# Of evidence for each GPU and sample: 327 to 409 on the recorded machines (tests/recorded).
SAMPLE_BYTES = 409
# All else of a run on one machine. Four H200 left 0.7 MB of other evidence and 0.6 MB of report; REPORT_BYTES of
# run/folder.py must be free when it is written.
RUN_BYTES = 8 << 20
TEXTFILE = b"# HELP gpufleet_"  # how a textfile of ours begins


def check_temporary() -> None:
    """Refused if there is no room for temporary files, without which checks would fail that say nothing of a GPU."""
    folder = os.environ.get("TMPDIR", "/tmp")
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, TEMPORARY_BYTES)
    except OSError as error:
        raise Refused(
            f"there is no room for temporary files in {folder}: {error.strerror}; "
            f"make {TEMPORARY_BYTES >> 20} MiB free there, or set TMPDIR to another folder"
        ) from None


def needed(gpus: int, nodes: int, seconds: float, interval: float) -> int:
    """Bytes that a run leaves on so many GPUs of so many nodes, with sustained load for so many seconds."""
    own_runs = nodes if nodes > 1 else 0  # of each node, brought here
    return RUN_BYTES * (1 + own_runs) + int(SAMPLE_BYTES * gpus * seconds / interval)


def check_evidence(folder: Path, wanted: int) -> None:
    """Refused if the file system of the folder, which need not be there yet, has less than `wanted` bytes free."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        system = os.statvfs(there)
    except OSError:  # making the folder will tell why
        return
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < wanted:  # a file system without blocks does not tell
        raise Refused(
            f"evidence and report of this run take about {wanted >> 20:,} MiB, and {there} has {free >> 20:,} MiB "
            "free: make room there, or choose another folder with --fleet-dir"
        )


def check_copy(option: str, path: Path) -> None:
    """Refused if what an option asks for could not be put in its place when the run is over."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{option} {path} cannot be written: {error.strerror}") from None
    if path.parent not in STREAMS:
        _check_place(option, path)


def _check_place(option: str, path: Path) -> None:
    problem = "it is a folder" if path.is_dir() else ""
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise Refused(f"{option} {path} cannot be written: {problem}")


def check_textfile(path: Path | None) -> None:
    """Refused if Prometheus' textfile could not be put in its place, or if it would replace something else."""
    if path is None:
        return
    # It will be replaced: it must not be somebody's evidence or profile.
    if os.path.lexists(path) and not path.is_dir() and not _is_textfile(path):
        why = "it is there and is no textfile of an earlier run; give another name, or remove it"
        raise Refused(f"--fleet-prometheus {path} cannot be written: {why}")
    _check_place("--fleet-prometheus", path)


def _is_textfile(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(TEXTFILE)) in (TEXTFILE, b"")
    except OSError:
        return False
