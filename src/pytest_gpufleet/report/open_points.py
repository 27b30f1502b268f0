"""What a run leaves open: checks that did not run to their end, findings that nobody judged."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped, titled
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.gpu_grid import group_title
from pytest_gpufleet.verdict.accusations import disturbed
from pytest_gpufleet.verdict.basis import too_low
from pytest_gpufleet.verdict.given_limits import NOT_APPLIED, own_limits, unused_limits
from pytest_gpufleet.verdict.health_rules import without_telemetry
from pytest_gpufleet.verdict.node_verdicts import TOLD, unaccepted
from pytest_gpufleet.verdict.verdict import (
    ALTERED,
    DEADLINE,
    left_out,
    missing_places,
    short_burn_in,
    since_then,
    without_figures,
)

MOST_FIGURES = 8
WHOLE_RUN = "The run"
# Everything that can be open, and of what there is a count.
NOUNS = {
    "deselected": "check",
    "skipped": "check",
    "not run": "check",
    "never finished": "check",
    "without figures": "check",
    "disturbed": "check",
    "not there yet": "check",
    "not applicable": "check",
    "changed": "file",
    "incomplete": "run",
    "not accepted": "node",
    "too short": "burn-in",
    "not judged": "figure",
    "below the basis": "figure",
    "without telemetry": "GPU",
    "not applied": "limit",
    "calibrated here": "profile",
}

FIGURES = ("not judged", "below the basis")  # states of what stands in the tables of figures too

Open = tuple[str, str, str, str]  # state, reason, group of checks, what


@dataclass(frozen=True)
class Gap:
    """Things of one group of checks that were left open in the same way (`state`) for the same reason."""

    state: str
    reason: str
    group: str
    things: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """The first few figures, since each stands in a table above; of the rest all, the cases of one together."""
        if self.state in FIGURES:
            return self.things[:MOST_FIGURES]
        cases = Counter(self.things).items()
        return tuple(f"{count} x {thing}" if count > 1 else thing for thing, count in cases)

    @property
    def more(self) -> int:
        return len(self.things[MOST_FIGURES:]) if self.state in FIGURES else 0


def gaps(record: Record) -> list[Gap]:
    """What the level asks for and the run does not answer; each reason once a group of checks."""
    return _grouped(_open(record))


def inapplicable(record: Record) -> list[Gap]:
    """Checks that ran and found that this machine has no such thing, which leaves nothing open."""
    return _grouped(_ended(record, "not applicable"))


def not_there_yet(record: Record) -> list[Gap]:
    """Checks that this version has and the one that ran had not, which leaves nothing open."""
    reason = say("it did not exist in {version}", version=record.run.plugin)
    return _grouped(("not there yet", reason, group_title(name), titled(name)) for name in since_then(record))


def not_applied(record: Record) -> list[Gap]:
    """Limits of a given profile that held for nothing, which leaves nothing open: they are in no contract."""
    reason = say("no figure was measured under its conditions")
    return _grouped(("not applied", reason, WHOLE_RUN, limit) for limit in unused_limits(record))


def counted(gaps: Iterable[Gap]) -> list[str]:
    """["2 figures not judged", "65 checks deselected"]"""
    counts: Counter[str] = Counter()
    for gap in gaps:
        counts[gap.state] += len(gap.things)
    return [
        say("{count} {things} {state}", count=count, things=say(NOUNS[state] + "s" * (count != 1)), state=say(state))
        for state, count in counts.items()
    ]


def _grouped(found: Iterable[Open]) -> list[Gap]:
    by_reason = grouped(((state, reason, group), thing) for state, reason, group, thing in found)
    return [Gap(*key, tuple(things)) for key, things in by_reason.items()]


def _open(record: Record) -> Iterator[Open]:
    for reason in filter(None, (record.broken, *record.spoiled)):
        yield "incomplete", reason, WHOLE_RUN, say("the run as a whole")
    for nodes in unaccepted(record):
        if not nodes.rejects:
            why = f"{say(TOLD[nodes.state])}{nodes.why and f': {nodes.why}'}"
            yield from (("not accepted", why, WHOLE_RUN, host) for host in nodes.hosts)
    for check_id in record.started:
        if check_id not in record.checks:
            running = say("it was running when the record ends")
            yield "never finished", running, group_title(check_id), titled(check_id)
    for check_id in sorted(disturbed(record)):
        yield "disturbed", say("somebody else's process used the GPU"), group_title(check_id), titled(check_id)
    for name in record.altered:
        yield "changed", ALTERED, WHOLE_RUN, name
    for gpu, missing in without_telemetry(record):
        yield "without telemetry", missing, WHOLE_RUN, gpu
    for limit in unused_limits(record, "contract"):
        yield "not applied", NOT_APPLIED, WHOLE_RUN, limit
    if text := own_limits(record):
        yield "calibrated here", text, WHOLE_RUN, say("the profile as a whole")
    if text := short_burn_in(record):
        yield "too short", text, group_title(_burn_in()), say("the burn-in")
    figures = distinct(record.findings)
    for finding in figures:
        if finding.state == "not judged":
            yield "not judged", open_reason(finding), group_title(finding.check), _figure(finding)
    for finding, why in too_low(figures, record.run.basis):
        yield "below the basis", why, group_title(finding.check), _figure(finding)
    yield from _ended(record, "skipped")
    level, known = record.run.level, record.suite.checks
    in_time = record.broken != DEADLINE
    absent = say("not selected, or the run ended before it" if in_time else "the deadline came first")
    for check_id in record.deselected:
        name = levels.check_name(check_id)
        if name not in known or levels.includes(level, known[name].level):
            yield "deselected", say("left out by the command line"), group_title(name), _without_case(check_id)
    for name, (_, not_run) in left_out(record).items():
        whole = len(not_run) == len(record.suite.cases(name))
        names = (titled(name if whole else case) for case in not_run)
        yield from (("not run", absent, group_title(name), each) for each in names)
    for name, metrics in without_figures(record).items():
        for metric, cases in metrics.items():
            none = say("it left no {metric}", metric=metric)
            yield from (("without figures", none, group_title(name), titled(case)) for case in cases)
    for case, metric, places in missing_places(record):
        none = say("it left no {metric} at {places}", metric=metric, places=places)
        yield "without figures", none, group_title(case), titled(case)


def _figure(finding: Finding) -> str:
    return say(", ").join([wording.title(finding), *wording.conditions(finding)])


def open_reason(finding: Finding) -> str:
    """Why a figure was not judged."""
    return finding.reason or "no reason was given"


def _burn_in() -> str:
    """The name of the check that makes the load that lasts."""
    return next(name for name, check in shipped().checks.items() if "burn_retention" in check.figures)


def _ended(record: Record, outcome: str) -> Iterator[Open]:
    for check_id, check in record.checks.items():
        if check.outcome == outcome:
            reason = check.message.removeprefix(f"{outcome}: ") or "no reason was given"
            yield outcome, reason, group_title(check_id), _without_case(check_id, check.title)


def _without_case(check_id: str, title: str = "") -> str:
    return titled(check_id.partition("[")[0], title)
