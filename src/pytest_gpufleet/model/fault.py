"""What is wrong with a machine, as data from where it is found until somebody reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.model.codes import CODES
from pytest_gpufleet.model.fault_code import Code
from pytest_gpufleet.model.place import Where


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `code` is a key of CODES, which says what kind of thing, and what to do.

    `subjects` are the places that are to blame, most suspicious first; none if nobody knows. `what` tells of this
    one in a few words, with figures and without naming the subjects. `story` is what somebody who digs deeper wants to
    see: log lines, what each rank did. `check` is the node id of the test that found it, or, if it was `watched`, of
    the one that ran when it happened.
    """

    code: str
    subjects: tuple[Where, ...]
    what: str
    story: str = ""
    check: str = ""
    watched: bool = False

    @property
    def kind(self) -> Code:
        return CODES[self.code]

    @property
    def nodes(self) -> frozenset[int]:
        """The numbers of the nodes that its subjects are on."""
        parts = (part for subject in self.subjects for part in subject.parts)
        return frozenset(part.node for part in parts if part.is_on_node)

    def told(self, named: Callable[[Where], str] = str) -> str:
        """ "GPU 3: 17 PCIe replays", if `named` calls a place so."""
        subjects = ", ".join(map(named, self.subjects))
        return f"{subjects}: {self.what}" if subjects else self.what

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "code": self.kind.number,
            "name": self.code,
            "subjects": [str(subject) for subject in self.subjects],
            "what": self.what,
            "story": self.story,
            "watched": self.watched,
        }


class Faults(AssertionError):
    """Raised by a check that found faults. Its text is for who has nothing better; the plugin records `faults`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(fault.told() for fault in faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[Any, ...]:
        return Faults, (self.faults,)


def expect_none(faults: Iterable[Fault]) -> None:
    """Fail the check if there is any fault. Raises Faults."""
    __tracebackhide__ = True
    if found := tuple(faults):
        raise Faults(found)
