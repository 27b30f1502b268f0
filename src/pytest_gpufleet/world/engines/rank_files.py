"""The files by which a local engine sees what a rank does, or did before it died."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_gpufleet.world.engines.protocol import Trace
from pytest_gpufleet.world.worker import progress_board

STACK_SECONDS = 0.3
TURN_SECONDS = 0.02  # between two looks at whether all have written
STACK_BYTES = 32 * 1024
OUTPUT_BYTES = 8 * 1024
WORKER = "pytest_gpufleet/world/worker/main.py"
OWN_FRAMES = re.compile(r"pytest_gpufleet/(plugin/spmd|world/worker/progress_board)\.py")


@dataclass(frozen=True)
class RankFiles:
    """In `folder`, which the engine makes for its world; `sockets` is one whose path is short enough for sockets."""

    folder: Path
    sockets: Path
    rank: int

    @property
    def output(self) -> Path:
        return self._file("output")

    @property
    def stack(self) -> Path:
        return self._file("stack")

    @property
    def progress(self) -> Path:
        return self._file("progress")

    @property
    def recorder(self) -> Path:
        return self._file("flight")

    def _file(self, kind: str) -> Path:
        return self.folder / f"rank{self.rank}.{kind}"

    def trace(self, state: str, stack_from: int = 0) -> Trace:
        """`stack_from`: how long the file of stacks was before the rank was asked for another one."""
        return replace(
            progress_board.read(self.progress),
            stack=_without_own_frames(_tail(self.stack, STACK_BYTES, stack_from)),
            output=_tail(self.output, OUTPUT_BYTES),
            recorder=_text(self.recorder),
            state=state,
        )


def stack_sizes(asked: Iterable[RankFiles]) -> dict[RankFiles, int]:
    return {files: _size(files.stack) for files in asked}


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


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, limit: int, start: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
