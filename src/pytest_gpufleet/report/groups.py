"""The groups of checks that the report is divided into: one a file of the suite, and one a file of anybody else's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report import wording


@dataclass(frozen=True)
class Group:
    """Checks of one kind and what they measured. Without any check: the level requires some that did not run."""

    title: str
    checks: dict[str, Check | None]  # by id; None for one that began and never ended
    findings: tuple[Finding, ...]

    @property
    def question(self) -> str:
        return shipped().chapters.get(self.title, "")


@dataclass(frozen=True)
class CheckLine:
    """A check with all of its cases."""

    name: str
    title: str
    state: str  # the gravest of its cases
    result: str
    duration: str


# The gravest first.
GRAVITY = ("failed", "unfinished", "skipped", "passed", "not applicable")


def check_lines(group: Group, blamed: Collection[str], say: Say = english) -> list[CheckLine]:
    """The checks of a group, each with how it ended. `blamed`: ids of those that count as failed."""
    cases: dict[str, list[str]] = defaultdict(list)
    for check_id in group.checks:
        cases[check_id.partition("[")[0]].append(check_id)
    return [_check_line(name, ids, group, blamed, say) for name, ids in cases.items()]


def _check_line(name: str, ids: list[str], group: Group, blamed: Collection[str], say: Say) -> CheckLine:
    ended = [check for check_id in ids if (check := group.checks[check_id])]
    outcomes: Counter[str] = Counter("failed" if check.id in blamed else check.outcome for check in ended)
    outcomes["unfinished"] += len(ids) - len(ended)
    counted = [(outcomes[state], state) for state in GRAVITY if outcomes[state]]
    result = counted[0][1] if len(ids) == 1 else say(", ").join(f"{count} {say(state)}" for count, state in counted)
    known = shipped().checks.get(levels.check_name(name))
    title = next((check.title for check in ended if check.title), known.title if known else name)
    duration = wording.duration(sum(check.seconds for check in ended)) if ended else ""
    return CheckLine(name, say(title), counted[0][1], result, duration)


def group_title(check_id: str) -> str:
    """The heading under which a check stands, by its node id: for one that the suite had before, the first of its file;
    for a file that is not of the suite, its name."""
    name = levels.check_name(check_id)
    checks = shipped().checks
    file = name.partition("::")[0]
    if known := checks.get(name) or next((each for key, each in checks.items() if key.startswith(f"{file}::")), None):
        return known.chapter
    stem = PurePosixPath(wording.clean(name).partition("::")[0]).stem
    title = stem.removeprefix("test_").replace("_", " ").strip() or stem
    return wording.capitalised(title)


def groups(record: Record) -> list[Group]:
    """The groups of a run that have checks or should have some: those of the suite in its order, then the others."""
    checks: dict[str, dict[str, Check | None]] = {title: {} for title in shipped().chapters}
    findings: dict[str, list[Finding]] = defaultdict(list)
    for finding in distinct(record.findings):
        findings[group_title(finding.check)].append(finding)
    for check_id in dict.fromkeys((*record.started, *record.checks)):
        checks.setdefault(group_title(check_id), {})[check_id] = record.checks.get(check_id)
    level = record.run.level
    real = level in levels.LEVELS and not record.run.rehearsal
    wanted = {group_title(name) for name in record.required} if real else set()
    return [
        Group(title, checks.get(title, {}), tuple(findings[title]))
        for title in dict.fromkeys((*checks, *findings))
        if checks.get(title) or findings[title] or title in wanted
    ]
