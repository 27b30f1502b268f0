"""The files by which a local engine sees what a rank does, or did before it died."""

import fcntl
import mmap
import os
import re
import shutil
import struct
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pytest_gpufleet.world.call import Trace

MARKER = ".made-by-pytest-gpufleet"  # a name alone makes no folder ours


def make(prefix: str, base: str) -> tuple[Path, int]:
    """A new folder that only this user can enter, and a descriptor that holds it for as long as it is open."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    (path / MARKER).touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return path, descriptor


def sweep(prefix: str, bases: Iterable[str], after_seconds: float) -> None:
    """Remove folders that were made here, that nobody holds any more and that did not change for so long. By a lock and
    not by a process number: a process in another container may share the folder, but not the numbers."""
    for folder in (path for base in bases for path in Path(base).glob(f"{prefix}*")):
        with suppress(OSError), ExitStack() as stack:  # held, not ours, or just removed by somebody else
            # Anybody may have put anything there: no link is followed, and no FIFO waited for.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
            stack.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime >= after_seconds:
                os.stat(MARKER, dir_fd=descriptor, follow_symlinks=False)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


PREFIX = "gpufleet-world-"
SWEEP_AFTER_SECONDS = 60.0  # a folder younger than this may not be locked yet
SHORT = "/tmp"
MOST_PATH_BYTES = 72  # unix(7) allows a socket 107, of which names of a rank and of multiprocessing take up to 34


def make_scratch() -> tuple[Path, int]:
    """The folder of the ranks of one world, as `make` gives it. Below /tmp where the path below TMPDIR would be too
    long for a socket, or where a letter of it means something in a URL, as that of the file by which ranks meet."""
    sweep(PREFIX, {tempfile.gettempdir(), SHORT}, SWEEP_AFTER_SECONDS)  # of controllers that were killed
    path = os.fsencode(os.path.join(tempfile.gettempdir(), f"{PREFIX}12345678"))
    plain = len(path) <= MOST_PATH_BYTES and urllib.parse.quote(path).encode() == path
    return make(PREFIX, tempfile.gettempdir() if plain else SHORT)


OUTPUT_BYTES = 8 * 1024
NOW = struct.Struct("d500s")  # of a rank: since when, on time.monotonic(), it is in which phase
WORKER = "pytest_gpufleet/world/worker/main.py"
OWN_FRAMES = re.compile(r"pytest_gpufleet/(plugin/spmd|world/engines/rank_files)\.py")


class RankFiles(NamedTuple):
    """Of one rank, in the folder of its world."""

    folder: Path
    rank: int

    def path(self, kind: Literal["output", "stack", "progress", "recorder", "sockets"]) -> Path:
        return self.folder / f"rank{self.rank}.{kind}"

    def stack_bytes(self) -> int:
        return self.path("stack").stat().st_size if self.path("stack").exists() else 0

    def trace(self, state: str, stack_from: int = 0) -> Trace:
        """`stack_from`: how long the file of stacks was before the rank was asked for another one."""
        try:
            since, phase = NOW.unpack(self.path("progress").read_bytes())
        except (OSError, struct.error):  # it has not begun
            since, phase = 0.0, b""
        phase = phase.rstrip(b"\0")
        return Trace(
            phase=phase.decode(errors="replace"),
            seconds=time.monotonic() - since if phase else 0.0,
            stack=_without_own_frames(_tail(self.path("stack"), 32 * 1024, stack_from)),
            output=_tail(self.path("output"), OUTPUT_BYTES),
            recorder=_tail(self.path("recorder")),
            state=state,
        )


def _without_own_frames(stacks: str) -> str:
    """What faulthandler wrote, without the frames that lead to the test's own code."""
    kept = []
    for block in stacks.split("\n\n"):
        lines = block.splitlines()
        own = next((i for i, line in enumerate(lines) if WORKER in line), len(lines))
        if own < len(lines) and lines[own].endswith("in _wait_for_requests"):
            continue  # the thread that writes the flight recorder
        lines = [line for line in lines[:own] if not OWN_FRAMES.search(line)]
        if len(lines) > 1 or block.startswith("Fatal"):
            kept.append("\n".join(lines))
    return "\n\n".join(kept)


def _tail(path: Path, limit: int = sys.maxsize, start: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Progress:
    """A rank's current phase (`now`), in memory that it shares with its engine: readable while it hangs or is dead."""

    now = ""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(NOW.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def phase(self, name: str) -> None:
        self.now = name
        NOW.pack_into(self._memory, 0, time.monotonic(), name.encode(errors="replace"))
