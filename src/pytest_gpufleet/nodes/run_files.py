"""The files of a folder for another node, and nothing beside them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def sizes(folder: Path) -> dict[str, int]:
    """Every regular file below a folder, by its name seen from there, with its size in bytes. No link is followed."""
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):  # a run that goes on writes files and gives them other names
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    found[path.relative_to(folder).as_posix()] = state.st_size
    return found


def part(folder: Path, name: str, offset: int, most: int) -> bytes:
    """`most` bytes of a regular file from `offset` on; fewer at its end. OSError if it cannot be read, or if its name
    leads out of the folder, be it by a link."""
    descriptor = _opened(folder, PurePosixPath(name))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{name} is not a regular file")
        return os.pread(descriptor, most, offset)
    finally:
        os.close(descriptor)


def _opened(folder: Path, name: PurePosixPath) -> int:
    """Folder by folder, so that none on the way can be a link."""
    if name.is_absolute() or not name.parts or ".." in name.parts:
        raise OSError(f"{name} is not the name of a file below the folder of a run")
    descriptor = os.open(folder, OPENED | os.O_DIRECTORY)
    for number, part in enumerate(name.parts, 1):
        outer = descriptor
        try:
            descriptor = os.open(part, OPENED | (os.O_DIRECTORY if number < len(name.parts) else 0), dir_fd=outer)
        finally:
            os.close(outer)
    return descriptor
