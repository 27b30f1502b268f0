"""What a run leaves open: findings that nobody judged, checks that did not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict.evidence import Record

MOST_FIGURES = 8


@dataclass(frozen=True)
class Gap:
    """Things that were left open in the same way (`state`) for the same reason."""

    state: str
    reason: str
    things: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """The first few figures, since each stands in a table above; of the rest all, the cases of one together."""
        if self.state == "not judged":
            return self.things[:MOST_FIGURES]
        cases = Counter(self.things).items()
        return tuple(f"{thing} ({count} cases)" if count > 1 else thing for thing, count in cases)

    @property
    def more(self) -> int:
        return len(self.things[MOST_FIGURES:]) if self.state == "not judged" else 0


def gaps(record: Record) -> list[Gap]:
    """What was not judged, skipped, deselected, not applicable or never finished; each reason once."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for state, reason, item in _open(record):
        grouped.setdefault((state, reason), []).append(item)
    return [Gap(state, reason, tuple(items)) for (state, reason), items in grouped.items()]


def _open(record: Record) -> Iterator[tuple[str, str, str]]:
    for check_id in record.started:
        if check_id not in record.checks:
            yield "never finished", "it was running when the record ends", check_id
    for finding in record.findings:
        if finding.state == "not judged":
            what = ", ".join([wording.title(finding), *wording.conditions(finding)])
            yield "not judged", finding.reason or "no reason was given", what
    for state in ("skipped", "not applicable"):
        for check_id, check in record.checks.items():
            if check.outcome == state:
                reason = check.message.removeprefix(f"{state}: ")
                yield state, reason or "no reason was given", check.title or check_id
    for check_id in record.deselected:
        yield "deselected", "left out by the command line", check_id
