"""The files by which a local engine sees what a rank does, or did before it died."""

import fcntl
import mmap
import os
import re
import shutil
import struct
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from pytest_gpufleet.world.engines.protocol import Trace

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

    By a lock, not by a process number: a process in another container may share the folder but not the numbers.
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
        """Leave the folders to others that hold them."""
        for descriptor in self.held:
            os.close(descriptor)


def make_scratch() -> Scratch:
    path, held = make(PREFIX, tempfile.gettempdir())
    if len(os.fsencode(path)) <= MOST_PATH_BYTES and urllib.parse.quote(os.fsencode(path)) == str(path):
        return Scratch(path, path, (held,))
    short, also_held = make(PREFIX, SHORT)
    return Scratch(path, short, (held, also_held))


def sweep_scratch() -> None:
    """Remove the folders of controllers that were killed."""
    sweep(PREFIX, {tempfile.gettempdir(), SHORT}, SWEEP_AFTER_SECONDS)


STACK_SECONDS = 0.3
TURN_SECONDS = 0.02  # between two looks at whether all have written
STACK_BYTES = 32 * 1024
OUTPUT_BYTES = 8 * 1024
WORKER = "pytest_gpufleet/world/worker/main.py"
OWN_FRAMES = re.compile(r"pytest_gpufleet/(plugin/spmd|world/engines/rank_files)\.py")


@dataclass(frozen=True)
class RankFiles:
    """Of one rank; `sockets` is a folder whose path is short enough for sockets."""

    sockets: Path
    output: Path
    stack: Path
    progress: Path
    recorder: Path

    def trace(self, state: str, stack_from: int = 0) -> Trace:
        """`stack_from`: how long the file of stacks was before the rank was asked for another one."""
        return replace(
            read_progress(self.progress),
            stack=_without_own_frames(_tail(self.stack, STACK_BYTES, stack_from)),
            output=_tail(self.output, OUTPUT_BYTES),
            recorder=self.recorder.read_text(errors="replace") if self.recorder.exists() else "",
            state=state,
        )


def files_in(scratch: Scratch, rank: int) -> RankFiles:
    kinds = ("output", "stack", "progress", "flight")
    return RankFiles(scratch.sockets, *(scratch.path / f"rank{rank}.{kind}" for kind in kinds))


def stack_sizes(asked: Iterable[RankFiles]) -> dict[RankFiles, int]:
    return {files: files.stack.stat().st_size if files.stack.exists() else 0 for files in asked}


def wait_for_stacks(before: Mapping[RankFiles, int]) -> None:
    """Until all whose files had these sizes have written their stacks, and nobody is still writing; at most
    STACK_SECONDS."""
    deadline = time.monotonic() + STACK_SECONDS
    last = {**before}
    while before and time.monotonic() < deadline:
        now = stack_sizes(before)
        if now == last and all(now[files] > size for files, size in before.items()):
            break
        last = now
        time.sleep(TURN_SECONDS)


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


def _tail(path: Path, limit: int, start: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# How far a rank has come, in memory that it shares with its engine: readable even while it hangs or is dead.

_SLOT = struct.Struct("=dIH")  # monotonic time, a count, length of the text that follows
_SLOT_BYTES = 512
_PHASE, _COLLECTIVE = 0, _SLOT_BYTES

# What torch.distributed offers under its own name. Those that go past it (DDP's reducer) are in NCCL's flight recorder.
# Not send and receive: of those each rank may call another number.
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip


class Progress:
    """A rank's current phase (`now`) and the last collective it called in the current call."""

    now = ""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(2 * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), 2 * _SLOT_BYTES)
        self._collectives = 0

    def begin(self, call: str) -> None:
        """A new call. Collectives count from 0 again, since a rank that was not in the last call has called fewer."""
        self._collectives = 0
        self._write(_COLLECTIVE, 0, "")
        self.phase(call)

    def phase(self, name: str) -> None:
        self.now = name
        self._write(_PHASE, 0, name)

    def call_collectives(self, module: Any) -> None:
        """Have the collectives of `module` (torch.distributed) note that they were called."""
        for name in COLLECTIVES:
            setattr(module, name, self._noting(name, getattr(module, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._collectives += 1
            self._write(_COLLECTIVE, self._collectives, name)
            return function(*args, **kwargs)

        return noting

    def _write(self, slot: int, count: int, text: str) -> None:
        data = text.encode(errors="replace")[: _SLOT_BYTES - _SLOT.size]
        self._memory[slot : slot + _SLOT.size + len(data)] = _SLOT.pack(time.monotonic(), count, len(data)) + data


def read_progress(path: Path) -> Trace:
    """Phase and collective of the rank that writes this file, on the machine that it runs on."""
    try:
        memory = path.read_bytes()
    except OSError:
        return Trace()
    phase, _, seconds = _slot(memory, _PHASE)
    collective, number, _ = _slot(memory, _COLLECTIVE)
    return Trace(phase, seconds, collective, number)


def _slot(memory: bytes, at: int) -> tuple[str, int, float]:
    if len(memory) < at + _SLOT_BYTES:
        return "", 0, 0.0
    since, count, length = _SLOT.unpack_from(memory, at)
    text = memory[at + _SLOT.size :][:length].decode(errors="replace")
    return text, count, time.monotonic() - since if length else 0.0
