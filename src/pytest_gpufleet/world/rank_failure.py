"""How ranks fail, and how that is told."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Where

FailureKind = Literal["exception", "crash", "hang"]
State = Literal["returned", "raised", "died", "running"]
MOST_STORIES = 32  # in a message: of the ranks of four nodes. Who is to blame comes first
# What it is called if the first rank to fail did this; what a rank has returned may be what cannot be read here.
CODES: dict[State, str] = {
    "returned": "rank_raised",
    "raised": "rank_raised",
    "died": "rank_died",
    "running": "rank_hung",
}


@dataclass(frozen=True)
class RankReport:
    """One rank's own story of a call that failed.

    `state`: it returned, raised, died, or was still running when the world was ended. `seconds`: how long it had run
    when it raised.
    """

    rank: int
    name: str
    state: State
    summary: str  # one line: the exception, the signal, or nothing
    seconds: float = 0.0
    phase: str = ""
    phase_seconds: float = 0.0
    traceback: str = ""
    stack: str = ""
    output: str = ""

    @property
    def headline(self) -> str:
        phase = f' in phase "{self.phase}"' if self.phase and self.state != "returned" else ""
        since = f" for {self.phase_seconds:.1f} s" if phase and self.state == "running" else ""
        return f"{self.name}: {self.state} {self.summary}".rstrip() + phase + since

    @property
    def details(self) -> str:
        parts = (("", self.traceback), ("Python stack:\n", self.stack), ("last output:\n", self.output))
        return "\n".join(title + text.rstrip() for title, text in parts if text.strip())


class RankFailure(Exception):
    """Something went wrong on at least one rank.

    `kind` is "exception" (a rank raised), "crash" (a rank process died) or "hang" (the deadline passed). `reports`
    holds every rank's story, the rank that failed first in front; the message tells the first of them. All ranks of the
    world have been killed; the next use of the world starts a fresh one.
    """

    def __init__(self, kind: FailureKind, what: str, reports: tuple[RankReport, ...], notes: tuple[str, ...] = ()):
        self.kind = kind
        self.what = what
        self.reports = reports
        self.notes = notes
        Exception.__init__(self, "\n".join((self.headline, *notes, "", *_stories(reports))))

    @property
    def headline(self) -> str:
        first = self.reports[0]
        return f"{first.headline}\n({self.what})" if self.what else first.headline

    def fault(self, places: Sequence[Where]) -> Fault:
        """What is wrong, where rank i is at places[i]. The first rank to fail is to blame. Others that raised by
        themselves are too; that others died, hang or have returned is what came of it."""
        first = self.reports[0]
        to_blame = [report.rank for report in self.reports if report.state == first.state == "raised"]
        subjects = tuple(places[rank] for rank in to_blame or [first.rank])
        return Fault(CODES[first.state], subjects, f"{first.state} {first.summary}".rstrip(), str(self))

    def __str__(self) -> str:
        # Of two bases the rank's exception type might have another idea, as KeyError has.
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.kind, self.what, self.reports, self.notes)


def _stories(reports: tuple[RankReport, ...]) -> list[str]:
    """The first ranks' stories; neighbours that tell the same one share it. Of the others only how many there are."""
    stories = []
    for (_, details), group in groupby(reports[:MOST_STORIES], key=lambda report: (report.state, report.details)):
        heads = "\n".join(report.headline for report in group)
        stories.append(f"{heads}\n{_indent(details)}" if details else heads)
    if others := Counter(report.state for report in reports[MOST_STORIES:]):
        states = ", ".join(f"{count} {state}" for state, count in others.items())
        stories.append(f"and {others.total()} more ranks: {states}")
    return stories


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def failure_type(original: str) -> type[RankFailure]:
    """RankFailure, and where the rank's exception type can be found here, also that type.

    So `pytest.mark.xfail(raises=ValueError)` and `pytest.raises(ValueError)` work for what a rank raised.
    """
    module, _, name = original.rpartition(".")
    loaded = sys.modules.get(module or "builtins")
    base = vars(loaded).get(name) if loaded else None
    if not (isinstance(base, type) and issubclass(base, Exception)):
        return RankFailure
    try:
        # Made once by hand to see that this base accepts RankFailure's arguments; UnicodeDecodeError does not.
        combined = type(f"RankFailure[{name}]", (RankFailure, base), {})
        combined("exception", "", (RankReport(0, "", "raised", ""),))
    except TypeError:
        return RankFailure
    return combined
