"""The lowest lines of a terminal, kept for oneself while others write above them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

LINES_LEFT = 8  # for the others, at least


class LowestLines:
    """The lowest `count` lines of a terminal, from `reserve` to `release`.

    The terminal itself is told to scroll only the lines above (DECSTBM, as apt does for its progress bar). So whatever
    is written there, half lines and the output of other processes too, stays as it is, and no stream is replaced. If
    `stream` is no terminal, or one too small, nothing is ever written.
    """

    def __init__(self, stream: TextIO, count: int) -> None:
        self._stream = stream
        self._count = count
        self._terminal = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._size = (0, 0)  # columns and lines of the terminal in which lines are reserved

    @property
    def reserved(self) -> bool:
        return self._size != (0, 0)

    def reserve(self) -> int:
        """Take the lines away from whoever writes, again after the window changed its size. Their width in columns; 0
        where there is no terminal, or not enough of it."""
        size = self._terminal_size()
        if size != self._size:
            self.release()
            if size != (0, 0):
                self._size = size
                # Make room below the cursor, keep it there, and let only what is above the room scroll.
                above = size[1] - self._count
                self._write("\x1bD" * self._count + f"\x1b[{self._count}A\x1b7\x1b[1;{above}r\x1b8")
        return size[0]

    def draw(self, lines: Sequence[str]) -> None:
        first = self._size[1] - self._count + 1
        drawn = "".join(f"\x1b[{first + n};1H\x1b[2K{line}" for n, line in enumerate(lines[: self._count]))
        self._write(f"\x1b7{drawn}\x1b8")

    def release(self) -> None:
        if self.reserved:
            self._write(f"\x1b7\x1b[r\x1b[{self._size[1] - self._count + 1};1H\x1b[J\x1b8")
            self._size = (0, 0)

    def _terminal_size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._stream.fileno()) if self._terminal else None
        except (OSError, ValueError):
            size = None
        return (size.columns, size.lines) if size and size.lines >= self._count + LINES_LEFT else (0, 0)

    def _write(self, text: str) -> None:
        """In one call, past every buffer, so that nothing can come in between."""
        data = text.encode(self._stream.encoding or "ascii", errors="replace")
        while data:
            data = data[os.write(self._stream.fileno(), data) :]
