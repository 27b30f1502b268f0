"""The files that a run leaves behind: where they go, and whether they can be written."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

if TYPE_CHECKING:
    from pytest_gpufleet.verdict.evidence import Evidence

REPORT_BYTES = 4 << 20
TEXTFILE = b"# HELP gpufleet_"  # how a textfile of ours begins


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading, in a folder that others may have filled: no link is followed, and nothing waits
    for the other end of a FIFO. OSError, with the reason in words, if it is anything else or longer than `most_bytes`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and (most_bytes is None or found.st_size <= most_bytes):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {most_bytes:,} are read", str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


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
        # It will be replaced: it must not be somebody's evidence or profile.
        if not problem and prometheus.exists() and not _is_textfile(prometheus):
            problem = "it is there and is no textfile of an earlier run; give another name, or remove it"
        tempfile.TemporaryFile(dir=prometheus.parent).close()
    except OSError as error:
        problem = error.strerror
    if problem:
        raise pytest.UsageError(f"--fleet-prometheus {prometheus} cannot be written: {problem}")


def _is_textfile(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(TEXTFILE)) in (TEXTFILE, b"")


def write_text(path: Path, text: str) -> None:
    """Write a file, which is there as a whole or as it was before. OSError if that cannot be done."""
    if path.exists() and not path.is_file() and not path.is_dir():  # like /dev/stdout: not to be replaced by a file
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # what a link points to, and not the link
    temporary = path.with_name(f".gpufleet-{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def no_room(folder: Path) -> str:
    """Why the report cannot be written to the run's folder, which is made again if it is gone; "" if it can."""
    probe = folder / "room-for-the-report"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(REPORT_BYTES))
    except OSError as error:
        return f"the report cannot be written to {folder}: {error.strerror}"
    finally:
        with suppress(OSError):  # the folder may be gone
            probe.unlink()
    return ""


def write_results(evidence: Evidence, folder: Path, prometheus: Path | None) -> str:
    """What machines read: summary.json, and Prometheus' textfile if it was asked for. What went wrong, or ""."""
    from pytest_gpufleet.verdict import summary

    path = folder / summary.FILE
    try:
        write_text(path, summary.text(evidence.record, evidence.sha256))
        if prometheus is not None:
            from pytest_gpufleet.report import prometheus as textfile

            path = prometheus
            textfile.write(path, evidence.record)
    except OSError as error:
        if path != prometheus:  # nor is half of a summary left behind
            with suppress(OSError):
                path.unlink()
        return f"{path} could not be written: {error.strerror}"
    return ""
