"""How much a check does: declared once, for GPUs and for a rehearsal on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class HasGpus(Protocol):
    @property
    def gpus(self) -> Sequence[object]: ...


@dataclass(frozen=True)
class Size(Generic[T]):
    """Bytes, seconds, a number of files: `Size(8 * GiB, rehearsal=8 * MiB)`.

    As an argument of a probe it arrives on the ranks as the one that holds there; `on` gives it to the check itself.
    """

    gpus: T
    rehearsal: T

    def on(self, world: HasGpus) -> T:
        return self.gpus if world.gpus else self.rehearsal
