"""What stands on top of a report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.node_verdicts import unaccepted
from pytest_gpufleet.verdict.verdict import failure, remarks

MOST_REASONS = 10


@dataclass(frozen=True)
class Stamp:
    """A verdict as the reader meets it. `markup` is pytest's for the terminal."""

    word: str
    symbol: str
    meaning: str
    markup: dict[str, bool]

    @property
    def slug(self) -> str:
        return self.word.lower()


STAMPS = {
    stamp.word: stamp
    for stamp in (
        Stamp(
            "ACCEPTED",
            "✓",
            "Every required check ran, was judged and met its limit.",
            {"green": True, "bold": True},
        ),
        Stamp("REJECTED", "✗", "At least one check failed.", {"red": True, "bold": True}),
        Stamp(
            "INCOMPLETE",
            "○",
            "Nothing failed, but not everything that is required was judged: this is no acceptance.",
            {"yellow": True, "bold": True},
        ),
        Stamp(
            "REHEARSAL",
            "◇",
            "The suite ran without GPUs, on CPU ranks. Nothing measured was judged, "
            "and a rehearsal can never say ACCEPTED.",
            {"cyan": True, "bold": True},
        ),
    )
}


def stamp(record: Record) -> Stamp:
    """The stamp of a run. A rehearsal stays one whatever was recorded, and no verdict is INCOMPLETE."""
    if record.run.rehearsal:
        return STAMPS["REHEARSAL"]
    return STAMPS.get(record.verdict or "", STAMPS["INCOMPLETE"])


def standing(record: Record, say: Say = english) -> str:
    """What a verdict of ACCEPTED stands on; "" of any other: who is rejected, is so by what failed."""
    return basis.told(record, say) if stamp(record).word == "ACCEPTED" else ""


def headline(record: Record) -> str:
    """The verdict in a line, with what it stands on."""
    return "; ".join(filter(None, (stamp(record).word, standing(record))))


def reasons(record: Record, where_more: str = "which the report lists", say: Say = english) -> list[str]:
    """Why the verdict is what it is, or that there is none, beyond the headline and the paragraph below it; the first
    few, and `where_more` says where all of them are.

    Of a check with parameters that failed in several cases there is one reason.
    """
    if record.verdict is None:
        return [*record.reasons, say("No verdict was recorded: the run did not reach its end.")]
    without_case = {
        failure(check, record): failure(check, record, say, with_case=False)
        for check in record.checks.values()
        if check.title
    }
    without_case |= {each.told: say(each.told) for each in unaccepted(record)}
    said = {basis.told(record), record.judged_again}
    if record.verdict in ("ACCEPTED", "INCOMPLETE"):
        said.update(remarks(record))
    cases = Counter(without_case.get(reason, reason) for reason in record.reasons if reason not in said)
    told = [
        say("{reason}, {count} cases", reason=reason, count=count) if count > 1 else say(reason)
        for reason, count in cases.items()
    ]
    more = len(told) - MOST_REASONS
    left = [say("... and {count} more, {where}", count=more, where=say(where_more))] if more > 0 else []
    return told[:MOST_REASONS] + left
