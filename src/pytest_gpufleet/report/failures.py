"""What failed, as a reader meets it: whom it names, what it means, where, how far off, and what to do; and the state of
every GPU, one row a GPU, one cell a group of checks, so that the bad one is seen at a glance."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Code, Fault
from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import WORLD, Gpu, Pair, Place, Where, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped, titled
from pytest_gpufleet.redaction import shortened
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.tables import Cell, Row, Table, row
from pytest_gpufleet.verdict.accusations import accusations, at, causes, explaining, is_cause, searched
from pytest_gpufleet.verdict.across_runs.back_in_service import is_other, matched

NOBODY: Mapping[Place, Place] = {}


class Accused(NamedTuple):
    """What a failed check says of GPUs. `named` are to blame; `beside` are in pairs with one of those. `everybody`: any
    may be the cause. What is said of `explained`, or (`is_explained`) all that the check says, has one of `causes`."""

    named: tuple[Place, ...] = ()
    beside: Mapping[Place, Place] = NOBODY
    everybody: bool = False
    explained: tuple[Place, ...] = ()
    causes: tuple[Fault, ...] = ()
    is_explained: bool = False


def accused(record: Record, nodes: bool = False) -> dict[str, Accused]:
    """Whom each check names that failed, or of which a measurement is outside its limit: GPUs; or the `nodes` of a run,
    of which is said what is said of their devices."""

    def seen(fault: Fault) -> Fault:
        if not nodes:
            return fault
        parts = ([Place(part.node, "node") if part.is_on_node else part for part in at.parts] for at in fault.subjects)
        at_nodes: Iterator[Where] = (Pair(each[0], each[1]) if len({*each}) > 1 else each[0] for each in parts)
        return fault.changed(subjects=tuple(dict.fromkeys(at_nodes)))

    everyone = [Place(at, "node") for at in record.hosts] if nodes else [gpu.place for gpu in record.topology.gpus]
    by_check: dict[str, list[Fault]] = {name: [] for name, check in record.checks.items() if check.outcome == "failed"}
    for fault in accusations(record):
        by_check.setdefault(fault.check, []).append(seen(fault))
    known, found = list(map(seen, causes(record))), {}
    for check_id, faults in by_check.items():
        why = [(fault, [fault] if is_cause(fault) else explaining(fault, known)) for fault in faults]
        named, beside, everybody = _named([fault for fault, its in why if not its], everyone)
        explained = dict.fromkeys(
            where
            for fault, its in why
            for where in (at(fault.subjects) or at(subject for cause in its for subject in cause.subjects))
            if its and where in everyone and where not in named
        )
        all_causes, is_explained = dict.fromkeys(cause for _, its in why for cause in its), all(its for _, its in why)
        anybody = everybody and not named
        found[check_id] = Accused((*named,), beside, anybody, (*explained,), (*all_causes,), is_explained and bool(why))
    return found


def times_named(accused: Iterable[Accused]) -> Counter[Place]:
    """How many checks name each GPU, by its place."""
    return Counter(where for each in accused for where in each.named)


def _named(faults: Iterable[Fault], everyone: Collection[Place]) -> tuple[list[Place], dict[Place, Place], bool]:
    """Who is to blame, who is only in a pair with one of these, and whether it could be any of all."""
    named: list[Place] = []
    pairs: list[Pair] = []
    everybody, there = False, {*everyone}
    for fault in faults:
        singles = [subject for subject in fault.subjects if isinstance(subject, Place) and subject in everyone]
        if len(singles) == len(everyone) > 1 or WORLD in fault.subjects:
            everybody = True
        else:
            named += singles
        pairs += [each for each in fault.subjects if isinstance(each, Pair) and there.issuperset(each.parts)]
    alone = [*named]
    # The fewest GPUs that explain the bad pairs that are left, those with the most first.
    while left := [pair for pair in pairs if not {*pair.parts} & {*named}]:
        counts = Counter(where for pair in left for where in pair.parts)
        most = max(counts.values())
        worst = [where for where, count in counts.items() if count == most]
        if len(worst) == len(everyone) > 2:  # it could be any of all
            named, everybody = alone, True
            break
        named += worst
    named = list(dict.fromkeys(named))
    turned = (parts for pair in pairs for parts in (pair.parts, pair.parts[::-1]))
    return named, {where: other for where, other in turned if other in named and where not in named}, everybody


class Miss(NamedTuple):
    """One figure that missed its limit, or its peers, or both, in one place or in several; ready to be shown."""

    metric: str
    conditions: str
    place: str
    value: str
    peers: str  # how much worse than its peers; empty if it is not
    limit: str
    kind: str
    source: str


def _miss(finding: Finding, hosts: wording.Hosts) -> Miss:
    unit, values, limit = finding.measurement.definition.unit, finding.measurement.values, finding.limit
    slower, worst = finding.slower_than_peers or {}, wording.worst(finding)
    # A missed finding that names no place is still a miss: of the worst place.
    places = tuple(dict.fromkeys((*finding.missed, *slower))) or ((worst[0],) if worst else ())
    given = [values.get(place, math.nan) for place in places]
    value, text, kind, source = wording.span(given, unit), finding.reason, "", ""
    if limit and finding.missed:
        nearest, text = wording.value_and_limit(given[0], limit)
        value, kind, source = nearest if len(given) == 1 else value, limit.origin, limit.full_source
    elif slower:
        text = say("at most {worse}", worse=say(" and ").join(say(each.text) for each in finding.tolerances))
        of_run = say("the same kind in this run; how much healthy ones differ was not measured")
        kind, source = "peers", "; ".join(each.source or of_run for each in finding.tolerances)
    common = set.intersection(*(set(place.parts) for place in places)) if places else set()
    if len(places) > 1 and len(common) == 1 and all(isinstance(place, Pair) for place in places):
        where = say("{count} pairs with {place}", count=len(places), place=wording.place(common.pop(), hosts))
    else:
        where = wording.places(places, hosts=hosts)
    worse = say("{share} worse than its peers", share=wording.span(slower.values(), "ratio", 3)) if slower else ""
    source = "; ".join(dict.fromkeys((*map(say, finding.why().values()), source)))
    conditions = say(", ").join(wording.conditions(finding))
    return Miss(wording.title(finding), conditions, where, value, worse, text, kind, source)


LONGEST_MESSAGE = 4000
MOST_MESSAGES = 3
# So many checks with the same message have a cause that is none of theirs, and what each advises does not help.
ALIKE = 3
_EXCEPTION = re.compile(r"^AssertionError: (?!assert )")
_INTROSPECTION = ("assert ", " +  ", "  +  ")


class Message(NamedTuple):
    """What one case of a check said: what a person needs of it, and all of it if that is more."""

    case: str
    head: str
    whole: str


class Failure(NamedTuple):
    """A check that failed, with all of its cases that did; or several that said the same (`alike`), told as one."""

    name: str
    title: str
    cases: tuple[str, ...]
    causes: tuple[str, ...]
    gpus: tuple[Gpu, ...]  # named by it
    misses: tuple[Miss, ...]
    messages: tuple[Message, ...]  # of which the first few are shown
    advice: tuple[str, ...]  # paragraphs
    codes: tuple[Code, ...]  # kinds of what it found
    said: str = ""  # what all of its cases said, if that is all there is to tell
    alike: "tuple[Failure, ...]" = ()

    @property
    def by_file(self) -> dict[str, list[str]]:
        """The checks that are alike: {"test_links.py": ["test_a", "6 x test_b"]}."""
        names = ((failure.name.partition("::"), len(failure.cases)) for failure in self.alike)
        return grouped((file, f"{cases} x {name}" if cases > 1 else name) for (file, _, name), cases in names)


def failures(record: Record, accused: Mapping[str, Accused]) -> list[Failure]:
    """Every check that failed or missed a limit, with its cases; those that all said the same together."""
    missed = grouped((each.check, _miss(each, record.hosts)) for each in record.findings if each.state == "missed")
    found = (
        _failure(name, ids, record, accused, [miss for check_id in ids for miss in missed.get(check_id, ())])
        for name, ids in grouped((check_id.partition("[")[0], check_id) for check_id in accused).items()
    )
    told = []
    for group in grouped((("", each.said) if each.said else (each.name, ""), each) for each in found).values():
        if len(group) >= ALIKE:
            count, message = sum(len(each.cases) or 1 for each in group), group[0].messages[0]._replace(case="")
            title, alike = say("{count} checks failed with one and the same message", count=count), tuple(group)
            group = [group[0]._replace(title=title, cases=(), messages=(message,), advice=(), alike=alike)]
        told += group
    return told


def _failure(name: str, ids: list[str], record: Record, accused: Mapping[str, Accused], missed: list[Miss]) -> Failure:
    checks = [_as_failed(check_id, record) for check_id in ids]
    its, described = [accused[check_id] for check_id in ids], record.topology.identity
    named = {where for each in its for where in (*each.named, *each.explained)}
    causes = dict.fromkeys(fault.described(described) for check_id in ids for fault in searched(record, check_id))
    messages = [
        message(check, check.id.removeprefix(name))
        for check in checks
        if check.message.strip() and not check.failed_by.startswith("limits")  # figures have a table of their own
    ]
    heads = {message.head for message in messages}
    more = causes or named or len(messages) < len(checks) or missed
    advice = [say(" ".join(part.split())) for part in checks[0].doc.split("\n\n") if part.strip()]
    found_here = any(cause.check in ids for each in its for cause in each.causes)  # what explains it
    if all(each.is_explained for each in its) and not found_here:
        until = say("Until then this says nothing against the hardware.")
        advice = [wording.sentences(cause, until) for cause in explanations(its, record.hosts)]
    cases = tuple(check_id.removeprefix(name) for check_id in ids if check_id != name)
    gpus = tuple(gpu for gpu in record.topology.gpus if gpu.place in named)
    codes = tuple(dict.fromkeys(fault.kind for fault in record.faults if fault.check in ids))
    said = heads.pop() if len(heads) == 1 and not more else ""
    title = say(checks[0].title) or name
    return Failure(name, title, cases, (*causes,), gpus, (*missed,), (*messages,), (*advice,), codes, said)


def _as_failed(check_id: str, record: Record) -> Check:
    """A check as it ended; if it left no message, as one that passed or did not end, with what was found in it."""
    found = [fault for fault in record.faults if fault.check == check_id]
    ended, kinds = record.checks.get(check_id), dict.fromkeys(fault.kind for fault in found)
    if ended and (ended.message.strip() or not found):
        return ended
    meaning = say("; ").join(wording.capitalised(say(kind.message)) for kind in kinds)
    steps = "\n\n".join(f"{say(kind.next_step)}{say('.')}" for kind in kinds)
    texts = "\n".join(fault.described(record.topology.identity) for fault in found)
    if "::" not in check_id:  # at no check, as at the end of the run
        return Check(check_id, "failed", 0.0, meaning, steps, texts)
    return Check(check_id, "failed", 0.0, ended.title if ended else "", steps, f"{meaning}{say(': ')}{texts}")


def explanations(accused: Iterable[Accused], hosts: wording.Hosts) -> list[str]:
    """What explains what checks say, and what to do about it: one sentence for all places of one kind."""
    causes = dict.fromkeys(cause for each in accused for cause in each.causes)
    named, stop = partial(wording.place, hosts=hosts), say(".")
    return [
        wording.sentences(
            f"{wording.capitalised(say(code.message))} ({'; '.join(where)}){stop}", f"{say(code.next_step)}{stop}"
        )
        for code, where in grouped(dict.fromkeys((cause.kind, cause.described(named)) for cause in causes)).items()
    ]


def message(check: Check, case: str = "") -> Message:
    whole = wording.clean(check.message).strip()
    head = whole.partition("\n\n")[0]
    # What is left when the words that only a Python programmer reads are out.
    plain = "\n".join(line for line in head.splitlines() if not line.startswith(_INTROSPECTION))
    if _EXCEPTION.match(plain):
        plain = _EXCEPTION.sub("", plain).replace("\n  ", "\n")  # pytest has indented it
    head = plain.strip() or head
    short, long = (shortened(text, LONGEST_MESSAGE, ", which evidence.jsonl has") for text in (head, whole))
    return Message(case.strip("[]"), short, "" if head == whole else long)


def return_tables(record: Record) -> list[Table]:
    """Of a machine that comes back what failed before its repair, and its other parts; none of another run."""
    before, returns = record.before, record.returns
    if before is None or returns is None:
        return []
    outcomes = {record.suite.known_as(check.id): check.outcome for check in record.checks.values()}
    messages = {before.suite.known_as(each.id): message(each).head for each in before.checks.values()}
    wrong: list[Row] = []
    for check in before.to_run_again:
        faults = (each for each in accusations(before) if before.suite.known_as(each.check) == check)
        then = [each.described(before.topology.identity) for each in faults][:MOST_MESSAGES]
        then = then or [messages.get(check) or say("it did not come to its end")]
        outcome = outcomes.get(check, "not run")
        wrong.append(row(titled(check), say("; ").join(then), f"{wording.SYMBOLS.get(outcome, '○')} {say(outcome)}"))
    nothing, replaced = say("nothing"), ", ".join(returns.replaced)
    others = [
        row(each.called, old.number if old else nothing, part.number if part else nothing)
        for old, part in matched(record)
        if is_other(old, part) and (each := part or old)
    ]
    title = say("What was wrong in {run} of {when}", run=returns.run, when=wording.moment(before.run.utc))
    said = say("--fleet-replaced names {parts}", parts=replaced or nothing)
    return [
        Table(title, "Check", ("Then", "Now"), tuple(wrong), (say(before.verdict or "died"),)),
        Table(say("Parts that are not the same as before"), "Part", ("Was", "Is"), tuple(others), (said,)),
    ]


class Group(NamedTuple):
    """Checks of one kind and what they measured. Without any check: the level requires some that did not run."""

    title: str
    checks: dict[str, Check | None]  # by id; None for one that began and never ended
    findings: tuple[Finding, ...]

    @property
    def outcomes(self) -> list[str]:
        return [check.outcome if check else "unfinished" for check in self.checks.values()]


# The gravest first.
GRAVITY = ("failed", "unfinished", "skipped", "passed", "not applicable")


def check_lines(group: Group, blamed: Collection[str]) -> list[Row]:
    """The checks of a group with all of their cases, each with how it ended, which has the gravest state, and how long
    it took; in `details` the name. `blamed`: ids of those that count as failed."""
    lines = []
    for name, ids in grouped((check_id.partition("[")[0], check_id) for check_id in group.checks).items():
        ended = [check for check_id in ids if (check := group.checks[check_id])]
        outcomes: Counter[str] = Counter("failed" if check.id in blamed else check.outcome for check in ended)
        outcomes["unfinished"] += len(ids) - len(ended)
        states = [state for state in GRAVITY if outcomes[state]]
        result = say(", ").join(f"{outcomes[state]} {say(state)}" for state in states) if len(ids) > 1 else states[0]
        known = shipped().checks.get(levels.check_name(name))
        title = next((check.title for check in ended if check.title), known.title if known else name)
        seconds = sum(check.seconds for check in ended)
        took = Cell(wording.duration(seconds) if seconds > 0.1 else "")
        lines.append(Row(say(title), (Cell(result, states[0]), took), name))
    return lines


def group_title(check_id: str) -> str:
    """The heading under which a check stands, by its node id: for one that the suite had before, the first of its file;
    for a file that is not of the suite, its name."""
    name = levels.check_name(check_id)
    checks = shipped().checks
    file = name.partition("::")[0]
    if known := checks.get(name) or next((each for key, each in checks.items() if key.startswith(f"{file}::")), None):
        return known.chapter
    stem = PurePosixPath(wording.clean(name).partition("::")[0]).stem
    return wording.capitalised(stem.removeprefix("test_").replace("_", " ").strip() or stem)


def groups(record: Record) -> list[Group]:
    """The groups of a run that have checks or should have some: those of the suite in its order, then the others."""
    checks: dict[str, dict[str, Check | None]] = {title: {} for title in shipped().chapters}
    findings = grouped((group_title(finding.check), finding) for finding in distinct(record.findings))
    left_out = {group_title(each.id) for each in record.checks.values() if not each.asked}
    for check_id in dict.fromkeys((*record.started, *record.checks)):
        if (check := record.checks.get(check_id)) is None or check.asked:
            checks.setdefault(group_title(check_id), {})[check_id] = check
    real = record.run.level in levels.LEVELS and not record.run.rehearsal
    wanted = {group_title(name) for name in record.required} - left_out if real else set()
    return [
        Group(title, checks.get(title, {}), tuple(findings.get(title, ())))
        for title in dict.fromkeys((*checks, *findings))
        if checks.get(title) or title in findings or title in wanted
    ]


# What a cell can say, the gravest first; what several GPUs say of a group is the gravest of it.
SYMBOLS = {
    "failed": "✗", "unclear": "?", "explained": "!", "affected": "!", "not judged": "○", "not run": "○", "ok": "✓",
    "": "",
}  # fmt: skip
HEALTH = "Health"  # the group of acceptance/test_2_health.py
# What has to be said of a state beside its word.
MEANING = {
    "failed": "failed: a failed check, or a fault beside it, names this GPU.",
    "affected": "with: it is in a bad pair with a GPU that is named more often.",
    "unclear": "unclear: something that all GPUs do together failed, and the cause is not known.",
    "explained": "explained: something that is no fault of this GPU explains it, and has to be mended first.",
}


class GridCell(NamedTuple):
    """What one group says of one GPU. `state`: of SYMBOLS; `text`: what is shown; `check`: the first that failed."""

    state: str
    text: str
    check: str = ""


class GridRow(NamedTuple):
    """One row: a GPU, or (`gpu` is None) the machine, for what concerns no single GPU."""

    gpu: Gpu | None
    cells: tuple[GridCell, ...]


def grid_rows(record: Record, groups: Sequence[Group], accused: Mapping[str, Accused]) -> list[GridRow]:
    """A row for each GPU and one for the machine, with a cell for each of `groups`."""
    gpus = record.topology.gpus
    rows = [GridRow(gpu, tuple(cell(gpu.place, each, accused, record.hosts) for each in groups)) for gpu in gpus]
    places = {gpu.place for gpu in gpus}
    return [*rows, GridRow(None, tuple(_machine_cell(group, accused, places) for group in groups))]


def cell(where: Place, group: Group, accused: Mapping[str, Accused], hosts: wording.Hosts) -> GridCell:
    """What a group says of a GPU, or of a node with all that is there."""
    found = _of_group(group, accused)
    if checks := [check for check, one in found.items() if where in one.named]:
        return _failed(checks)
    for check, one in found.items():
        if where in one.explained:
            return GridCell("explained", "explained", check)
        if where in one.beside:
            return GridCell("affected", say("with {place}", place=wording.place(one.beside[where], hosts)), check)
    if unclear := [check for check, one in found.items() if one.everybody]:
        return GridCell("unclear", "unclear", unclear[0])
    # What was measured on a device of a node was measured on the node.
    states = {
        finding.state
        for finding in group.findings
        for measured in finding.measurement.values
        for part in measured.parts
        if part == where or (where.kind == "node" and part.is_on_node and part.node == where.node)
    }
    if "not judged" in states:
        return GridCell("not judged", "not judged")
    return GridCell("ok", "ok") if states & {"met", "missed"} or "passed" in group.outcomes else GridCell("", "")


def _failed(checks: Sequence[str]) -> GridCell:
    text = say("failed") if len(checks) == 1 else say("failed {count}x", count=len(checks))
    return GridCell("failed", text, checks[0])


def _machine_cell(group: Group, accused: Mapping[str, Accused], gpus: Collection[Place]) -> GridCell:
    """Failures that name no GPU; else what is still open and not told in the row of a GPU; else that all is well."""
    if checks := [check for check, one in _of_group(group, accused).items() if not (one.named or one.is_explained)]:
        return _failed(checks)
    if not (outcomes := {*group.outcomes}):
        return GridCell("not run", "not run")
    unjudged = [at for each in group.findings if each.state == "not judged" for at in each.measurement.values]
    elsewhere = any(part not in gpus for at in unjudged for part in at.parts)
    if elsewhere or outcomes & {"skipped", "unfinished"}:
        return GridCell("not judged", "not judged")
    return GridCell("ok", "ok") if "passed" in outcomes else GridCell("", "")


def _of_group(group: Group, accused: Mapping[str, Accused]) -> dict[str, Accused]:
    checks = dict.fromkeys((*group.checks, *(finding.check for finding in group.findings)))
    # What was found at no check, as at the end of the run, is about the health of the GPUs.
    elsewhere = (check for check in accused if "::" not in check and group.title == HEALTH)
    return {check: accused[check] for check in (*checks, *elsewhere) if check in accused}
