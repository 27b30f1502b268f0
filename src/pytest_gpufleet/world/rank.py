"""What a rank knows about itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.world.worker.progress_board import Progress

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
    environment: dict[str, str] = field(repr=False)  # all of it, secrets too
    sockets: Path = Path()  # the same where its path is short enough for sockets, else another folder
    cpu_threads: int | None = None

    @property
    def place(self) -> Place:
        return self.gpu.place if self.gpu else Place(0, "cpu", self.index)

    @property
    def name(self) -> str:
        where = self.gpu.identity if self.gpu else "CPU"
        return f"rank {self.index} of {self.size}, {where}"

    def file(self, kind: str) -> Path:
        """This rank's file of a kind: "output", "stack", "progress", "flight"."""
        return self.scratch / f"rank{self.index}.{kind}"


@dataclass
class Rank:
    """One process of a world, seen from inside.

    `index` and `size` count within the world or subset that runs the function. `device` is this rank's torch device
    and already the current one. `gpu` is None in a rehearsal. `kept` is what functions leave here for the next call of
    the same test, by name.
    """

    index: int
    size: int
    device: torch.device
    gpu: Gpu | None
    kept: dict[str, Any] = field(repr=False)
    _groups: dict[tuple[int, ...], ProcessGroup] = field(repr=False)
    _members: tuple[int, ...] | None = field(repr=False)  # of the group, if it has one
    _progress: Progress = field(repr=False)
    _phase: str = field(default="", repr=False)

    @property
    def group(self) -> ProcessGroup:
        """The process group of this world or subset: NCCL on GPUs, Gloo on CPUs."""
        if self._members is None:
            raise RuntimeError("this rank has no process group: use the fixture nccl_group instead of world")
        return self._groups[self._members]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank is doing, for the report of a hang or crash. Phases nest; costs about a microsecond.

        An exception leaves the phase standing, so that the report shows where it was raised.
        """
        outer, self._phase = self._phase, name
        self._progress.phase(name)
        yield
        self._phase = outer
        self._progress.phase(outer)
