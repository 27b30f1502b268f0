"""What is wrong with a machine, as data from where it is found until somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpufleet.model.codes import CODES, Code
from pytest_gpufleet.model.place import Where


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `code` is a key of CODES, which says what kind of thing, and what to do.

    `subjects` are the places that are to blame, most suspicious first; none if nobody knows. `what` tells of this
    one in a few words, with figures and without naming the subjects. `story` is what somebody who digs deeper wants to
    see: log lines, what each rank did.
    """

    code: str
    subjects: tuple[Where, ...]
    what: str
    story: str = ""

    @property
    def kind(self) -> Code:
        return CODES[self.code]


class Faults(AssertionError):
    """Raised by a check that found faults. Its text is for the terminal; the plugin records `faults`."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("\n".join(fault.what for fault in faults))
        self.faults = faults
