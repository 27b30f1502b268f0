"""The live table of all GPUs: how it is drawn, where it stands while pytest runs, and which check a run is at."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytest_gpufleet import safe_files
from pytest_gpufleet.hardware.telemetry import Sample
from pytest_gpufleet.model.facts import clock_events
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.report import wording

HISTORY = 60  # samples in a sparkline
ABSENT = "n/a"
SPARKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
# Many a serial console knows ASCII only.
ASCII = str.maketrans(
    {**dict(zip(SPARKS, "_.-:=+*#", strict=True)), **dict.fromkeys(EIGHTHS[1:], "#"), "░": ".", "°": " ", "·": ","}
)
BAR = 5  # characters
PROGRESS_BAR = 12
STALE_SECONDS = 3600
LONGEST_LINE = 16 << 20  # bytes
# How clock-event reasons are shown, by their most alarming one; a power cap is what full load looks like.
ALARMING = ("hw", "sw thermal")
CALM = {"none": "dim", "gpu idle": "dim", "sw power cap": "yellow"}


@dataclass(frozen=True)
class View:
    """What the cells of one GPU are made of: its readings now and before, and how wide the cell is."""

    gpu: Gpu
    now: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    width: int


Cell = tuple[str, str]  # the text and its style


@dataclass(frozen=True)
class Column:
    """`priority`: what has a higher number is left out first where the terminal is narrow."""

    title: str  # two lines
    width: int
    priority: int
    cell: Callable[[View], Cell]


def _shown(value: Any) -> str:
    return ABSENT if value is None else f"{value:.0f}"


def _bar(fraction: float) -> str:
    full, eighths = divmod(round(min(max(fraction, 0.0), 1.0) * BAR * 8), 8)
    return ("█" * full + EIGHTHS[eighths].strip()).ljust(BAR)


def _utilization(view: View) -> Cell:
    percent = view.now.get("utilization_percent")
    return f"{_bar((percent or 0) / 100)} {_shown(percent):>3}", "green"


def _memory(view: View) -> Cell:
    used, total = view.now.get("memory_used_bytes"), view.gpu.memory_bytes
    bar = _bar(used / total if used and total else 0)
    return f"{bar} {_of(None if used is None else used / 2**30, total / 2**30):>7}", "cyan"


def _temperatures(view: View) -> Cell:
    names = ("temperature_c", "memory_temperature_c")
    return "/".join(_shown(view.now.get(name)) for name in names), ""


def _power(view: View) -> Cell:
    return _of(view.now.get("power_watts"), view.gpu.power_limit_watts), ""


def _of(value: float | None, most: float | None) -> str:
    return ABSENT if value is None else f"{value:.0f}" + (f"/{most:.0f}" if most else "")


def _reasons(view: View) -> Cell:
    if not any(value is not None for value in view.now.values()):
        return "does not answer", "bold red"
    mask = view.now.get("clock_event_reasons")
    if mask is None:
        return ABSENT, "dim"
    words = clock_events(mask) or ["none"]
    return ", ".join(words), "bold red" if words[0].startswith(ALARMING) else CALM.get(words[0], "")


def _sparkline(view: View) -> Cell:
    """Power from nothing to its limit."""
    values = [reading.get("power_watts") for reading in view.history][-min(view.width, HISTORY) :]
    top = view.gpu.power_limit_watts or max((value for value in values if value is not None), default=0) or 1
    sparks = [
        " " if value is None else SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] for value in values
    ]
    return "".join(sparks).rjust(view.width), "magenta"


# In the order in which they are shown. The last one takes the room that is left.
COLUMNS = (
    Column("\nGPU", 3, 0, lambda view: (str(view.gpu.index), "bold")),
    Column("\nModel", 16, 8, lambda view: (view.gpu.name.removeprefix("NVIDIA "), "")),
    Column("Load\n%", BAR + 4, 1, _utilization),
    Column("Memory\nGiB", BAR + 8, 4, _memory),
    Column("Temp °C\nGPU/mem", 7, 2, _temperatures),
    Column("Power W\nof max", 7, 3, _power),
    Column("SM\nMHz", 5, 5, lambda view: (_shown(view.now.get("sm_clock_mhz")), "")),
    Column("Clock event\nreasons", 19, 6, _reasons),
    Column("Power\nhistory", 10, 7, _sparkline),
)


def table(
    sample: Sample,
    history: Sequence[Sample],
    topology: GpuTopology,
    running: str = "",
    width: int = 80,
    ascii_only: bool = False,
) -> RenderableType:
    """All GPUs as they are in `sample`, in lines of at most `width` columns; as many lines for each sample.

    `history` are the samples so far with this one at its end; `running` is the check that a run is at. Columns are
    left out by their priority where `width` is too small for all.
    """

    def text(content: str, style: str = "") -> Text:
        content = wording.clean(content)
        if ascii_only:
            return Text(content.translate(ASCII), style, no_wrap=True, overflow="crop")
        return Text(content, style, no_wrap=True, overflow="ellipsis")

    columns, spare = _fitting(width)
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    widths = {
        column: column.width + (min(spare, HISTORY - column.width) if column.cell is _sparkline else 0)
        for column in columns
    }
    for column in columns:
        grid.add_column(text(column.title), width=widths[column], no_wrap=True)
    for index, gpu in enumerate(topology.gpus):
        before = [one.gpus[index] for one in history if index < len(one.gpus)]
        now = sample.gpus[index] if index < len(sample.gpus) else {}
        grid.add_row(*(text(*column.cell(View(gpu, now, before, wide))) for column, wide in widths.items()))
    models = Counter(gpu.name for gpu in topology.gpus)
    title = ", ".join(f"{count} x {name}" for name, count in models.items())
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    below = f"running: {running}" if running else "no run is on"
    return Group(
        text(f"{clock} · {title} · driver {topology.driver or ABSENT}", "bold"),
        grid,
        text(below, "" if running else "dim"),
    )


def _fitting(width: int) -> tuple[list[Column], int]:
    """The columns that fit, in their order, and the columns of the terminal that are left over."""
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.priority):
        taken = sum(one.width + 1 for one in (*chosen, column)) - 1
        if chosen and taken > width:
            break
        chosen.append(column)
    taken = sum(column.width + 1 for column in chosen) - 1
    return [column for column in COLUMNS if column in chosen], max(0, width - taken)


def _progress(began: float, whole: float, doing: str) -> str:
    """A bar, the time that has passed and the time left."""
    done = min(time.time() - began, whole)
    full = round(PROGRESS_BAR * done / whole)
    bar = "█" * full + "░" * (PROGRESS_BAR - full)
    return (
        f"{bar} {wording.duration(done)} of {wording.duration(whole)}, {wording.duration(whole - done)} left: {doing}"
    )


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


class Live:
    """Keeps the table in the lowest lines of a terminal while others write above it.

        with Live(topology, sys.__stdout__, running) as live:
            Sampler(source, 1.0, live.show).start()

    The terminal itself is told to scroll only the lines above (DECSTBM, as apt does for its progress bar). So whatever
    is written there, half lines and the output of other processes too, stays as it is, and no stream is replaced. If
    `stream` is no terminal, or one too small, nothing is ever written.
    """

    LINES_LEFT = 8  # for the others, at least

    def __init__(self, topology: GpuTopology, stream: TextIO, running: Callable[[], str] = lambda: "") -> None:
        self._topology = topology
        self._stream = stream
        self._running = running
        self._history: deque[Sample] = deque(maxlen=HISTORY)
        self._lock = threading.Lock()
        self._size = (0, 0)  # columns and lines of the terminal in which lines are reserved
        self._on = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._ascii = not (stream.encoding or "").lower().startswith("utf")
        self._height = len(topology.gpus) + 4

    def __enter__(self) -> Live:
        with self._lock:
            self._reserve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._release()
            self._on = False

    @property
    def drawn(self) -> bool:
        """Whether the terminal is one that shows the table, and large enough for it."""
        return self._size != (0, 0)

    def show(self, sample: Sample) -> None:
        """Draw this sample; may be called from any thread."""
        self._history.append(sample)
        with self._lock:
            self._reserve()
            if self._size == (0, 0):
                return
            columns, lines = self._size
            canvas = Console(file=io.StringIO(), width=columns, force_terminal=True, legacy_windows=False)
            with canvas.capture() as capture:
                drawing = table(sample, tuple(self._history), self._topology, self._running(), columns, self._ascii)
                canvas.print(drawing)
            first = lines - self._height + 1
            drawn = capture.get().split("\n")[: self._height]
            self._write(
                "\x1b7" + "".join(f"\x1b[{first + n};1H\x1b[2K{line}" for n, line in enumerate(drawn)) + "\x1b8"
            )

    def _reserve(self) -> None:
        """Take the lowest lines away from whoever writes; again after the window changed its size."""
        size = self._terminal_size()
        if size == self._size:
            return
        self._release()
        if size == (0, 0):
            return
        self._size, height, above = size, self._height, size[1] - self._height
        # Make room below the cursor, keep it there, and let only what is above the room scroll.
        self._write("\x1bD" * height + f"\x1b[{height}A\x1b7\x1b[1;{above}r\x1b8")

    def _release(self) -> None:
        if self._size != (0, 0):
            self._write(f"\x1b7\x1b[r\x1b[{self._size[1] - self._height + 1};1H\x1b[J\x1b8")
            self._size = (0, 0)

    def _terminal_size(self) -> tuple[int, int]:
        """(0, 0) where there is no terminal, or not enough of it."""
        try:
            size = os.get_terminal_size(self._stream.fileno()) if self._on else None
        except (OSError, ValueError):
            size = None
        return (size.columns, size.lines) if size and size.lines >= self._height + self.LINES_LEFT else (0, 0)

    def _write(self, text: str) -> None:
        """In one call, past every buffer, so that nothing can come in between."""
        data = text.encode(self._stream.encoding or "ascii", errors="replace")
        while data:
            data = data[os.write(self._stream.fileno(), data) :]
