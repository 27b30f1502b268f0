"""What failed, as a reader meets it: what it means, where, how far off, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.hardware.topology import Gpu
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.blame import Blame, cause
from pytest_gpufleet.report.miss import Miss, misses
from pytest_gpufleet.verdict.evidence import Check, Record

# Half of it from the top and half from the end: the cause of a failure is in one of the two.
LONGEST_MESSAGE = 4000
MOST_MESSAGES = 3
_EXCEPTION = re.compile(r"^AssertionError: (?!assert )")
_INTROSPECTION = ("assert ", " +  ", "  +  ")


@dataclass(frozen=True)
class Message:
    """What one case of a check said: what a person needs of it, and all of it if that is more."""

    case: str
    head: str
    whole: str


@dataclass(frozen=True)
class Failure:
    """A check that failed, with all of its cases that did."""

    name: str
    title: str
    cases: tuple[str, ...]
    causes: tuple[str, ...]
    gpus: tuple[Gpu, ...]  # named by it
    misses: tuple[Miss, ...]
    messages: tuple[Message, ...]
    silent: int  # cases whose messages are not shown
    advice: tuple[str, ...]  # paragraphs


def failures(record: Record, blames: Mapping[str, Blame]) -> list[Failure]:
    """Every check that failed, or of which a figure missed its limit, the cases of one check together."""
    cases: dict[str, list[str]] = {}
    for check_id in blames:
        cases.setdefault(check_id.partition("[")[0], []).append(check_id)
    every = misses(record)
    return [_failure(name, ids, record, blames, every) for name, ids in cases.items()]


def _failure(
    name: str, ids: Sequence[str], record: Record, blames: Mapping[str, Blame], every: Sequence[Miss]
) -> Failure:
    checks = [record.checks.get(check_id) or Check(check_id, "failed", 0.0) for check_id in ids]
    named = dict.fromkeys(place for check_id in ids for place in blames[check_id].named)
    causes = dict.fromkeys(
        text for check in checks if (text := cause(check, (f for f in record.findings if f.check == check.id)))
    )
    messages = [_message(check, check.id.removeprefix(name)) for check in checks if check.message.strip()]
    advice = [part for part in inspect.cleandoc(checks[0].doc).split("\n\n") if part.strip()]
    return Failure(
        name,
        checks[0].title or name,
        tuple(check_id.removeprefix(name) for check_id in ids if check_id != name),
        tuple(causes),
        tuple(gpu for gpu in record.topology.gpus if gpu.place in named),
        tuple(miss for miss in every if miss.check in ids),
        tuple(messages[:MOST_MESSAGES]),
        max(0, len(messages) - MOST_MESSAGES),
        tuple(advice),
    )


def _message(check: Check, case: str) -> Message:
    message = wording.clean(check.message).strip()
    head = message.partition("\n\n")[0]
    # What is left when the words that only a Python programmer reads are out.
    plain = "\n".join(line for line in head.splitlines() if not line.startswith(_INTROSPECTION))
    if _EXCEPTION.match(plain):
        plain = _EXCEPTION.sub("", plain).replace("\n  ", "\n")  # pytest has indented it
    head = plain.strip() or head
    return Message(case.strip("[]"), _shortened(head), "" if head == message else _shortened(message))


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    left_out = f"[{wording.number(len(text) - 2 * half, 9)} characters left out; evidence.jsonl has them]"
    return f"{text[:half]}\n\n{left_out}\n\n{text[-half:]}"
