"""What monitoring plugins answer, by the Monitoring Plugins Development Guidelines (monitoring-plugins.org): one line
with figures behind "|", and an exit status of 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NoReturn

from pytest_gpufleet.commands.command import tell
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import headline
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.accusations import told

OPTION = "--nagios"
OK, WARNING, CRITICAL, UNKNOWN = range(4)
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
WORST_FIRST = (CRITICAL, UNKNOWN, WARNING, OK)
# An INCOMPLETE run was read well and found no fault, which is no UNKNOWN: somebody has to look at what it left open. A
# rehearsal has looked at no GPU.
STATUS = {"ACCEPTED": OK, "INCOMPLETE": WARNING, "REJECTED": CRITICAL, "REHEARSAL": UNKNOWN}
MOST_CHARACTERS = 300  # of the reason of one run: pagers and mail subjects cut a line off
CLOCKS_APART_SECONDS = 3600.0  # of two machines that nobody has set together; a wrong date is a day or more
SPANS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    host: str = ""
    folder: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)  # by name


class Parser(argparse.ArgumentParser):
    """For arguments that ask for such an answer: bad usage is answered too. argparse's own exit status for it would be
    taken for CRITICAL."""

    def error(self, message: str) -> NoReturn:
        line, status = unknown(message)
        tell(line)
        sys.exit(status)


def unknown(why: str) -> tuple[str, int]:
    """The line and the exit status where nothing could be judged."""
    return _answered([Answer(UNKNOWN, _clean(why))])


def answer(
    folders: Sequence[RunFolder], judged: Callable[[RunFolder], Record], oldest: float | None, now: float
) -> tuple[str, int]:
    """The line about these runs and the exit status: the worst of all. `oldest`: seconds after which an ACCEPTED is
    no longer OK; `now`: seconds since the epoch."""
    answers = sorted(
        (_of(folder, judged, oldest, now) for folder in folders),
        key=lambda each: WORST_FIRST.index(each.status),
    )
    return _answered(answers)


def _answered(answers: Sequence[Answer]) -> tuple[str, int]:
    """The worst one first. A figure has the name of its host where there are several, which stays the same from call to
    call, and that of the folder too where the host has several runs."""
    status = answers[0].status
    runs = Counter(each.host for each in answers)
    figures = []
    for each in answers:
        of = f"{each.host} {each.folder} " if runs[each.host] > 1 else f"{each.host} " if len(answers) > 1 else ""
        figures += [f"'{_label(of + name)}'={value}" for name, value in each.figures.items()]
    text = "; ".join(each.text for each in answers)
    return f"GPUFLEET {WORDS[status]} - {text}{' | ' * bool(figures)}{' '.join(figures)}", status


def _of(folder: RunFolder, judged: Callable[[RunFolder], Record], oldest: float | None, now: float) -> Answer:
    try:
        with folder.of_anybody():
            return _of_run(folder.name, judged(folder), oldest, now)
    except Refused as why:
        return Answer(UNKNOWN, _clean(str(why)))


def _of_run(folder: str, record: Record, oldest: float | None, now: float) -> Answer:
    status = STATUS.get(record.verdict or "", UNKNOWN)
    since = now - datetime.fromisoformat(record.run.utc).timestamp()
    when, doubtful = _when(since, oldest)
    reasons = [reason for reason in record.reasons if reason != record.judged_again]
    why = "" if status == OK or not reasons else f": {reasons[0]}"
    text = f"{record.run.host} {headline(record)}, {when}{why}"
    if doubtful and status == OK:
        status = WARNING
    failed = sum(check.outcome == "failed" for check in record.checks.values())
    limit = f"{oldest:.0f}" if oldest is not None else ""
    return Answer(
        status,
        _clean(text),
        record.run.host,
        folder,
        {
            "age": f"{max(0.0, since):.0f}s;{limit};;0",
            "failed checks": f"{failed};;;0;{len(record.checks)}",
            "faults": f"{len(told(record))};;;0",
        },
    )


def _when(since: float, oldest: float | None) -> tuple[str, bool]:
    """When a run began, so many seconds ago, in words; and whether that is in doubt, or too long ago. One from the
    future would never be too old."""
    if since < -CLOCKS_APART_SECONDS:
        return f"{_span(-since)} in the future: a clock is wrong", True
    told = f"{_span(max(0.0, since))} ago"
    return (f"{told}, which is longer ago than {_span(oldest)}", True) if oldest and since > oldest else (told, False)


def _span(seconds: float) -> str:
    """ "3 d", "5 h", "12 min" """
    return next((f"{seconds / length:.0f} {unit}" for length, unit in SPANS if seconds >= length), f"{seconds:.0f} s")


def _clean(text: str) -> str:
    """One line without what begins figures, as a reader of the answer takes it."""
    line = " ".join(wording.clean(text).split()).replace("|", "/")
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ..."


def _label(text: str) -> str:
    return "".join(letter for letter in wording.clean(text) if letter not in "'=|")
