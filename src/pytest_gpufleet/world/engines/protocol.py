"""What a way of running rank processes must be able to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pytest_gpufleet.world.call import RankSpec


class Answer(msgspec.Struct, frozen=True, tag_field="is", tag="answered"):
    """What a rank has sent: a pickled Outcome."""

    rank: int
    parcel: bytes


class Death(msgspec.Struct, frozen=True, tag_field="is", tag="died"):
    """A rank process is gone, or of no more use. `reason` goes on where "rank 3 died" ends: "by SIGSEGV (...)"."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Trace:
    """What can be seen of a rank from outside, be it alive, stuck or dead.

    It is in `phase` for `seconds`. `stack`: of all its Python threads, or as a fatal signal found it. `output`: the end
    of what it printed. `recorder`: torch's flight recorder, as JSON. `state`: what is unusual about its process,
    "(stopped by a signal)".
    """

    phase: str = ""
    seconds: float = 0.0
    stack: str = ""
    output: str = ""
    recorder: str = ""
    state: str = ""


class Engine(Protocol):
    """Starts, feeds, examines and kills rank processes, on whatever machines. Waiting for a whole call, deadlines and
    diagnosis live above it. Nothing here waits for a rank longer than it says."""

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start one process for each spec. Does not wait for them: each answers the call START when it is ready."""

    def rendezvous(self) -> str:
        """By which init_method of torch.distributed the ranks that were started last find each other."""

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        """Send a pickled Call to ranks, which answer it once each. A rank that is gone shows in `wait`, not here."""

    def wait(self, timeout: float) -> list[Answer | Death]:
        """What happened on any rank, as soon as anything did; [] after `timeout` seconds. A death is reported once."""

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        """What these ranks are doing, or did last. Asks those that live for their stacks, for a moment at most."""

    def kill(self, timeout: float) -> dict[int, str]:
        """End every rank with SIGKILL. Those that are still there after `timeout` seconds, with their state."""
