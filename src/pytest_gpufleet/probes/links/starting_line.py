"""Where ranks of one machine wait for each other without a process group: in memory that all of them map."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection, Sequence

WORD_BYTES = 8  # of a number


class StartingLine:
    """What this rank has: for every rank of its world, how often it came to meet that one."""

    def __init__(self, ranks: int) -> None:
        self._file = os.memfd_create("starting line")
        os.ftruncate(self._file, ranks * WORD_BYTES)
        self._lines: list[memoryview] = []
        self._me = -1

    @property
    def address(self) -> str:
        """By which other ranks of this machine find it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def draw(self, me: int, addresses: Sequence[str]) -> None:
        """Learn the number of this rank, and where the lines of all ranks are."""
        self._me, self._lines = me, list(map(_mapped, addresses))

    def meet(self, others: Collection[int]) -> None:
        """Go on when each of these ranks has come here to meet this one: to within about 0.1 ms at the same time."""
        mine = self._lines[self._me]
        for other in others:
            mine[other] += 1
        for other in others:
            while self._lines[other][self._me] < mine[other]:
                time.sleep(0)  # lets the other threads of this process run, which hold and release streams

    def remove(self) -> None:
        self._lines.clear()
        os.close(self._file)


def _mapped(address: str) -> memoryview:
    with open(address, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
