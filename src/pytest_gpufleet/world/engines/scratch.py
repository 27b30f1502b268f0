"""The folder of a world, and what killed controllers have left of theirs."""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from pytest_gpufleet.world.engines import held_folders

PREFIX = "gpufleet-world-"
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
    path, held = held_folders.make(PREFIX, tempfile.gettempdir())
    if len(os.fsencode(path)) <= MOST_PATH_BYTES and urllib.parse.quote(os.fsencode(path)) == str(path):
        return Scratch(path, path, (held,))
    short, also_held = held_folders.make(PREFIX, SHORT)
    return Scratch(path, short, (held, also_held))


def sweep() -> None:
    """Remove the folders of controllers that were killed."""
    held_folders.sweep(PREFIX, {tempfile.gettempdir(), SHORT}, SWEEP_AFTER_SECONDS)
