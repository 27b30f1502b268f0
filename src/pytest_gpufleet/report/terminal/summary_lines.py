"""The end of the run on the terminal: the verdict, why, and what to look at."""

from __future__ import annotations

import textwrap
from collections import Counter

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.accused import accused
from pytest_gpufleet.report.banner import headline, reasons, stamp
from pytest_gpufleet.report.failures import Failure, failures
from pytest_gpufleet.report.misses import Miss
from pytest_gpufleet.report.next_steps import next_steps
from pytest_gpufleet.report.open_points import counted, gaps, inapplicable
from pytest_gpufleet.report.reason_texts import why
from pytest_gpufleet.report.terminal.node_lines import node_lines
from pytest_gpufleet.report.terminal.screen_lines import BAD, HEADING, Line, and_more, wrapped

MOST_MISSES = 3  # of one check
MOST_LINES = 8  # of what it said: a line a GPU
MOST_REASONS = 2  # for which checks do not apply
SHORT = 70  # characters of one
# Many a serial console knows ASCII only.
SPOKEN = {"≥ ": "at least ", "≤ ": "at most "}


def summary_lines(record: Record, folder: str = "FOLDER") -> list[Line]:
    """The lines of the summary, each with pytest's markup; 80 columns wide where that cuts no identity. `folder`: the
    one that the run is in."""
    if record.of_cluster:
        return node_lines(record)
    verdict = stamp(record)
    result: list[Line] = [*wrapped(headline(record), "", verdict.markup), *wrapped(why(record), "  ")]
    for reason in reasons(record):
        result += wrapped(reason, "  - ")
    if failed := failures(record, accused(record)):
        result.append((f"Failed checks: {sum(len(failure.names) for failure in failed)}", HEADING))
        result += [line for failure in failed for line in _failure(failure)]
    for step in next_steps(record, folder):
        result += [*wrapped(f"Next, {step.why}:", ""), (f"  {step.command}", {})]
    carried = Counter(check.run for check in record.checks.values() if check.run)
    for run, count in carried.items():
        result += wrapped(f"Carried over from {run}: {wording.count(count, 'check')}", "")
    if left_open := counted(gaps(record)):
        text = f"Left open: {', '.join(left_open)} (the report lists each with its reason)"
        result += wrapped(text, "", {"yellow": True})
    return result + _inapplicable(record)


def _inapplicable(record: Record) -> list[Line]:
    """How many checks, and for which reasons most of them: somebody may have meant to give what they need."""
    reasons: Counter[str] = Counter()
    for gap in inapplicable(record):
        reasons[gap.reason] += len(gap.things)
    if not reasons:
        return []
    commonest = [
        f"{textwrap.shorten(reason, SHORT, placeholder=' ...')} ({count})"
        for reason, count in reasons.most_common(MOST_REASONS)
    ]
    told = f"Not applicable: {wording.count(reasons.total(), 'check')}: {'; '.join(commonest)}"
    if (more := len(reasons) - MOST_REASONS) > 0:
        told += f"; and for {wording.count(more, 'other reason')}, which the report lists"
    return wrapped(told, "")


def _failure(failure: Failure) -> list[Line]:
    """What failed, why if that was found out, which GPUs, how far off, what it means and what to do."""
    cases = f", {len(failure.cases)} cases" if len(failure.cases) > 1 else ""
    result = wrapped(failure.title, "  ", BAD)
    if failure.title != failure.name and not failure.alike:
        result += wrapped(f"{failure.name}{cases}", "    ")
    for text in failure.causes:
        result += [line for each in text.splitlines() for line in wrapped(each, "    ", BAD)]
    said = failure.messages[0].head if failure.messages else ""
    for gpu in failure.gpus:
        if gpu.identity not in "\n".join((said, *failure.causes)):
            result += wrapped(gpu.identity, "    ", BAD)
    for miss in failure.misses[:MOST_MISSES]:
        result += _miss(miss)
    result += and_more(len(failure.misses) - MOST_MISSES, "    ", "figure")
    said_lines = [line for line in said.splitlines() if line.strip()]
    for line in said_lines[:MOST_LINES]:
        result += wrapped(textwrap.shorten(line, 400, placeholder=" ..."), "    ")
    result += and_more(len(said_lines) - MOST_LINES, "    ", "line", "which the report shows")
    for file, names in failure.by_file.items():
        result += wrapped(f"{file}: {', '.join(names)}", "    ")
    return result + [line for paragraph in failure.advice for line in wrapped(paragraph, "    ")]


def _miss(miss: Miss) -> list[Line]:
    limit = miss.limit
    for sign, spoken in SPOKEN.items():
        limit = limit.replace(sign, spoken)
    what = ", ".join(filter(None, (miss.metric, miss.conditions)))
    result = wrapped(f"{miss.place}: {what}", "    ", BAD)
    result += wrapped(", ".join(filter(None, (miss.value, miss.peers, f"limit: {limit}"))), "      ")
    if miss.kind != "peers" and miss.source:
        result += wrapped(f"source of the limit: {miss.kind}, {miss.source}", "      ")
    return result
