"""The processes behind a world: started once, kept warm, killed after a failure and started afresh."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_gpufleet.world import shipping
from pytest_gpufleet.world.engines.protocol import Death, Engine, Message
from pytest_gpufleet.world.failures import FailureKind, RankFailure, RankReport, exit_summary, failure_type
from pytest_gpufleet.world.outcomes import RAISED_AGAIN, Outcome
from pytest_gpufleet.world.rank import PhaseFile, RankSpec

# After the first failure the other ranks get this long to tell their own story before they are killed.
GRACE_SECONDS = 0.3
STACK_SECONDS = 0.3
KILL_SECONDS = 10.0

Members = tuple[int, ...]


class Pool:
    """Warm rank processes, and what is shared by everything that runs on them: waiting, deadlines and diagnosis.

    `timeout` is the default deadline of a call in seconds; `on_event(name, **content)` hears of every start and
    failure.
    """

    def __init__(
        self,
        engine: Engine,
        specs: Sequence[RankSpec],
        environment: Callable[[], dict[str, str]],
        timeout: float,
        on_event: Callable[..., None] = lambda name, **content: None,
    ) -> None:
        self.specs = tuple(specs)
        self.timeout = timeout
        self._engine = engine
        self._environment = environment
        self._on_event = on_event
        self._scratch: Path | None = None
        self._groups: set[Members] = set()
        self._number = 0

    @property
    def started(self) -> bool:
        return self._scratch is not None

    @property
    def everyone(self) -> Members:
        return tuple(range(len(self.specs)))

    def start(self) -> None:
        """Start the ranks, unless they run already. Raises RankFailure if one does not come up."""
        if self.started:
            return
        began = time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="gpufleet-"))
        environment = self._environment()
        self.specs = tuple(
            replace(spec, scratch=self._scratch, environment={**environment, **_rank_variables(spec)})
            for spec in self.specs
        )
        self._groups = set()
        self._number = 0
        with self._killing_on_error():
            self._engine.start(self.specs)
            self._collect(self.everyone, "start of the ranks", self.timeout)
        self._on_event("world_started", ranks=len(self.specs), seconds=round(time.monotonic() - began, 3))

    def stop(self) -> None:
        """Kill the ranks; the next use starts fresh ones."""
        if self._scratch is None:
            return
        self._engine.kill(KILL_SECONDS)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = None

    def call(
        self,
        ranks: Members,
        with_group: bool,
        timeout: float | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """Run `function(rank, *args, **kwargs)` on `ranks`; the results in their order."""
        deadline = self.timeout if timeout is None else timeout
        self.start()
        assert self._scratch is not None
        if with_group and ranks not in self._groups:
            self._join_group(ranks)
        name = shipping.describe(function)
        try:
            parcel = shipping.pack((function, args, kwargs), self._scratch)
        except Exception as error:  # pickling runs the objects' own code, which may raise anything
            parts = {name: function, **{f"argument {i + 1}": arg for i, arg in enumerate(args)}, **kwargs}
            reasons = "; ".join(shipping.unsendable(parts)) or str(error)
            raise TypeError(f"cannot be sent to the ranks: {reasons}") from None
        with self._killing_on_error():
            outcomes = self._round(ranks, name, with_group, parcel, deadline)
        shipping.discard(parcel)
        _echo_output(self.specs, outcomes)
        for kind, exception in RAISED_AGAIN.items():
            told = {rank: outcome for rank, outcome in outcomes.items() if outcome.kind == kind}
            if told:
                text = next(iter(told.values())).error_text
                where = "" if len(told) == len(ranks) else f" (on {_ranks(told)} of {len(ranks)} only)"
                ending = exception(text + where)
                ending._use_item_location = True  # type: ignore[attr-defined]  # a skip is told at the test, not here
                raise ending
        return [self._result(outcomes[rank]) for rank in ranks]

    def _join_group(self, ranks: Members) -> None:
        from pytest_gpufleet.world import group

        assert self._scratch is not None
        parcel = shipping.pack((group.join, (ranks, str(self._scratch / "store")), {}), self._scratch)
        with self._killing_on_error():
            self._round(self.everyone, f"process group of {len(ranks)} ranks", False, parcel, self.timeout)
        self._groups.add(ranks)

    def _round(
        self, ranks: Members, name: str, with_group: bool, parcel: shipping.Parcel, timeout: float
    ) -> dict[int, Outcome]:
        from pytest_gpufleet.world.worker import Call

        self._number += 1
        call = Call(self._number, name, ranks, with_group, parcel)
        for rank in ranks:
            self._engine.submit(rank, call)
        return self._collect(ranks, name, timeout)

    def _collect(self, ranks: Members, what: str, timeout: float) -> dict[int, Outcome]:
        """Wait until every rank has answered, one has failed, or the deadline has passed."""
        outcomes: dict[int, Outcome] = {}
        deaths: dict[int, tuple[Death, float]] = {}
        deadline = began = time.monotonic()
        deadline += timeout
        failed_at: float | None = None
        while len(outcomes.keys() | deaths.keys()) < len(ranks):
            until = deadline if failed_at is None else min(deadline, failed_at + GRACE_SECONDS)
            if (remaining := until - time.monotonic()) <= 0:
                break
            for event in self._engine.wait(remaining):
                if isinstance(event, Message):
                    outcomes[event.rank] = event.content
                    failed = event.content.kind == "raised"
                else:
                    deaths[event.rank] = event, time.monotonic()
                    failed = True
                if failed and failed_at is None:
                    failed_at = time.monotonic()
        if len(outcomes) == len(ranks) and failed_at is None and not deaths:
            return outcomes
        missing = [rank for rank in ranks if rank not in outcomes and rank not in deaths]
        stacks = self._dump_stacks(missing)
        reports = [
            self._report(rank, outcomes.get(rank), deaths.get(rank), stacks.get(rank, ""))
            for rank in self.everyone
            if rank in ranks or rank in deaths
        ]
        kind: FailureKind = "crash" if deaths else "exception" if failed_at is not None else "hang"
        # A rank that raised may have brought down the others: who failed first stands in front, then who hangs.
        order = {"raised": 0, "died": 0, "running": 1, "returned": 2}
        reports.sort(key=lambda report: (order[report.state], report.ended or began, report.rank))
        note = f"{what}: no answer within {timeout:g} s from {_ranks(missing)}" if kind == "hang" else what
        raised = [outcomes[report.rank] for report in reports if report.state == "raised"]
        failure = failure_type(raised[0].error_type) if kind == "exception" else RankFailure
        raise failure(kind, note, tuple(reports))

    def _dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            self._engine.interrupt(rank)
        files = {rank: self.specs[rank].file("stack") for rank in ranks}
        deadline = time.monotonic() + STACK_SECONDS
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            now = {rank: file.stat().st_size for rank, file in files.items() if file.exists()}
            if len(now) == len(ranks) and all(now.values()) and now == sizes:
                break  # all have written, and nobody is still writing
            sizes = now
            time.sleep(0.02)
        return {rank: _tail(file, 16 * 1024) for rank, file in files.items()}

    def _report(self, rank: int, outcome: Outcome | None, death: tuple[Death, float] | None, stack: str) -> RankReport:
        spec = self.specs[rank]
        phase, seconds = PhaseFile.read(spec.file("phase"))
        common: dict[str, Any] = {"rank": rank, "name": spec.name, "phase": phase, "phase_seconds": seconds}
        if outcome is not None and outcome.kind == "raised":
            summary = f"{outcome.error_type.removeprefix('builtins.')}: {_first_line(outcome.error_text)}"
            return RankReport(
                **common, state="raised", summary=summary, ended=outcome.ended, traceback=outcome.traceback,
                output=outcome.output,
            )  # fmt: skip
        if death is not None:
            event, seen = death
            # A fatal signal leaves the stack that faulthandler wrote.
            stack, output = _tail(spec.file("stack"), 16 * 1024), _tail(spec.file("output"), 8 * 1024)
            summary = exit_summary(event.exitcode)
            return RankReport(**common, state="died", summary=summary, ended=seen, stack=stack, output=output)
        if outcome is not None:
            return RankReport(rank, spec.name, "returned", "", output=outcome.output)
        return RankReport(
            **common, state="running", summary="", stack=stack, output=_tail(spec.file("output"), 8 * 1024)
        )

    def _result(self, outcome: Outcome) -> Any:
        assert outcome.result is not None
        try:
            return shipping.unpack(outcome.result)
        finally:
            shipping.discard(outcome.result)

    @contextlib.contextmanager
    def _killing_on_error(self) -> Any:
        """Whatever ends a call early (a failure, Ctrl-C, pytest-timeout) ends the ranks: their state is unknown."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, RankFailure):
                self._on_event(
                    "failure", kind=error.kind, what=error.what, headline=error.headline,
                    ranks=[{"rank": r.rank, "name": r.name, "story": r.headline} for r in error.reports],
                )  # fmt: skip
            self.stop()
            raise


def _rank_variables(spec: RankSpec) -> dict[str, str]:
    """The variables that torchrun sets, for code that expects them."""
    index, size = str(spec.index), str(spec.size)
    return {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def _echo_output(specs: Sequence[RankSpec], outcomes: dict[int, Outcome]) -> None:
    """Print what ranks printed, so that pytest's capture and -s show it with the test."""
    for rank in sorted(outcomes):
        for line in outcomes[rank].output.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")


def _ranks(ranks: Any) -> str:
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 300 else line[:300] + "..."


def _tail(path: Path, limit: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
