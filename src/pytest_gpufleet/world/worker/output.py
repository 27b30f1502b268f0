"""What a rank prints: all that is written to its descriptors 1 and 2, in a file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

TAIL_BYTES = 8 * 1024


class Output:
    """The file is read and emptied by a descriptor of its own, since a test may have 1 and 2 lead to a file of its own,
    or close them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.restore()

    def restore(self) -> None:
        """Whatever was made of the descriptors and of Python's streams, they lead to the file."""
        _flush()
        for number in (1, 2):
            os.dup2(self._file, number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False) for number in (1, 2)
        )

    def take(self) -> str:
        """The end of what was printed since the last time; the file is emptied."""
        _flush()
        size = os.fstat(self._file).st_size
        if size == 0:
            return ""
        tail = os.pread(self._file, TAIL_BYTES, max(0, size - TAIL_BYTES))
        os.ftruncate(self._file, 0)
        return tail.decode(errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it was closed, or is anything that a test has put there
            stream.flush()
