"""Copies between memories, timed and verified as nvbandwidth does: 4 copies to warm up and 16 timed, three samples."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.world.rank import Rank

WARM_UP = 4
COPIES = 16
SAMPLES = 3
# Fewer copies where they would take longer than this: a broken link can be a hundred times as slow.
SAMPLE_SECONDS = 0.5

WORD = torch.int64
WORD_BYTES = WORD.itemsize
# What memory holds that nothing was copied to.
BLANK = -1


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


@dataclass(frozen=True)
class Copied:
    """What copies over links gave: the readings of each rank, and what is wrong with the data, by place."""

    by_rank: list[list[Reading]]
    wrong: dict[str, str]


class Copier(Protocol):
    """What links are measured with: memory and copies on this rank's kind of device."""

    def device_memory(self, nbytes: int) -> Memory: ...

    def host_memory(self, nbytes: int) -> Memory:
        """Pinned, and near to the device."""

    def offer(self, memory: Memory) -> Offer:
        """Let other ranks reach device memory."""

    def reaches_directly(self, offer: Offer) -> bool:
        """Whether copies go straight from device to device, and not through host memory."""

    def reach(self, offer: Offer) -> int:
        """The address of another rank's memory in this process."""

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int) -> list[float]:
        """Seconds of one copy, for each of several that run at the same time, `timed` times one behind the other."""

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

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int) -> list[float]:
        taken = []
        for copy in copies:
            for _ in range(warm_up):
                ctypes.memmove(copy.destination, copy.source, copy.nbytes)
            began = time.perf_counter()
            for _ in range(timed):
                ctypes.memmove(copy.destination, copy.source, copy.nbytes)
            taken.append((time.perf_counter() - began) / timed)
        return taken

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


def copier(rank: Rank) -> Copier:
    """The one for this rank's device."""
    if rank.device.type == "cpu":
        return HostCopier()
    from pytest_gpufleet.probes.links.cuda_copying import CudaCopier

    return CudaCopier(rank)


def bandwidth(copier: Copier, copies: Sequence[Copy]) -> tuple[float, ...]:
    """Samples in GB/s of copies that run at the same time: what they move together."""
    copier.seconds(copies, 0, 1)  # the first use of a way makes it
    timed = max(1, min(COPIES, int(SAMPLE_SECONDS / max(copier.seconds(copies, 0, 1)))))
    warm_up = min(WARM_UP, timed)

    def sample() -> float:
        taken = copier.seconds(copies, warm_up, timed)
        return sum(copy.nbytes / seconds / 1e9 for copy, seconds in zip(copies, taken, strict=True))

    return tuple(sample() for _ in range(SAMPLES))


def fill(words: Tensor, seed: int) -> Tensor:
    """Put data into memory of which no two words are alike, and none is like that at its place with another seed."""
    # Both hold for a step that is odd and whose change with the seed is even: tensors of int64 wrap around.
    torch.arange(len(words), out=words)
    return words.mul_(-7046029254386353131 + 2 * seed).add_(seed)


def difference(words: Tensor, expected: Tensor) -> str:
    """ "" if all words arrived, else how many did not, and the first of those."""
    wrong = words != expected
    if not (count := int(wrong.sum())):
        return ""
    first = int(wrong.int().argmax())
    found, right = (f"{int(each[first]) & 0xFFFF_FFFF_FFFF_FFFF:#018x}" for each in (words, expected))
    return f"{count:,} of {len(words):,} words of 8 bytes are wrong: word {first:,} is {found}, expected {right}"
