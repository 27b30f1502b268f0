"""The files that a run leaves behind: where they go, and whether they can be written."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO, TextIO

import pytest

REPORT_BYTES = 4 << 20
TEMPORARY_BYTES = 64 << 20  # the photographs that the suite has decoded take 23 MB, all else less
# Of /dev/stdout and of what a shell makes of >(...): links by design, in folders that only root can change.
STREAMS = tuple(map(Path, ("/dev", "/dev/fd", "/proc/self/fd")))
NOT_REGULAR = "it is not a regular file"
TEXTFILE = b"# HELP gpufleet_"  # how a textfile of ours begins


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading, in a folder that others may have filled: no link is followed, and nothing waits
    for the other end of a FIFO. OSError, with the reason in words, if it is anything else or longer than `most_bytes`.
    """
    descriptor = _open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and (most_bytes is None or found.st_size <= most_bytes):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {most_bytes:,} are read", str(path))
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise


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


def check_temporary() -> None:
    """UsageError if there is no room for temporary files, without which checks would fail that say nothing of a GPU."""
    folder = os.environ.get("TMPDIR", "/tmp")
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, TEMPORARY_BYTES)
    except OSError as error:
        raise pytest.UsageError(
            f"there is no room for temporary files in {folder}: {error.strerror}; "
            f"make {TEMPORARY_BYTES >> 20} MiB free there, or set TMPDIR to another folder"
        ) from None


def check_copy(option: str, path: Path) -> None:
    """UsageError if what an option asks for could not be put in its place when the run is over."""
    problem = "it is a folder" if path.is_dir() else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent not in STREAMS:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise pytest.UsageError(f"{option} {path} cannot be written: {problem}")


def check_textfile(path: Path | None) -> None:
    """UsageError if Prometheus' textfile could not be put in its place, or if it would replace something else."""
    if path is None:
        return
    problem: str | None = "it is a folder" if path.is_dir() else None
    try:
        # It will be replaced: it must not be somebody's evidence or profile.
        if not problem and os.path.lexists(path) and not _is_textfile(path):
            problem = "it is there and is no textfile of an earlier run; give another name, or remove it"
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        problem = error.strerror
    if problem:
        raise pytest.UsageError(f"--fleet-prometheus {path} cannot be written: {problem}")


def _is_textfile(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(TEXTFILE)) in (TEXTFILE, b"")
    except OSError:
        return False


def write_text(path: Path, text: str) -> None:
    """Write a file, which is there as a whole or as it was before. OSError if that cannot be done.

    A link in its place is replaced, and what it leads to stays as it is: others may have put it there.
    """
    if path.parent in STREAMS:
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".gpufleet-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
        try:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def append_to(path: Path) -> TextIO:
    """A file to write to at its end, made if it is not there. OSError if that cannot be done, or if it is a link or has
    other names too, for others may have put it there."""
    if path.parent in STREAMS:
        return path.open("a", newline="", encoding="utf-8")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = _open(path, flags)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return os.fdopen(descriptor, "a", newline="", encoding="utf-8")
    os.close(descriptor)
    why = "it is a hard link to something else" if stat.S_ISREG(found.st_mode) else NOT_REGULAR
    raise OSError(errno.EINVAL, why, str(path))


def no_room(folder: Path) -> str:
    """Why the report cannot be written to the run's folder, which is made again if it is gone; "" if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(REPORT_BYTES))
    except OSError as error:
        return f"the report cannot be written to {folder}: {error.strerror}"
    return ""
