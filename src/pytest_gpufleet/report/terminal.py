"""The end of the run on the terminal: the verdict, why, and what to look at."""

from __future__ import annotations

import textwrap
from collections import Counter

from pytest_gpufleet.report import wording
from pytest_gpufleet.report.gap import gaps
from pytest_gpufleet.report.miss import Miss, failed_checks, misses
from pytest_gpufleet.report.stamp import reasons, stamp
from pytest_gpufleet.verdict.evidence import Check, Record

Line = tuple[str, dict[str, bool]]

WIDTH = 80
PLAIN: dict[str, bool] = {}
BAD = {"red": True}
HEADING = {"bold": True}
# Many a serial console knows ASCII only.
SPOKEN = {"≥ ": "at least ", "≤ ": "at most "}


def lines(record: Record) -> list[Line]:
    """The lines of the summary, each with pytest's markup; 80 columns wide where that cuts no identity."""
    verdict = stamp(record)
    result: list[Line] = [(verdict.word, verdict.markup), *_wrapped(verdict.meaning, "  ")]
    for reason in reasons(record):
        result += _wrapped(reason, "  - ")
    if missed := misses(record):
        result.append((f"Missed limits: {len(missed)}", HEADING))
        result += [line for miss in missed for line in _miss(miss)]
    if failed := failed_checks(record):
        result.append((f"Failed checks: {len(failed)}", HEADING))
        result += [line for check in failed for line in _check(check)]
    carried = Counter(check.run for check in record.checks.values() if check.run)
    for run, count in carried.items():
        result += _wrapped(f"Carried over from {run}: {count} {'check' if count == 1 else 'checks'}", "")
    counts: dict[str, int] = {}
    for gap in gaps(record):
        counts[gap.state] = counts.get(gap.state, 0) + len(gap.things)
    if counts:
        text = ", ".join(f"{count} {state}" for state, count in counts.items())
        result += _wrapped(f"Left open: {text} (the report lists each with its reason)", "", {"yellow": True})
    return result


def _miss(miss: Miss) -> list[Line]:
    limit = miss.limit
    for sign, spoken in SPOKEN.items():
        limit = limit.replace(sign, spoken)
    result = [line for gpu in miss.gpus for line in _wrapped(gpu.identity, "  ", BAD)]
    if not miss.gpus:
        result = _wrapped(miss.place, "  ", BAD)
    what = f"{miss.metric}: {miss.conditions}" if miss.conditions else miss.metric
    result += _wrapped(what, "    ")
    result += _wrapped(f"{miss.value}, limit: {limit}", "    ")
    if miss.source:
        result += _wrapped(f"source of the limit: {miss.kind}, {miss.source}", "    ")
    return result


def _check(check: Check) -> list[Line]:
    first_line = next((line for line in wording.clean(check.message).splitlines() if line.strip()), "")
    return [
        *_wrapped(check.title or check.id, "  ", BAD),
        *(_wrapped(check.id, "    ") if check.title else []),
        *_wrapped(textwrap.shorten(first_line, 400, placeholder=" ..."), "    "),
        *_wrapped(check.doc, "    "),
    ]


def _wrapped(text: str, indent: str, markup: dict[str, bool] = PLAIN) -> list[Line]:
    texts = textwrap.wrap(
        wording.clean(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(line, markup) for line in texts]
