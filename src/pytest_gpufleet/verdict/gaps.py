"""What was required of a run and is not there, and what of it a person reads."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from pytest_gpufleet.machine.gpu_facts import TELEMETRY, professional
from pytest_gpufleet.model import levels
from pytest_gpufleet.model.endings import NOT_JUDGED
from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.language import say, some
from pytest_gpufleet.model.place import Pair, Place, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite, shipped, titled
from pytest_gpufleet.verdict import accusations, basis
from pytest_gpufleet.verdict.requirements import Answer, answer

Kind = Literal[
    "disturbed", "incomplete", "never finished", "deselected", "not run", "without figures", "skipped",
    "not judged", "below the basis", "changed", "without telemetry", "not applied", "calibrated here", "too short",
    "not applicable", "not there yet", "not answered",
]  # fmt: skip
# What there is a count of; of all other kinds it is checks.
NOUNS: dict[Kind, str] = {
    "changed": "file", "incomplete": "run", "too short": "burn-in", "not judged": "measurement",
    "below the basis": "measurement", "without telemetry": "GPU", "not applied": "limit",
    "calibrated here": "profile", "not answered": "requirement",
}  # fmt: skip
UNFINISHED = ("incomplete", "never finished")  # reported beside any verdict
DEADLINE = "the run came to its --fleet-deadline"
ALTERED = "not as it was shipped with this version, so it may check something else"
DESELECTED, NOT_SELECTED = "left out by the command line", "not selected, or the run ended before it"
OF_PLACES = ("link", "port_rate", "batch", "ranks")  # conditions that may differ from place to place
MOST_CASES = 3  # of one check, named in a reason
MOST_REQUIRED = 8  # ids of requirements, named in a reason
# Of one gap of a check, and of several.
OF_CHECKS: dict[Kind, tuple[str, str]] = {
    "never finished": ("did not finish: {why}", "did not finish: {why}"),
    "deselected": ("deselected{cases}: {why}", "deselected{cases}: {why}"),
    "not run": ("not run{cases}: {why}", "not run{cases}: {why}"),
    "skipped": ("skipped: {why}", "{count} cases skipped: {why}"),
    "not applicable": ("failed before the repair and is not applicable now: {why}",) * 2,
    "not judged": ("1 measurement was not judged: {why}", "{count} measurements were not judged: {why}"),
    "below the basis": ("1 measurement is {why}", "{count} measurements are {why}"),
    "without figures": ("{why}{cases}", "{why}{cases}"),
}


@dataclass(frozen=True)
class Gap:
    """What was required and is not there."""

    kind: Kind
    subject: str  # the node id of a check, a GPU, the name of a file, a limit; "" for the run as a whole
    why: str
    finding: Finding | None = None  # that was not judged, or held against too low a limit
    counts: bool = True  # that of a check that no level requires is only shown

    @property
    def check(self) -> str:
        """The name of the check without its case; "" where the subject is none."""
        return levels.check_name(self.subject) if "::" in self.subject else ""


def gaps(record: Record) -> list[Gap]:
    """What the level asks for and the run does not answer, the gravest first; then what requirements ask for. Those of
    a run on many nodes take its nodes' own runs (`answered`)."""
    return [*_of_level(record), *([] if record.of_cluster else not_answered(record))]


def answered(record: Record, own: Iterable[Record] = ()) -> list[Answer]:
    """What the run answers of the requirements that were given. `own`: the runs of its nodes, if it is of many."""
    if record.requirements is None:
        return []
    runs = [record, *own]
    found = (gap for run in runs for gap in _of_level(run) if gap.check)
    opened = {levels.case_name(gap.subject): gap.why for gap in found}
    bad = {check for run in runs for check in {*run.failed} - accusations.disturbed(run)}
    return [answer(each, runs, opened, bad) for each in record.requirements.content]


def not_answered(record: Record, own: Iterable[Record] = ()) -> list[Gap]:
    found = (each.requirement.id for each in answered(record, own) if each.state == "not judged")
    return [Gap("not answered", each, "no check or measurement was judged that answers it") for each in found]


def _of_level(record: Record) -> Iterator[Gap]:
    for check in sorted(accusations.disturbed(record)):
        yield Gap("disturbed", check, "another process used the GPU")
    for why in filter(None, (record.broken, *record.spoiled)):
        yield Gap("incomplete", "", why)
    for check in (each for each in record.started if each not in record.checks):
        done, whole = record.progress.get(check, (0, 0))
        came_to = say("it came to {done} s of {whole} s without a fault", done=round(done), whole=round(whole))
        yield Gap("never finished", check, came_to if whole else "it was running when the record ends")
    yield from (Gap("changed", name, ALTERED) for name in record.altered)
    yield from (Gap("without telemetry", gpu, missing) for gpu, missing in without_telemetry(record))
    never = "a limit of the contract was never applied, since nothing was measured under its conditions"
    yield from (Gap("not applied", limit, never) for limit in basis.unused_limits(record, "contract"))
    if why := basis.own_limits(record):
        yield Gap("calibrated here", "", why)
    seconds = record.run.burn_in_seconds
    if record.run.level == "burnin" and seconds < levels.BURN_IN_SECONDS:
        text = "the burn-in was {seconds} s long, level burnin asks for {wanted} s"
        name = next(name for name, check in shipped().checks.items() if "burn_retention" in check.figures)
        yield Gap("too short", name, say(text, seconds=f"{seconds:g}", wanted=f"{levels.BURN_IN_SECONDS:g}"))
    figures = distinct(record.findings)
    for finding in (each for each in figures if each.state == "not judged"):
        yield Gap("not judged", finding.check, finding.reason or "no reason was given", finding)
    for finding, why in basis.too_low(figures, record.run.basis):
        yield Gap("below the basis", finding.check, why, finding)
    yield from _ended(record, "skipped")
    yield from (gap for gap in _ended(record, "not applicable") if record.suite.known_as(gap.subject) in record.again)
    yield from (*_left_out(record), *without_figures(record))


def inapplicable(record: Record) -> list[Gap]:
    """Checks that ran and found that this machine has no such thing, which leaves nothing open."""
    return [gap for gap in _ended(record, "not applicable") if record.checks[gap.subject].asked]


def newer(record: Record) -> list[Gap]:
    """The checks that this version requires and the one that ran did not have: they leave nothing open."""
    why, known = say("it did not exist in {version}", version=record.run.plugin), record.suite.checks
    return [Gap("not there yet", name, why) for name in record.required_by(shipped()) if name not in known]


def not_applied(record: Record) -> list[Gap]:
    """Limits of a given profile that held for nothing, which leaves nothing open: they are in no contract."""
    return [
        Gap("not applied", limit, "nothing was measured under its conditions") for limit in basis.unused_limits(record)
    ]


def _left_out(record: Record) -> Iterator[Gap]:
    """The cases of which the level requires that they run, and what failed before a repair, that did not begin."""
    begun = set(map(record.suite.known_as, {*record.started, *record.checks}))
    deselected = set(map(record.suite.known_as, record.deselected))
    absent = "the deadline came first" if record.broken == DEADLINE else NOT_SELECTED
    cases = (case for name in record.required for case in record.suite.cases(name))
    for case in dict.fromkeys((*cases, *record.again)):
        if case not in begun:
            yield Gap("deselected", case, DESELECTED) if case in deselected else Gap("not run", case, absent)
    for check in record.deselected:
        if levels.check_name(check) not in record.suite.checks:
            yield Gap("deselected", check, DESELECTED, counts=False)


def without_figures(record: Record) -> Iterator[Gap]:
    """What the checks of the suite that passed are there for and did not leave: any measurement, or one of each GPU,
    pair of them or node; on one machine, under any of its conditions. What is only shown may be of one GPU alone. Of
    many nodes, of the checks between them: each node's own run has the measurements of the others."""
    several, suite, gpus = len(record.topology.gpus) > 1, record.suite, {gpu.place for gpu in record.topology.gpus}
    there = record.hosts.keys() - record.lost.keys() - record.left_out.keys() if record.of_cluster else ()
    nodes = {Place(node, "node") for node in there}
    left: dict[tuple[str, str], dict[object, set[Where]]] = defaultdict(lambda: defaultdict(set))
    for finding in record.findings:
        under = finding.measurement.conditions
        of_check = left[levels.case_name(finding.check), finding.measurement.metric]
        if finding.state != "for information" and (not nodes or under.get("nodes", len(nodes)) == len(nodes)):
            alike = frozenset(each for each in under.items() if not nodes and each[0] not in OF_PLACES)
            of_check[alike] |= finding.measurement.values.keys()
    passed = [check.id for check in record.checks.values() if check.outcome == "passed" and suite.contains(check.id)]
    for check in (each for each in passed if suite.between_nodes(each) or not record.of_cluster):
        case = levels.case_name(check)
        for metric in suite.checks[levels.check_name(check)].metrics(several):
            if (case, metric) not in left:
                yield Gap("without figures", case, say("passed and left no measurement of {metric}", metric=metric))
            elif missing := set[Where]().union(*(_beside(each, gpus, nodes) for each in left[case, metric].values())):
                where = some(list(map(str, sorted(missing))), MOST_CASES)
                text = "no measurement of {metric} at {places}"
                yield Gap("without figures", case, say(text, metric=metric, places=where))


def _beside(places: set[Where], gpus: set[Place], nodes: set[Place]) -> set[Where]:
    """The others of their kind, if there are any: nodes, pairs of GPUs, GPUs."""
    parts = {part for place in places for part in place.parts}
    if nodes and parts and all(part.is_on_node for part in parts):
        return {*nodes - {Place(part.node, "node") for part in parts}}
    if {part.kind for part in parts} != {"gpu"}:
        return set()
    if any(isinstance(place, Pair) for place in places):
        measured = {Pair(*sorted(at.parts)) for at in places}
        return {pair for two in combinations(sorted(gpus), 2) if (pair := Pair(*two)) not in measured}
    return {*gpus - places}


def _ended(record: Record, outcome: Literal["skipped", "not applicable"]) -> Iterator[Gap]:
    required = set(record.required)
    for check in record.checks.values():
        if check.outcome == outcome:
            why = check.message.removeprefix(f"{outcome}: ") or "no reason was given"
            again = record.suite.known_as(check.id) in record.again
            yield Gap(outcome, check.id, why, counts=again or levels.check_name(check.id) in required)


def counted(found: Iterable[Gap]) -> list[str]:
    """["2 figures not judged", "65 checks deselected"]: of checks, the cases of one as one."""
    each = dict.fromkeys((gap.kind, id(gap) if gap.finding else gap.check or gap.subject) for gap in found)
    kinds, text = Counter(kind for kind, _ in each), "{count} {things} {state}"
    nouns = {kind: say(NOUNS.get(kind, "check") + "s" * (count != 1)) for kind, count in kinds.items()}
    return [say(text, count=count, things=nouns[kind], state=say(kind)) for kind, count in kinds.items()]


def in_cases(found: Iterable[Gap], suite: Suite) -> str:
    """ " in [fp16], [bf16] and 3 more": of which cases of one check these are; "" where it is all of them."""
    cases = dict.fromkeys(levels.case_name(gap.subject) for gap in found)
    name = levels.check_name(next(iter(cases)))
    named = [f"[{case.partition('[')[2]}" for case in cases if "[" in case]
    whole = name in suite.checks and {*suite.cases(name)} <= {*cases}
    return say(" in ") + some(named, MOST_CASES) if named and not whole else ""


def reasons(found: Iterable[Gap], record: Record) -> list[str]:
    """As a verdict states them: a sentence for each check, and for each reason. What is the same of many checks or
    nodes, as where a container hides the host, is one reason."""
    groups: dict[tuple[str, str, str], list[Gap]] = defaultdict(list)
    for gap in found:
        unread = gap.kind == "skipped" and gap.why.startswith(NOT_JUDGED)
        of_many = unread or gap.kind in ("disturbed", "not answered")
        groups[gap.kind, gap.why, "" if of_many else gap.check or gap.subject].append(gap)
    return [_reason(group, record) for group in groups.values()]


def _reason(group: list[Gap], record: Record) -> str:
    (first, *more), count = group, len(group)
    kind, why = first.kind, say(first.why)
    match kind:
        case "disturbed":
            neighbours = [cause for cause in accusations.causes(record) if cause.name == accusations.NEIGHBOUR]
            who = "; ".join(cause.described(record.topology.identity) for cause in neighbours)
            several = "{count} checks could not be tested, since another process used a GPU: {who}"
            one = "1 check could not be tested, since another process used a GPU: {who}"
            return say(several if more else one, count=count, who=who)
        case "skipped" if (checks := len({gap.check for gap in group})) > 1:
            return say(
                "{count} checks were not judged: {why}", count=checks, why=say(first.why.removeprefix(NOT_JUDGED))
            )
        case "incomplete" | "calibrated here" | "too short":
            return why
        case "not answered":
            one, several = "1 requirement is not answered: {names}", "{count} requirements are not answered: {names}"
            return say(several if more else one, count=count, names=some([gap.subject for gap in group], MOST_REQUIRED))
        case "not applied" | "changed" | "without telemetry":
            return say(": ").join([why, first.subject] if kind == "not applied" else [first.subject, why])
    own = {levels.check_name(check.id): check.title for check in record.checks.values()}
    title = titled(first.subject if kind == "never finished" else first.check, own.get(first.check, ""))
    cases = in_cases(group, record.suite)
    text = say(OF_CHECKS[kind][bool(more)], count=count, why=why, cases=cases)
    return f"{title}{say(': ')}{say(kind) + cases if first.why in (DESELECTED, NOT_SELECTED) else text}"


def without_telemetry(record: Record) -> list[tuple[str, str]]:
    """The GPUs of which a reading of TELEMETRY was never had while the run lasted, with what is missing. Every GPU is
    in a sample, whatever can be read; that of many nodes is in their own runs."""
    if record.run.rehearsal or record.of_cluster:
        return []
    found = []
    for position, gpu in enumerate(record.topology.gpus):
        readings = [taken for sample in record.telemetry for taken in sample.gpus[position : position + 1]]
        never = [name for name in TELEMETRY if all(taken.get(name) is None for taken in readings)]
        if never and (professional(gpu) or not readings):
            listed = " and ".join(filter(None, (", ".join(never[:-1]), never[-1])))
            found.append((gpu.identity, f"telemetry never had {listed}: no slowdown would have been seen"))
    return found
