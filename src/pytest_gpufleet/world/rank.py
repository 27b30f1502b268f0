"""What a rank knows about itself."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpufleet.hardware.topology import Gpu

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank process is told when it starts. `device` is a torch device ("cuda:3", "cpu")."""

    index: int
    size: int
    device: str
    gpu: Gpu | None
    scratch: Path  # folder of this world: output, stacks, phases, the store of the process group
    environment: dict[str, str]
    cpu_threads: int | None = None

    @property
    def place(self) -> str:
        return self.gpu.place if self.gpu else f"cpu{self.index}"

    @property
    def name(self) -> str:
        where = self.gpu.identity if self.gpu else "CPU"
        return f"rank {self.index} of {self.size}, {where}"

    def file(self, kind: str) -> Path:
        """This rank's file of a kind: "output", "stack", "phase"."""
        return self.scratch / f"rank{self.index}.{kind}"


class PhaseFile:
    """What a rank is doing, in memory shared with the controller: readable even while the rank hangs or is dead."""

    _HEADER = struct.Struct("=dH")
    _SIZE = 512

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(self._SIZE)
            self._memory = mmap.mmap(file.fileno(), self._SIZE)

    def write(self, phase: str) -> None:
        text = phase.encode()[: self._SIZE - self._HEADER.size]
        self._memory[: self._HEADER.size + len(text)] = self._HEADER.pack(time.monotonic(), len(text)) + text

    @classmethod
    def read(cls, path: Path) -> tuple[str, float]:
        """The phase and for how many seconds it has lasted; ("", 0) before the first one."""
        try:
            memory = path.read_bytes()
            since, length = cls._HEADER.unpack_from(memory)
        except (OSError, struct.error):
            return "", 0.0
        text = memory[cls._HEADER.size :][:length].decode(errors="replace")
        return text, time.monotonic() - since if length else 0.0


@dataclass
class Rank:
    """One process of a world, seen from inside.

    `index` and `size` count within the world or subset that runs the function. `device` is this rank's torch device
    and already the current one. `gpu` is None in a rehearsal.
    """

    index: int
    size: int
    device: torch.device
    gpu: Gpu | None
    _group: ProcessGroup | None = field(repr=False)
    _phases: PhaseFile = field(repr=False)
    _phase: str = field(default="", repr=False)

    @property
    def group(self) -> ProcessGroup:
        """The process group of this world or subset: NCCL on GPUs, Gloo on CPUs."""
        if self._group is None:
            raise RuntimeError("this rank has no process group: use the fixture nccl_group instead of world")
        return self._group

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank is doing, for the report of a hang or crash. Phases nest; costs about a microsecond.

        An exception leaves the phase standing, so that the report shows where it was raised.
        """
        outer, self._phase = self._phase, name
        self._phases.write(name)
        yield
        self._phase = outer
        self._phases.write(outer)
