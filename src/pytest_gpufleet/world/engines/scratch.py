"""The folder of a world, and what killed controllers have left of theirs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "gpufleet-world-"
MARKER = ".made-by-pytest-gpufleet"  # a name alone makes no folder ours
SWEEP_AFTER_SECONDS = 60.0  # a folder younger than this may not be locked yet
SHORT = "/tmp"
MOST_PATH_BYTES = 80  # unix(7) allows a socket 107, of which multiprocessing's own names take up to 26


@dataclass(frozen=True)
class Scratch:
    """Folders that only this user can enter. `sockets` is `path` itself where a socket's path in it is not too long,
    and where no letter of it means something in a URL, as that of `store`."""

    path: Path
    sockets: Path
    held: tuple[int, ...]  # the folders, open and locked

    @property
    def store(self) -> Path:
        """The file through which ranks find each other, so that no port is open for strangers and none can be in use
        already."""
        return self.sockets / "store"

    def remove(self) -> None:
        for folder in (self.path, self.sockets):
            shutil.rmtree(folder, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Leave the folders to whoever else holds them."""
        for descriptor in self.held:
            os.close(descriptor)


def make() -> Scratch:
    path, held = _folder(tempfile.gettempdir())
    if len(os.fsencode(path)) <= MOST_PATH_BYTES and urllib.parse.quote(os.fsencode(path)) == str(path):
        return Scratch(path, path, (held,))
    short, also_held = _folder(SHORT)
    return Scratch(path, short, (held, also_held))


def _folder(base: str) -> tuple[Path, int]:
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    (path / MARKER).touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as long as this process lives: see sweep
    return path, descriptor


def sweep() -> None:
    """Remove the folders of controllers that were killed.

    A lock tells, not a process number: a controller in another container may share the folder but not the numbers.
    """
    for base in {tempfile.gettempdir(), SHORT}:
        for folder in Path(base).glob(f"{PREFIX}*"):
            with suppress(OSError):  # held, not ours, or just removed by somebody else
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """OSError if it is not a folder that was made here and left behind."""
    # Anybody may have put anything there: no link is followed, and no FIFO waited for.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime >= SWEEP_AFTER_SECONDS:
            os.stat(MARKER, dir_fd=descriptor, follow_symlinks=False)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
