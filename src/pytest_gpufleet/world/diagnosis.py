"""From what is left of a failed call to the story that is told of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.world.answers import Answers
from pytest_gpufleet.world.call import Call, Members, ranks_text
from pytest_gpufleet.world.engines.protocol import Death, Engine, Trace
from pytest_gpufleet.world.outcomes import Outcome
from pytest_gpufleet.world.rank_failure import FailureKind, RankFailure, RankReport, failure_type
from pytest_gpufleet.world.rank_spec import RankSpec
from pytest_gpufleet.world.worker import flight_recorder

# The death of one rank makes others raise (their connection is gone), often before it is seen: it comes first.
ORDER = {"died": 0, "raised": 1, "running": 2, "returned": 3}


def diagnose(engine: Engine, specs: Sequence[RankSpec], call: Call, answers: Answers, timeout: float) -> RankFailure:
    """The failure of a call that had `timeout` seconds. The ranks are still alive afterwards."""
    ranks = sorted({*call.ranks, *answers.deaths})
    missing = sorted({*ranks} - answers.ranks)
    kind: FailureKind = "crash" if answers.deaths else "exception" if answers.failed else "hang"
    # Who has come to which collective is compared after a hang, also with those that have returned.
    traces = engine.examine(ranks if kind == "hang" else [rank for rank in ranks if rank not in answers.outcomes])
    arrivals = [arrival for members in call.groups for arrival in _arrivals(members, traces, missing)]
    reports = [_report(specs[rank], answers, traces) for rank in ranks]
    # Of those that hang, first the ones that others wait for.
    late = {rank for arrival in arrivals for rank in arrival.late}
    reports.sort(key=lambda report: (ORDER[report.state], report.seconds, report.rank not in late, report.rank))
    what, notes = call.name, []
    if kind == "hang":
        what = f"{what}: no answer within {timeout:g} s from {ranks_text(missing)}"
        notes = [arrival.text for arrival in arrivals]
    failure = failure_type(answers.outcomes[reports[0].rank].error_type) if kind == "exception" else RankFailure
    return failure(kind, what, tuple(reports), tuple(notes))


def _report(spec: RankSpec, answers: Answers, traces: Mapping[int, Trace]) -> RankReport:
    if death := answers.deaths.get(spec.index):
        return _of_the_dead(spec, death, traces[spec.index])
    if outcome := answers.outcomes.get(spec.index):
        return _of_an_answer(spec, outcome)
    trace = traces[spec.index]
    return RankReport(
        spec.index, spec.name, "running", trace.state,
        phase=trace.phase, phase_seconds=trace.seconds, stack=trace.stack, output=trace.output,
    )  # fmt: skip


def _of_the_dead(spec: RankSpec, death: Death, trace: Trace) -> RankReport:
    return RankReport(
        spec.index, spec.name, "died", death.reason, phase=trace.phase, stack=trace.stack, output=trace.output
    )


def _of_an_answer(spec: RankSpec, outcome: Outcome) -> RankReport:
    if outcome.kind != "raised":
        return RankReport(spec.index, spec.name, "returned", "", output=outcome.output)
    return RankReport(
        spec.index, spec.name, "raised", _summary(outcome),
        seconds=outcome.seconds, phase=outcome.phase, traceback=outcome.traceback, output=outcome.output,
    )  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    """Who has come to the last collective of a group, and the ranks that have not."""

    text: str
    late: tuple[int, ...]


def _arrivals(members: Members, traces: Mapping[int, Trace], missing: Iterable[int]) -> Iterator[Arrival]:
    """As torch.distributed and as torch's flight recorder saw it, as far as they did; nothing of a group of which every
    rank has answered."""
    if not {*members} & {*missing}:
        return
    known = {rank: traces[rank] for rank in members if rank in traces}
    sources = {
        "torch.distributed": {rank: (trace.collective, trace.number) for rank, trace in known.items()},
        "flight recorder": flight_recorder.last_collectives({rank: trace.recorder for rank, trace in known.items()}),
    }
    for source, last in sources.items():
        if any(number for _, number in last.values()):
            yield _arrival(source, last)


def _arrival(source: str, last: Mapping[int, tuple[str, int]]) -> Arrival:
    furthest = max(number for _, number in last.values())
    names = sorted({name for name, number in last.values() if number == furthest})
    late = tuple(rank for rank, (_, number) in last.items() if number < furthest)
    text = f"{source}: {ranks_text(last.keys() - late)} arrived at collective number {furthest} ({' / '.join(names)})"
    for number in sorted({last[rank][1] for rank in late}):
        here = [rank for rank in late if last[rank][1] == number]
        where = f"only at number {number} ({last[here[0]][0]})" if number else "at none"
        text += f"; {ranks_text(here)} did not: {where}"
    return Arrival(text, late)


def _summary(outcome: Outcome) -> str:
    text = outcome.error_text.strip()
    line = text.splitlines()[0] if text else ""
    return f"{outcome.error_type.removeprefix('builtins.')}: {line[:300]}"
