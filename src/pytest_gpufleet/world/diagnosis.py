"""From what is left of a failed call to the story that is told of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpufleet.world.engines.protocol import Death, Engine
from pytest_gpufleet.world.outcomes import Outcome
from pytest_gpufleet.world.rank import RankSpec
from pytest_gpufleet.world.rank_failure import FailureKind, RankFailure, RankReport, failure_type
from pytest_gpufleet.world.worker import flight_recorder, progress_board

STACK_SECONDS = 0.3
STACK_BYTES = 32 * 1024
OUTPUT_BYTES = 8 * 1024
OWN_FRAMES = re.compile(r"pytest_gpufleet/(spmd|world/progress)\.py")


@dataclass
class Answers:
    """What came back from the ranks of one call so far."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)

    @property
    def ranks(self) -> set[int]:
        return self.outcomes.keys() | self.deaths.keys()

    @property
    def failed(self) -> bool:
        return bool(self.deaths) or any(outcome.kind == "raised" for outcome in self.outcomes.values())


def diagnose(engine: Engine, specs: Mapping[int, RankSpec], answers: Answers, what: str, timeout: float) -> RankFailure:
    """The failure of a call on the ranks of `specs`. Ranks that have not answered are asked for their stacks, so this
    takes up to STACK_SECONDS; the ranks are still alive afterwards."""
    missing = sorted(specs.keys() - answers.ranks)
    stacks = _stacks(engine, {rank: specs[rank] for rank in missing})
    reports = []
    for rank, spec in specs.items():
        at = progress_board.read(spec.file("progress"))
        common: dict[str, Any] = {"rank": rank, "name": spec.name, "phase": at.phase, "phase_seconds": at.seconds}
        outcome, death = answers.outcomes.get(rank), answers.deaths.get(rank)
        if death is not None:
            common |= {"state": "died", "summary": death.how}
            # A fatal signal leaves the stack that faulthandler wrote.
            common |= {"stack": _stack(spec), "output": _tail(spec.file("output"), OUTPUT_BYTES)}
        elif outcome is None:
            common |= {"state": "running", "summary": engine.state(rank), "stack": stacks[rank]}
            common |= {"output": _tail(spec.file("output"), OUTPUT_BYTES)}
        elif outcome.kind == "raised":
            common |= {"state": "raised", "summary": _summary(outcome), "ended": outcome.ended}
            common |= {"traceback": outcome.traceback, "output": outcome.output}
        else:
            common = {"rank": rank, "name": spec.name, "state": "returned", "summary": "", "output": outcome.output}
        reports.append(RankReport(**common))
    arrivals = _arrivals(specs)
    # The death of one rank makes others raise (their connection is gone), often before it is seen: it comes first.
    # Of those that hang, first the ones that others wait for.
    order = {"died": 0, "raised": 1, "running": 2, "returned": 3}
    late = {rank for arrival in arrivals for rank in arrival.late}
    reports.sort(key=lambda report: (order[report.state], report.ended, report.rank not in late, report.rank))
    kind: FailureKind = "crash" if answers.deaths else "exception" if answers.failed else "hang"
    notes: list[str] = []
    if kind == "hang":
        what = f"{what}: no answer within {timeout:g} s from {ranks_text(missing)}"
        notes = [arrival.text for arrival in arrivals]
    failure = failure_type(answers.outcomes[reports[0].rank].error_type) if kind == "exception" else RankFailure
    return failure(kind, what, tuple(reports), tuple(notes))


def _stacks(engine: Engine, specs: Mapping[int, RankSpec]) -> dict[int, str]:
    for rank in specs:
        engine.interrupt(rank)
    deadline = time.monotonic() + STACK_SECONDS
    sizes: dict[int, int] = {}
    while specs and time.monotonic() < deadline:
        now = {rank: _size(spec.file("stack")) for rank, spec in specs.items()}
        if all(now.values()) and now == sizes:
            break  # all have written, and nobody is still writing
        sizes = now
        time.sleep(0.02)
    return {rank: _stack(spec) for rank, spec in specs.items()}


def _stack(spec: RankSpec) -> str:
    """What faulthandler wrote, without the frames that lead to the test's own code."""
    blocks = _tail(spec.file("stack"), STACK_BYTES).split("\n\n")
    kept = []
    for block in blocks:
        lines = block.splitlines()
        own = next((i for i, line in enumerate(lines) if "pytest_gpufleet/world/worker/main.py" in line), len(lines))
        if own < len(lines) and lines[own].endswith("in _wait_for_requests"):
            continue  # the thread behind engine.interrupt
        lines = [line for line in lines[:own] if not OWN_FRAMES.search(line)]
        if len(lines) > 1 or block.startswith("Fatal"):
            kept.append("\n".join(lines))
    return "\n\n".join(kept)


@dataclass(frozen=True)
class Arrival:
    """Who has come to the last collective of a call, and the ranks that have not."""

    text: str
    late: tuple[int, ...]


def _arrivals(specs: Mapping[int, RankSpec]) -> list[Arrival]:
    """As torch.distributed and as torch's flight recorder saw it, as far as they did."""
    called = {rank: progress_board.read(spec.file("progress")) for rank, spec in specs.items()}
    sources = {
        "torch.distributed": {rank: (at.collective, at.number) for rank, at in called.items()},
        "flight recorder": flight_recorder.last_collectives(
            {rank: spec.file("flight") for rank, spec in specs.items()}
        ),
    }
    return [_arrival(source, last) for source, last in sources.items() if any(number for _, number in last.values())]


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


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2" """
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))


def _summary(outcome: Outcome) -> str:
    text = outcome.error_text.strip()
    line = text.splitlines()[0] if text else ""
    return f"{outcome.error_type.removeprefix('builtins.')}: {line[:300]}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, limit: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
