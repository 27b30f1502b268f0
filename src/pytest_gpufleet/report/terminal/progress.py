"""Which check a run is at, read from its evidence while it is being written."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.measurement import Sample
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
        began, whole, doing = self._progress
        done = min(time.time() - began, whole)
        full = round(BAR * done / whole)
        bar = "#" * full + "." * (BAR - full)
        return f"{self._running.rpartition('::')[2]} {bar} {_time(done, whole)}: {doing}"

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


def _time(done: float, whole: float) -> str:
    """What has passed, and what is left."""
    done_of, left = f"{wording.duration(done)} of {wording.duration(whole)}", wording.duration(max(0.0, whole - done))
    return f"{done_of}, {left} left"


EVERY_SECONDS = 60.0

Tell = Callable[[float, "Sample | None"], None]


def teller(stream: TextIO, whole: float, shown_elsewhere: Callable[[], bool]) -> Tell:
    """tell(seconds done, latest sample) writes a line, once a minute; nothing while it is `shown_elsewhere`."""
    due = 0.0

    def tell(done: float, sample: Sample | None) -> None:
        nonlocal due
        if done < due or shown_elsewhere():
            return
        lead = "" if due else "\n"  # ends the line that pytest has begun
        due = done + EVERY_SECONDS
        state = [_time(done, whole)]
        for name, unit in (("temperature_c", "°C"), ("power_watts", "W")):
            readings = [of.get(name) for of in sample.gpus] if sample else []
            if values := [value for value in readings if isinstance(value, int | float)]:
                state.append(f"{min(values):.0f}-{max(values):.0f} {unit}")
        stream.write(f"{lead}  {', '.join(state)}\n")
        stream.flush()

    return tell
