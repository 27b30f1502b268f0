"""What links are measured with: memory and copies on a rank's kind of device."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NUMBER_BYTES = 8  # of a number


class StartingLine:
    """What this rank has: for every rank of its world, how often it came to meet that one."""

    def __init__(self, ranks: int) -> None:
        self._file = os.memfd_create("starting line")
        os.ftruncate(self._file, ranks * NUMBER_BYTES)
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


WORD = torch.int64
WORD_BYTES = WORD.itemsize


@dataclass(frozen=True)
class Memory:
    """Memory of this rank: its address in this process and its content as int64."""

    address: int
    words: Tensor


@dataclass(frozen=True)
class Offer:
    """What another rank needs to reach a memory: a handle, and the CUDA number of the GPU that it is on, if any."""

    handle: bytes
    device: int = -1


@dataclass(frozen=True)
class Copy:
    """A copy from one address to another. They may be of other ranks, where these were reached."""

    destination: int
    source: int
    nbytes: int


# Waits until all ranks that copy at the same time have come so far.
Meet = Callable[[], None]


class Copier(Protocol):
    """Memory and copies of one rank."""

    def device_memory(self, nbytes: int) -> Memory: ...

    def host_memory(self, nbytes: int) -> Memory:
        """Pinned, and near to the device."""

    def offer(self, memory: Memory) -> Offer:
        """Let other ranks reach device memory."""

    def reaches_directly(self, offer: Offer) -> bool:
        """Whether copies go straight from device to device, and not through host memory."""

    def reach(self, offer: Offer) -> int:
        """The address of another rank's memory in this process."""

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int, meet: Meet | None = None) -> float:
        """Seconds of the first of these copies, made `timed` times one behind the other.

        The others keep the way busy meanwhile: they begin with it, and are made twice as often. Where other ranks
        copy at the same time, all `meet` before they begin, and copy on for a while behind what is timed: so nobody's
        timed copies have the way to themselves.
        """

    def leave(self) -> None:
        """Reach no other rank's memory any more. Before anybody frees what others reach."""

    def free(self) -> None:
        """Free all memory."""


class HostCopier:
    """Stands in for a GPU in rehearsals: its memory is shared memory, which other ranks map, and copies are memmove."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._files: dict[int, int] = {}

    def device_memory(self, nbytes: int) -> Memory:
        file = os.memfd_create("device memory")
        os.ftruncate(file, nbytes)
        memory = self._mapped(f"/proc/self/fd/{file}", nbytes)
        self._files[memory.address] = file
        return memory

    def host_memory(self, nbytes: int) -> Memory:
        return self._kept_memory(torch.empty(nbytes // WORD_BYTES, dtype=WORD))

    def offer(self, memory: Memory) -> Offer:
        return Offer(f"/proc/{os.getpid()}/fd/{self._files[memory.address]}".encode())

    def reaches_directly(self, offer: Offer) -> bool:
        return False

    def reach(self, offer: Offer) -> int:
        path = offer.handle.decode()
        return self._mapped(path, os.stat(path).st_size).address

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int, meet: Meet | None = None) -> float:
        """One copy after the other: a rehearsal of what is copied, and not of how fast."""
        if meet:
            meet()
        for copy in copies[1:]:
            _move(copy, 1)
        _move(copies[0], warm_up)
        began = time.perf_counter()
        _move(copies[0], timed)
        return (time.perf_counter() - began) / timed

    def leave(self) -> None:
        pass

    def free(self) -> None:
        self._kept.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _mapped(self, path: str, nbytes: int) -> Memory:
        return self._kept_memory(torch.from_file(path, shared=True, size=nbytes // WORD_BYTES, dtype=WORD))

    def _kept_memory(self, words: Tensor) -> Memory:
        self._kept.append(words)
        return Memory(words.data_ptr(), words)


def _move(copy: Copy, times: int) -> None:
    for _ in range(times):
        ctypes.memmove(copy.destination, copy.source, copy.nbytes)
