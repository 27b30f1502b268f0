"""What a way of running rank processes must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_gpufleet.world.rank import RankSpec


@dataclass(frozen=True)
class Message:
    """A rank sent something."""

    rank: int
    content: Any


@dataclass(frozen=True)
class Death:
    """A rank process is gone, or of no more use. `how` goes on where "rank 3 died" ends: "by SIGSEGV (...)"."""

    rank: int
    how: str


class Engine(Protocol):
    """Starts, feeds and kills rank processes. Waiting for a whole call, deadlines and diagnosis live above it."""

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start one process for each spec. Does not wait for them: each sends a first message when it is ready."""

    def submit(self, rank: int, message: Any) -> None:
        """Send a message to a rank, without waiting for it. A rank that is gone shows in `wait`, not here."""

    def wait(self, timeout: float) -> list[Message | Death]:
        """What happened on any rank, as soon as anything did; [] after `timeout` seconds. A death is told once."""

    def interrupt(self, rank: int) -> None:
        """Have a rank write its Python stacks to its "stack" file, and NCCL's flight recorder to its "flight" file."""

    def state(self, rank: int) -> str:
        """What is unusual about a rank's process, for a report: "(stopped by a signal)"; "" if nothing is."""

    def kill(self, timeout: float) -> list[int]:
        """End every rank with SIGKILL; the ranks that are still there after `timeout` seconds."""
