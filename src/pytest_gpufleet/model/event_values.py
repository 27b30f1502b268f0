"""What the events of the evidence hold that the model has no other word for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.codec import Amount, Finite, Moment
from pytest_gpufleet.model.codes import CODES
from pytest_gpufleet.model.facts import Unavailable, told
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Where

Count = Annotated[int, Meta(ge=0, le=10**15)]
T = TypeVar("T")
OfNodes = Annotated[list[T], Meta(min_length=1)]
VerdictWord = Literal["ACCEPTED", "REJECTED", "INCOMPLETE", "REHEARSAL"]
Secured = Literal["token", "loopback", "insecure"]
Sum = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]  # SHA-256; "" of what is not there


class Plugin(msgspec.Struct, frozen=True):
    name: str
    version: str


class PythonFile(msgspec.Struct, frozen=True):
    file: str
    sha256: str


class Earlier(msgspec.Struct, frozen=True):
    """A run that this one goes on with, and the checks that failed there."""

    run: str
    utc: Moment
    failed: tuple[str, ...]


class NodeFound(msgspec.Struct, frozen=True):
    """A machine of the run: its number in places, its name, the serial number of its board (None if the system does not
    tell), and the UUIDs of its GPUs."""

    index: Count
    host: str
    serial: str | None = None
    gpus: tuple[str, ...] = ()


class FactsFound(msgspec.Struct, frozen=True):
    """What must be right of a GPU, whatever else is told of it."""

    index: Count
    name: str | Unavailable | None = None
    uuid: str | Unavailable | None = None
    compute_capability: tuple[Count, Count] | Unavailable | None = None


class HostFound(msgspec.Struct, frozen=True):
    """The facts of a host, Unavailable where it is known why it does not tell one, and when all were read."""

    taken: str = ""
    host: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "host", told(self.host))

    def get(self, fact: str) -> Any:
        """A fact, or None where it cannot be had."""
        value = self.host.get(fact)
        return None if isinstance(value, Unavailable) else value


class Sample(TypedDict):
    """`gpus`: what telemetry reads of each, by name; None where one did not tell."""

    time: Amount
    gpus: list[dict[str, Amount | None]]


class FaultTold(msgspec.Struct, frozen=True):
    """A fault as Fault.to_json writes it. `code`: the number, `name`: the key of CODES."""

    check: str
    code: Count
    name: str
    subjects: tuple[Where, ...]
    what: str
    story: str
    watched: bool

    def of_this_version(self) -> Fault:
        """ValueError if it is none that this version knows."""
        known = CODES.get(self.name)
        if known is None or known.number != self.code:
            raise ValueError(f"there is no fault {self.name} with code {self.code}")
        return Fault(self.name, self.subjects, self.what, self.story, self.check, self.watched)


class LossCurve(msgspec.Struct, frozen=True):
    """The losses of a training, for whoever follows them elsewhere: nothing is judged by them. `training`: what was
    trained and how, as the conditions of a figure are told. `steps`: how many were done when the loss at the same
    position was that. `place`: the GPU, or WORLD of one model on all ranks; None of a rank that does not say, whose own
    it then is."""

    training: Mapping[str, str | int | float | bool]
    steps: tuple[Count, ...]
    losses: tuple[Finite, ...]
    place: Where | None = None

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.losses):
            raise ValueError(f"{len(self.losses)} losses of {len(self.steps)} steps")
