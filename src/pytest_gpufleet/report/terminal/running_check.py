"""Which check a run is at, read from its evidence while it is being written."""

from __future__ import annotations

import json
import time
from pathlib import Path

from pytest_gpufleet import safe_files
from pytest_gpufleet.report import wording

STALE_SECONDS = 3600
LONGEST_LINE = 16 << 20  # bytes
BAR = 12  # characters


class RunningCheck:
    """Called, it tells the check that a run with its evidence under `folder` is at; "" if no run is on.

    It reads only what was added to the file since the last call, for telemetry makes long files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._offset = 0
        self._running = ""
        self._progress: tuple[float, float, str] | None = None  # when it began, how long it takes, what it does now

    def __call__(self) -> str:
        try:
            found = [(path.lstat().st_mtime, path) for path in self._folder.glob("*/evidence.jsonl")]
            modified, path = max(found, default=(0.0, None))
            if path is None or time.time() - modified > STALE_SECONDS:
                return ""
            if path != self._path or path.lstat().st_size < self._offset:
                self._path, self._offset, self._running, self._progress = path, 0, "", None
            with safe_files.open_regular(path) as file:  # the folder may be another user's
                file.seek(self._offset)
                for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                    if not line.endswith(b"\n"):  # it is still being written
                        break
                    self._offset += len(line)
                    self._follow(line)
        except OSError:  # somebody removed the folder
            return ""
        if self._progress is None:
            return self._running
        return f"{self._running.rpartition('::')[2]} {_progress(*self._progress)}"

    def _follow(self, line: bytes) -> None:
        if not any(b'"event": "%s' % event in line for event in (b"check_", b"verdict", b"progress")):
            return
        try:
            event = json.loads(line)
        except ValueError:
            return
        match event:
            case {"event": "check_started", "check": str(check)}:
                check = "".join(filter(str.isprintable, check))
                self._running, self._progress = check, None
            case {"event": "progress", "done": done, "of": whole, "doing": str(doing)}:
                self._progress = time.time() - done, whole, "".join(filter(str.isprintable, doing))
            case {"event": "check_finished" | "verdict"}:
                self._running, self._progress = "", None


def _progress(began: float, whole: float, doing: str) -> str:
    """A bar, the time that has passed and the time left."""
    done = min(time.time() - began, whole)
    full = round(BAR * done / whole)
    bar = "#" * full + "." * (BAR - full)
    return (
        f"{bar} {wording.duration(done)} of {wording.duration(whole)}, {wording.duration(whole - done)} left: {doing}"
    )
