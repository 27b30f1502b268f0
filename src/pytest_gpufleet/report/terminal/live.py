"""What goes on, at the bottom of a terminal, while pytest writes above it: a table of all GPUs, or a line on nodes; and
which check a run is at, read from its evidence while it is being written."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pytest_gpufleet import safe_files
from pytest_gpufleet.model import events
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import GpuTopology, clock_events
from pytest_gpufleet.report import wording

OTHERS = 8  # lines for others, at least
AROUND = 4  # lines: above the rows of GPUs two of heads and one of the machine, below them one of the run
ABSENT = "n/a"
# How clock-event reasons are shown, by their most alarming one; a power cap is what full load looks like.
ALARMING = ("hw", "sw thermal")
CALM = {"none": "dim", "gpu idle": "dim", "sw power cap": "yellow"}

# Of each column after that of the GPU the head in two lines, the reading, by what it is divided, and the style.
COLUMNS = (
    ("Load\n%", "utilization_percent", 1, "green"),
    ("Memory\nGiB", "memory_used_bytes", 1 << 30, "cyan"),
    ("Temp C\nGPU", "temperature_c", 1, ""),
    ("Temp C\nmem", "memory_temperature_c", 1, ""),
    ("Power W\nof max", "power_watts", 1, "magenta"),
    ("SM\nMHz", "sm_clock_mhz", 1, ""),
)


def _reasons(now: Mapping[str, Any]) -> tuple[str, str]:
    """What holds the clocks of a GPU down, and in which style that is shown."""
    if not any(value is not None for value in now.values()):
        return "does not answer", "bold red"
    if (mask := now.get("clock_event_reasons")) is None:
        return ABSENT, "dim"
    words = clock_events(mask) or ["none"]
    return ", ".join(words), "bold red" if words[0].startswith(ALARMING) else CALM.get(words[0], "")


def table(sample: Sample, topology: GpuTopology, running: str = "") -> RenderableType:
    """All GPUs as in `sample`, in the same number of lines at any width. `running`: the check that a run is at."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("\nGPU", *(column[0] for column in COLUMNS), "Clock event\nreasons"):
        grid.add_column(title, no_wrap=True, overflow="crop")
    for index, gpu in enumerate(topology.gpus):
        now = sample.gpus[index] if index < len(sample.gpus) else {}
        most, cells = {"memory_used_bytes": gpu.memory_bytes, "power_watts": gpu.power_limit_watts}, []
        for _, reading, by, style in COLUMNS:
            value, of = now.get(reading), most.get(reading)
            text = ABSENT if value is None else f"{value / by:.0f}" + (f"/{of / by:.0f}" if of else "")
            cells.append(_text(text, style))
        grid.add_row(_text(str(gpu.index), "bold"), *cells, _text(*_reasons(now)))
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    return Group(
        _text(f"{clock}, {wording.models(topology.gpus)}, driver {topology.driver or ABSENT}", "bold"),
        grid,
        _text(f"running: {running}" if running else "no run is on", "" if running else "dim"),
    )


def _text(content: str, style: str = "") -> Text:
    return Text(wording.clean(content), style, no_wrap=True, overflow="crop")


TURN_SECONDS = 1.0


class Below:
    """A stream in place of a terminal: what is written stands above what `shown()` gives, which is drawn once a second
    and whenever the stream is flushed."""

    def __init__(self, stream: TextIO, shown: Callable[[], RenderableType]) -> None:
        self._stream = stream
        self._shown = shown
        self._half = ""  # a line that is not at its end
        self._above: deque[str] = deque()
        self._lock = threading.RLock()  # rich's own leaves a moment in which another picture costs a line
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="gpufleet live lines", daemon=True)
        # Asked of the descriptor: rich asks those of stdin, stdout and stderr, which pytest captures.
        self._console = Console(file=stream, highlight=False, width=self._size().columns, height=self._size().lines)
        self._live = Live(
            get_renderable=self._render, console=self._console, auto_refresh=False, transient=True,
            redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop",
        )  # fmt: skip

    def __enter__(self) -> "Below":
        self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._over.is_set():
            return
        self._end()
        with suppress(OSError):  # the terminal is gone
            self._live.stop()
            self._stream.write("".join(f"{text}\n" for text in self._above) + self._half.rpartition("\r")[2])
            self._stream.flush()

    def leave(self) -> None:
        """Draw nothing any more, and leave what is there: somebody has written below it."""
        self._end()
        self._console.show_cursor(True)

    def _end(self) -> None:
        self._over.set()
        self._thread.join()

    def _draw(self) -> None:
        while not self._over.wait(TURN_SECONDS):
            with suppress(OSError):  # the terminal is gone
                self.flush()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._half = f"{self._half}{text}".split("\n")
            if lines:
                self._print_above()
            for line in lines:
                self._console.print(Text.from_ansi(line), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._print_above()
            self._live.refresh()

    def tell(self, text: str) -> None:
        """A line above, drawn with the next picture; may be called in a handler of a signal."""
        self._above.append(text)

    def _print_above(self) -> None:
        while self._above:
            self._console.print(Text(self._above.popleft()), soft_wrap=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _render(self) -> RenderableType:
        self._console.size = self._size()
        return Group(*[Text.from_ansi(line) for line in (*self._above, self._half) if line], self._shown())

    def _size(self) -> Any:
        return os.get_terminal_size(self._stream.fileno())


def has_room(stream: TextIO, lines: int) -> bool:
    """Whether it is a terminal that can draw, and has so many lines beside those of others."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    return os.get_terminal_size(stream.fileno()).lines >= lines + OTHERS


QUIET_SECONDS = 3600.0  # without a word of a run: then it is on no more
TAIL = 16 << 20  # bytes: some hours of telemetry, which says nothing of checks
BAR = 12  # characters
LINE_SECONDS = 60.0  # between two lines on something long


def running_check(folder: Path) -> str:
    """The check that the newest run under `folder` is at, by the end of its evidence; "" if no run is on."""
    try:
        found = [(path.lstat().st_mtime, path) for path in folder.glob("*/evidence.jsonl")]
        modified, path = max(found, default=(0.0, None))
        if path is None or time.time() - modified > QUIET_SECONDS:
            return ""
        with safe_files.open_regular(path) as file:  # the folder may be another user's
            file.seek(max(0, path.lstat().st_size - TAIL))
            lines = file.read(TAIL).rpartition(b"\n")[0]  # the last one may still be being written
        at = max(lines.rfind(b'"event": "%s' % kind) for kind in (b"check_", b"verdict", b"progress"))
        event = events.typed(json.loads(lines[lines.rfind(b"\n", 0, max(0, at)) + 1 :].partition(b"\n")[0]))
    except (OSError, ValueError, RecursionError, Refused):  # somebody removed the folder, or it is no evidence
        return ""
    text = ""
    match event:
        case events.CheckStarted(check=text):
            pass
        case events.Progress(check=check, done=done, of=of, doing=doing):
            bar = "#" * round(BAR * min(1.0, done / of)) if of else ""
            text = f"{check.rpartition('::')[2]} {bar:.<{BAR}} {_time(done, of)}: {doing}"
    return "".join(filter(str.isprintable, text))


def _time(done: float, whole: float) -> str:
    """What has passed, and what is left."""
    done_of, left = f"{wording.duration(done)} of {wording.duration(whole)}", wording.duration(max(0.0, whole - done))
    return f"{done_of}, {left} left"


def teller(stream: TextIO, whole: float, shown_elsewhere: Callable[[], bool]) -> Callable[[float, Sample | None], None]:
    """tell(seconds done, latest sample) writes a line, once a minute; nothing while it is `shown_elsewhere`."""
    due = 0.0

    def tell(done: float, sample: Sample | None) -> None:
        nonlocal due
        if done < due or shown_elsewhere():
            return
        lead = "" if due else "\n"  # ends the line that pytest has begun
        due = done + LINE_SECONDS
        state = [_time(done, whole)]
        for name, unit in (("temperature_c", "°C"), ("power_watts", "W")):
            readings = [of.get(name) for of in sample.gpus] if sample else []
            if values := [value for value in readings if isinstance(value, int | float)]:
                state.append(f"{min(values):.0f}-{max(values):.0f} {unit}")
        stream.write(f"{lead}  {', '.join(state)}\n")
        stream.flush()

    return tell
