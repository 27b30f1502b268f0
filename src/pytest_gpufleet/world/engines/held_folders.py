"""Folders for what is temporary: held while their process lives, and swept after it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARKER = ".made-by-pytest-gpufleet"  # a name alone makes no folder ours


def make(prefix: str, base: str) -> tuple[Path, int]:
    """A new folder that only this user can enter, and a descriptor that holds it for as long as it is open."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    (path / MARKER).touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return path, descriptor


def sweep(prefix: str, bases: Iterable[str], after_seconds: float) -> None:
    """Remove the folders that nobody holds any more and that did not change for so long.

    A lock tells, not a process number: a process in another container may share the folder but not the numbers.
    """
    for base in bases:
        for folder in Path(base).glob(f"{prefix}*"):
            with suppress(OSError):  # held, not ours, or just removed by somebody else
                _remove_if_left(folder, after_seconds)


def _remove_if_left(folder: Path, after_seconds: float) -> None:
    """OSError if it is not a folder that was made here and left behind."""
    # Anybody may have put anything there: no link is followed, and no FIFO waited for.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime >= after_seconds:
            os.stat(MARKER, dir_fd=descriptor, follow_symlinks=False)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
