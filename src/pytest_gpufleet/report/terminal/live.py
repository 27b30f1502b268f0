"""What goes on, at the bottom of a terminal, while pytest writes above it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

LINES_LEFT = 8  # for the others, at least
TURN_SECONDS = 1.0


class Below:
    """A stream to write to instead of `stream`, a terminal, from `with` on: what is written stands above what `shown()`
    gives, which is drawn anew once a second and whenever the stream is flushed."""

    def __init__(self, stream: TextIO, shown: Callable[[], RenderableType]) -> None:
        self._stream = stream
        self._shown = shown
        self._half = ""  # a line that is not at its end
        self._told: deque[str] = deque()
        self._lock = threading.RLock()  # rich's own leaves a moment in which another picture costs a line
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="gpufleet live lines", daemon=True)
        # Asked of the descriptor: rich asks those of stdin, stdout and stderr, which pytest captures.
        self._console = Console(file=stream, highlight=False, width=self._size().columns, height=self._size().lines)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Below:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._over.is_set():
            return
        self._end()
        with suppress(OSError):  # the terminal is gone
            self._live.stop()
            self._stream.write("".join(f"{text}\n" for text in self._told) + self._half.rpartition("\r")[2])
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
                self._print_told()
            for line in lines:
                self._console.print(Text.from_ansi(line), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._print_told()
            self._live.refresh()

    def tell(self, text: str) -> None:
        """A line above, drawn with the next picture; may be called in a handler of a signal."""
        self._told.append(text)

    def _print_told(self) -> None:
        while self._told:
            self._console.print(Text(self._told.popleft()), soft_wrap=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _render(self) -> RenderableType:
        self._console.size = self._size()
        half = [Text.from_ansi(line) for line in (*self._told, self._half) if line]
        return Group(*half, self._shown())

    def _size(self) -> Any:
        return os.get_terminal_size(self._stream.fileno())


def has_room(stream: TextIO, lines: int) -> bool:
    """Whether it is a terminal that can draw, and has so many lines beside those of others."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    return os.get_terminal_size(stream.fileno()).lines >= lines + LINES_LEFT
