"""How ranks fail, and how that is described."""

import contextlib
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.world.call import Answer, Call, Death, Engine, Members, Outcome, RankSpec, Trace, ranks_text
from pytest_gpufleet.world.engines.processes import CANNOT_ANSWER

FailureKind = Literal["exception", "crash", "hang"]
State = Literal["returned", "raised", "died", "running"]
MOST_STORIES = 32  # in a message: of the ranks of four nodes. Who is to blame comes first
CODES: dict[FailureKind, str] = {"exception": "rank_raised", "crash": "rank_died", "hang": "rank_hung"}


@dataclass(frozen=True)
class RankReport:
    """One rank's own story of a call that failed: it returned, raised, died, or was still running (`state`). `seconds`:
    how long it had run when it raised. `to_blame`: what is known of all ranks speaks against this one."""

    rank: int
    name: str
    state: State
    summary: str  # one line: the exception, the signal, or nothing
    seconds: float = 0.0
    phase: str = ""
    phase_seconds: float = 0.0
    traceback: str = ""
    stack: str = ""
    output: str = ""
    to_blame: bool = False

    @property
    def headline(self) -> str:
        phase = f' in phase "{self.phase}"' if self.phase and self.state != "returned" else ""
        since = f" for {self.phase_seconds:.1f} s" if phase and self.state == "running" else ""
        return f"{self.name}: {self.state} {self.summary}".rstrip() + phase + since

    @property
    def details(self) -> str:
        parts = (("", self.traceback), ("Python stack:\n", self.stack), ("last output:\n", self.output))
        return "\n".join(title + text.rstrip() for title, text in parts if text.strip())


class RankFailure(Exception):
    """Something went wrong on at least one rank.

    `kind` is "exception" (a rank raised), "crash" (a rank process died) or "hang" (the deadline passed). `reports`
    holds every rank's story, the rank that failed first in front; the message has the first of them, and of neighbours
    with equal ones one. All ranks have been killed; the next use of the world starts fresh ones."""

    def __init__(self, kind: FailureKind, what: str, reports: tuple[RankReport, ...], notes: tuple[str, ...] = ()):
        self.kind, self.what, self.reports, self.notes = kind, what, reports, notes
        stories = []
        for (_, details), group in groupby(reports[:MOST_STORIES], key=lambda each: (each.state, each.details)):
            stories += [report.headline for report in group]
            stories += [f"    {line}" for line in details.splitlines()]
        if others := Counter(report.state for report in reports[MOST_STORIES:]):
            states = ", ".join(f"{count} {state}" for state, count in others.items())
            stories.append(f"and {others.total()} more ranks: {states}")
        story = "\n".join(stories).removeprefix(f"{self.headline.splitlines()[0]}\n")  # which stands above
        Exception.__init__(self, "\n".join((self.headline, *notes, "", story)))

    @property
    def headline(self) -> str:
        culprit = next((report.headline for report in self.reports if report.to_blame), "")
        return "\n".join(filter(None, (culprit or self._ended, f"({self.what})" if self.what else "")))

    @property
    def _ended(self) -> str:
        """The ranks' state if none is to blame: "ranks 0, 1: running"."""
        first = self.reports[0]
        alike = [report.rank for report in self.reports if report.state == first.state]
        return f"{ranks_text(alike)}: {first.state} {first.summary}".rstrip()

    def fault(self, places: Sequence[Where]) -> Fault:
        """What is wrong, where rank i is at places[i]; nowhere if no rank is to blame."""
        culprits = [report for report in self.reports if report.to_blame]
        what = f"{culprits[0].state} {culprits[0].summary}".rstrip() if culprits else f"{self._ended} ({self.what})"
        return Fault(CODES[self.kind], tuple(places[report.rank] for report in culprits), what, str(self))

    def __str__(self) -> str:
        # Of two bases the rank's exception type might have another idea, as KeyError has.
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.kind, self.what, self.reports, self.notes)


def failure_type(original: str) -> type[RankFailure]:
    """RankFailure, and also the rank's exception type if it is loaded here, for pytest.raises and xfail(raises=...)."""
    module, _, name = original.rpartition(".")
    base = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not (isinstance(base, type) and issubclass(base, Exception)):  # it is not loaded here, or would end pytest
        return RankFailure
    try:
        # Made once by hand to see that this base accepts RankFailure's arguments; UnicodeDecodeError does not.
        combined = type(f"RankFailure[{name}]", (RankFailure, base), {})
        combined("exception", "", (RankReport(0, "", "raised", "", to_blame=True),))
    except TypeError:
        return RankFailure
    return combined


# A machine on which starting has failed so often in a row is not asked again by every test.
MAX_FAILED_STARTS = 3


@contextlib.contextmanager
def attempt(failures: list[RankFailure]) -> Iterator[None]:
    """Is not made after MAX_FAILED_STARTS failures in a row, but raises the last of them at once."""
    __tracebackhide__ = True
    if len(failures) >= MAX_FAILED_STARTS:
        raise failures[MAX_FAILED_STARTS - 1]
    try:
        yield
    except RankFailure as failure:
        failures.append(failure)
        raise
    failures.clear()


@dataclass
class Answers:
    """How a call has ended on the ranks on which it has. Ranks may have died that were not in it."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)

    @property
    def ranks(self) -> set[int]:
        return self.outcomes.keys() | self.deaths.keys()

    @property
    def failed(self) -> bool:
        return bool(self.deaths) or any(outcome.kind == "raised" for outcome in self.outcomes.values())

    def add(self, event: Answer | Death, call: int) -> None:
        """Take in what happened, if it belongs to the call of this number."""
        if isinstance(event, Death):
            self.deaths[event.rank] = event
            return
        # A pickle runs code. This one comes from a process that we have started ourselves, by a way that nobody else
        # can write to. Nothing else in this project's controller is unpickled, but the result in it.
        try:
            outcome = pickle.loads(event.parcel)
            wrong = "" if isinstance(outcome, Outcome) else "what is no answer"
        except (Exception, SystemExit) as error:
            wrong = f"a message that cannot be unpickled ({type(error).__name__})"
        if wrong:
            self.deaths[event.rank] = Death(event.rank, f"for its controller: it sent {wrong}")
        elif outcome.call == call:  # else of one that is over
            self.outcomes[event.rank] = outcome


# The death of one rank makes others raise (their connection is gone), often before it is seen: it comes first.
ORDER = {"died": 0, "raised": 1, "running": 2, "returned": 3}


def diagnose(engine: Engine, specs: Sequence[RankSpec], call: Call, answers: Answers, timeout: float) -> RankFailure:
    """The failure of a call that had `timeout` seconds. The ranks are still alive afterwards."""
    died = answers.deaths.keys()  # in the order in which it was seen
    ranks = [*died, *sorted({*call.ranks} - died)]
    # Who has come to which collective is compared after a hang, also with those that have returned.
    unseen = [rank for rank in ranks if rank not in answers.outcomes or rank in died]
    traces = engine.examine(unseen if answers.failed else ranks)
    reports = [_report(specs[rank], answers, traces) for rank in ranks]
    what, notes, waited_for = call.name, [], set[int]()
    if not answers.failed:
        missing = {*ranks} - answers.ranks
        arrivals = [arrival for members in call.groups for arrival in _arrivals(members, traces, missing)]
        late = {rank for _, missed in arrivals for rank in missed}
        waited_for = _waited_for(ranks, missing, late, traces, bool(arrivals))
        what = f"{what}: no answer within {timeout:g} s from {ranks_text(missing)}"
        notes = [text for text, _ in arrivals]
    # One that only died comes before those that raised, and what one raised that died of it before what others did; of
    # those that hang, first the ones that others wait for.
    order = {report.rank: ORDER["died" if report.rank in died else report.state] for report in reports}
    reports.sort(key=lambda each: (order[each.rank], each.state, each.seconds, each.rank not in waited_for))
    first, to_blame = reports[0], _first_to_fail(reports, answers.deaths) if answers.failed else waited_for
    stories = tuple(replace(report, to_blame=report.rank in to_blame) for report in reports)
    kind: FailureKind = "hang" if not answers.failed else "crash" if first.state == "died" else "exception"
    failure = failure_type(answers.outcomes[first.rank].error_type) if kind == "exception" else RankFailure
    return failure(kind, what, stories, tuple(notes))


def _waited_for(ranks: list[int], missing: set[int], late: set[int], traces: dict[int, Trace], met: bool) -> set[int]:
    """Of a call that hangs, the ranks that keep the others waiting: those that have not come to a collective (`late`),
    and those whose process is stopped or stuck in the kernel. Else those that have not answered where others have:
    they `met` at one collective, the more of them wait for the fewer. Nobody if that would be all."""
    found = late.union(rank for rank in missing if traces[rank].state in CANNOT_ANSWER.values())
    if not found and (not met or len(missing) <= len(ranks) / 2):
        found = missing
    return found if len(found) < len(ranks) or len(ranks) == 1 else set()


def _first_to_fail(reports: Sequence[RankReport], deaths: Mapping[int, Death]) -> set[int]:
    """The one that died, or those that raised. That others raised because of a death, died, hang or have returned is
    what came of it; and where all have died of one thing, it is none of them."""
    first = reports[0]
    if first.state == "raised":
        raised = {report.rank for report in reports if report.state == "raised"}
        return raised & deaths.keys() or raised
    alike = {deaths[report.rank].reason if report.rank in deaths else "" for report in reports}
    return set() if len(alike) == 1 < len(reports) else {first.rank}


def _report(spec: RankSpec, answers: Answers, traces: Mapping[int, Trace]) -> RankReport:
    story = partial(RankReport, spec.index, spec.name)
    outcome, death = answers.outcomes.get(spec.index), answers.deaths.get(spec.index)
    if outcome and outcome.kind == "raised":
        line = (outcome.error_text.strip().splitlines() or [""])[0][:300]
        then = f"; then it died {death.reason}" if death else ""
        return story(
            "raised", f"{outcome.error_type.removeprefix('builtins.')}: {line}{then}",
            seconds=outcome.seconds, phase=outcome.phase, traceback=outcome.traceback, output=outcome.output,
        )  # fmt: skip
    if outcome and not death:
        return story("returned", "", output=outcome.output)
    trace = traces[spec.index]
    seen = partial(story, phase=trace.phase, phase_seconds=trace.seconds, stack=trace.stack, output=trace.output)
    return seen("died", death.reason) if death else seen("running", trace.state)


def _arrivals(members: Members, traces: Mapping[int, Trace], missing: set[int]) -> Iterator[tuple[str, list[int]]]:
    """Who has come to a group's last collective, and who has not, as torch's flight recorder saw it, if some miss."""
    here = [rank for rank in members if rank in traces] if missing.intersection(members) else []
    entries: list[tuple[int, dict[str, Any]]] = []
    for rank in here:
        with contextlib.suppress(ValueError):  # there is no record, or it was cut off
            recorded = json.loads(traces[rank].recorder).get("entries", [])
            entries += [(rank, entry) for entry in recorded if not entry.get("is_p2p")]
    # All of one process group, the last that any rank used, since every group counts for itself.
    newest = max((entry for _, entry in entries), key=lambda entry: int(entry.get("time_created_ns", 0)), default={})
    last = dict.fromkeys(here, ("", 0))
    for rank, entry in entries:
        if entry.get("process_group") == newest.get("process_group"):
            last[rank] = f"{entry.get('profiling_name')}, {entry.get('state')}", int(entry.get("collective_seq_id", 0))
    if furthest := max((number for _, number in last.values()), default=0):
        names = " / ".join(sorted({name for name, number in last.values() if number == furthest}))
        late = [rank for rank, (_, number) in last.items() if number < furthest]
        text = f"flight recorder: {ranks_text(last.keys() - late)} arrived at collective number {furthest} ({names})"
        for number in sorted({last[rank][1] for rank in late}):
            at_it = [rank for rank in late if last[rank][1] == number]
            where = f"only at number {number} ({last[at_it[0]][0]})" if number else "at none"
            text += f"; {ranks_text(at_it)} did not: {where}"
        yield text, late
