"""What failed, as a reader meets it: what it means, where, how far off, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Code, Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.accused import Accused
from pytest_gpufleet.report.misses import Miss, misses
from pytest_gpufleet.verdict.accusations import searched

# Half of it from the top and half from the end: the cause of a failure is in one of the two.
LONGEST_MESSAGE = 4000
MOST_MESSAGES = 3
# So many checks with the same message have a cause that is none of theirs, and what each advises does not help.
ALIKE = 3
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
    """A check that failed, with all of its cases that did; or several that said the same (`alike`), told as one."""

    name: str
    title: str
    cases: tuple[str, ...]
    causes: tuple[str, ...]
    gpus: tuple[Gpu, ...]  # named by it
    misses: tuple[Miss, ...]
    messages: tuple[Message, ...]
    silent: int  # cases whose messages are not shown
    advice: tuple[str, ...]  # paragraphs
    codes: tuple[Code, ...]  # kinds of what it found
    said: str = ""  # what all of its cases said, if that is all there is to tell
    alike: tuple[Failure, ...] = ()

    @property
    def names(self) -> list[str]:
        """The checks that are told of here."""
        return [failure.name for failure in self.alike] or [self.name]

    @property
    def by_file(self) -> dict[str, list[str]]:
        """The checks that are alike: {"test_links.py": ["test_a", "6 x test_b"]}."""
        files: dict[str, list[str]] = {}
        for failure in self.alike:
            file, _, name = failure.name.partition("::")
            cases = f"{len(failure.cases)} x " if len(failure.cases) > 1 else ""
            files.setdefault(file, []).append(cases + name)
        return files


def failures(record: Record, accused: Mapping[str, Accused], say: Say = english) -> list[Failure]:
    """Every check that failed, or of which a figure missed its limit, the cases of one check together, and checks that
    all said the same."""
    cases: dict[str, list[str]] = {}
    for check_id in accused:
        cases.setdefault(check_id.partition("[")[0], []).append(check_id)
    missed: dict[str, list[Miss]] = {}
    for miss in misses(record, say):
        missed.setdefault(miss.check, []).append(miss)
    told = (
        _failure(
            name,
            ids,
            record,
            accused,
            [miss for check_id in ids for miss in missed.get(check_id, ())],
            say,
        )
        for name, ids in cases.items()
    )
    return _together(told, say)


def _together(failures: Iterable[Failure], say: Say) -> list[Failure]:
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault(("", failure.said) if failure.said else (failure.name, ""), []).append(failure)
    return [told for group in groups.values() for told in (group if len(group) < ALIKE else [_as_one(group, say)])]


def _as_one(group: Sequence[Failure], say: Say) -> Failure:
    count = sum(len(failure.cases) or 1 for failure in group)
    (first, *_) = group
    message = replace(first.messages[0], case="")
    title = say("{count} checks failed with one and the same message", count=count)
    return replace(first, title=title, cases=(), messages=(message,), silent=0, advice=(), alike=tuple(group))


def _failure(
    name: str,
    ids: Sequence[str],
    record: Record,
    accused: Mapping[str, Accused],
    missed: Sequence[Miss],
    say: Say,
) -> Failure:
    checks = [record.checks.get(check_id) or _without_result(check_id, record, say) for check_id in ids]
    its = [accused[check_id] for check_id in ids]
    named = {where for each in its for where in (*each.named, *each.explained)}
    causes = dict.fromkeys(_told(fault, record) for check_id in ids for fault in searched(record, check_id))
    messages = [
        _message(check, check.id.removeprefix(name))
        for check in checks
        if check.message.strip() and not check.failed_by.startswith("limits")  # figures have a table of their own
    ]
    heads = {message.head for message in messages}
    more = causes or named or len(messages) < len(checks) or missed
    advice = [part for part in inspect.cleandoc(checks[0].doc).split("\n\n") if part.strip()]
    if all(each.is_explained and not _finds_cause(each, ids) for each in its):
        advice = [
            wording.sentences(cause, say("Until then this says nothing against the hardware."))
            for cause in explanations(its, record.hosts, say)
        ]
    return Failure(
        name,
        say(checks[0].title) or name,
        tuple(check_id.removeprefix(name) for check_id in ids if check_id != name),
        tuple(causes),
        tuple(gpu for gpu in record.topology.gpus if gpu.place in named),
        tuple(missed),
        tuple(messages[:MOST_MESSAGES]),
        max(0, len(messages) - MOST_MESSAGES),
        tuple(advice),
        tuple(dict.fromkeys(fault.kind for fault in record.faults if fault.check in ids)),
        said=heads.pop() if len(heads) == 1 and not more else "",
    )


def _without_result(check_id: str, record: Record, say: Say) -> Check:
    """What stands for a check that left no result: what was found in it."""
    found = [fault for fault in record.faults if fault.check == check_id]
    kinds = dict.fromkeys(fault.kind for fault in found)
    title = "" if check_id else say("; ").join(wording.capitalised(say(kind.message)) for kind in kinds)
    steps = "\n\n".join(f"{say(kind.next_step)}{say('.')}" for kind in kinds)
    return Check(check_id, "failed", 0.0, title, steps, "\n".join(_told(fault, record) for fault in found))


def explanations(accused: Iterable[Accused], hosts: wording.Hosts, say: Say = english) -> list[str]:
    """What explains what checks say, and what to do about it: one sentence for all places of one kind."""
    causes = dict.fromkeys(cause for each in accused for cause in each.causes)
    by_kind: dict[Code, dict[str, None]] = {}
    named = partial(wording.place, hosts=hosts)
    for cause in causes:
        by_kind.setdefault(cause.kind, {})[cause.told(named)] = None
    stop = say(".")
    return [
        wording.sentences(
            f"{wording.capitalised(say(code.message))} ({'; '.join(where)}){stop}", f"{say(code.next_step)}{stop}"
        )
        for code, where in by_kind.items()
    ]


def _finds_cause(accused: Accused, checks: Collection[str]) -> bool:
    """Whether one of these checks has itself found what explains it."""
    return any(cause.check in checks for cause in accused.causes)


def _told(fault: Fault, record: Record) -> str:
    return fault.told(record.topology.identity)


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
