"""The processes behind a world: started once, kept warm, killed after a failure and started afresh."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_gpufleet.world import shipping
from pytest_gpufleet.world.diagnosis import Answers, diagnose, ranks_text
from pytest_gpufleet.world.engines import scratch
from pytest_gpufleet.world.engines.protocol import Death, Engine
from pytest_gpufleet.world.outcomes import RAISED_AGAIN, Outcome
from pytest_gpufleet.world.rank import RankSpec
from pytest_gpufleet.world.rank_failure import RankFailure, RankReport

# After the first failure the other ranks get this long to tell their own story before they are killed.
GRACE_SECONDS = 0.4
KILL_SECONDS = 10.0
# Starting is no part of a test's deadline, and a short --fleet-timeout is not meant for it.
MIN_START_SECONDS = 60.0
# A machine on which starting has failed so often in a row is not asked again by every test.
MAX_FAILED_STARTS = 3
TURN_SECONDS = 0.5  # between two looks at whether the world was stopped by another thread

Members = tuple[int, ...]


class _Attempts:
    """Attempts at what every test needs, each in `counted`. After MAX_FAILED_STARTS failures in a row there
    should be no further one: `check` raises the last failure at once."""

    def __init__(self) -> None:
        self._failed = 0
        self._hopeless: RankFailure | None = None

    def check(self) -> None:
        __tracebackhide__ = True
        if self._hopeless is not None:
            raise self._hopeless

    def give_up(self, why: RankFailure) -> None:
        self._hopeless = why

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        except RankFailure as failure:
            self._failed += 1
            if self._failed == MAX_FAILED_STARTS:
                self._hopeless = failure
            raise
        self._failed = 0


class Pool:
    """Warm rank processes, and what is shared by everything that runs on them: waiting, deadlines and diagnosis.

    `timeout` is the default deadline of a call in seconds, `test_deadline()` the monotonic time by which the running
    test must be done, if it has one; `foreign_test()` the running test if it is none of the suite; `on_event(name,
    **content)` hears of every start and failure.
    """

    def __init__(
        self,
        engine: Engine,
        specs: Sequence[RankSpec],
        timeout: float,
        test_deadline: Callable[[], float | None] = lambda: None,
        foreign_test: Callable[[], str] = lambda: "",
        on_event: Callable[..., None] = lambda name, **content: None,
    ) -> None:
        self.specs = tuple(specs)
        self.timeout = timeout
        self.limit: int | None = None  # how many ranks the running test may use
        self._engine = engine
        self._test_deadline = test_deadline
        self._foreign_test = foreign_test
        self._test = 0
        self.used_by = ""  # the last test that was none of the suite and has used these ranks
        self._on_event = on_event
        self._scratch: scratch.Scratch | None = None
        self._turn = threading.Lock()  # of the thread whose call is at work
        self._caller = 0  # that thread
        self._stopping = threading.Event()
        self._owner = os.getpid()
        self._closed = False
        self._groups: set[Members] = set()
        self._numbers = itertools.count(1)  # of calls; 0 is the start of the ranks
        self._starts = _Attempts()
        self._joins = _Attempts()  # at a process group

    @property
    def started(self) -> bool:
        return self._scratch is not None

    @property
    def everyone(self) -> Members:
        return tuple(range(len(self.specs)))

    def begin_test(self) -> None:
        """Another test begins: it may use all ranks, and its first call finds nothing of the last one's."""
        self.limit = None
        self._test += 1

    def _start(self) -> None:
        """Start the ranks, unless they run already. RankFailure if one does not come up, or if starting is hopeless."""
        __tracebackhide__ = True
        if self.started:
            return
        self._starts.check()
        began = time.monotonic()
        scratch.sweep()
        self._scratch = scratch.make()
        path, sockets, environment = self._scratch.path, self._scratch.sockets, _environment()
        self.specs = tuple(
            replace(spec, scratch=path, sockets=sockets, environment={**environment, **_rank_variables(spec)})
            for spec in self.specs
        )
        self._groups = set()
        self.used_by = ""
        with self._starts.counted(), self._killing_on_error():
            self._engine.start(self.specs)
            self._collect(0, self.everyone, "start of the ranks", max(self.timeout, MIN_START_SECONDS))
        self._on_event("world_started", ranks=len(self.specs), seconds=round(time.monotonic() - began, 3))

    def stop(self) -> None:
        """Kill the ranks; the next use starts fresh ones, unless one could not be killed. The call of a thread that a
        test has left behind ends with them."""
        self._stopping.set()
        in_turn = self._turn.acquire(timeout=KILL_SECONDS)
        try:
            self._stop()
        finally:
            self._stopping.clear()
            if in_turn:
                self._turn.release()

    def close(self) -> None:
        """Kill the ranks, and start none again."""
        self._closed = True
        self.stop()

    def _stop(self) -> None:
        if self._scratch is None or os.getpid() != self._owner:
            return
        states = {rank: self._engine.state(rank) for rank in self.everyone}
        for rank in self._engine.kill(KILL_SECONDS):
            why = f"and could not be killed within {KILL_SECONDS:g} s {states[rank]}".rstrip()
            report = RankReport(rank, self.specs[rank].name, "running", f"{why}: reset this GPU or restart the machine")
            self._starts.give_up(RankFailure("hang", "nothing is started on this GPU again", (report,)))
            self._on_event("failure", kind="hang", what="kill", headline=report.headline, ranks=[])
        self._scratch.remove()
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
        """Run `function(rank, *args, **kwargs)` on `ranks`; the results in their order. Calls of several threads follow
        one another, and the deadline of each begins with it."""
        __tracebackhide__ = True
        with self._one_at_a_time():
            return self._call(ranks, with_group, timeout, function, args, kwargs)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        thread = threading.get_ident()
        if os.getpid() != self._owner:
            raise RuntimeError("world.run was called in a process that a test has forked, to which no rank listens")
        if self._caller == thread:
            raise RuntimeError("world.run was called while another world.run of the same thread was not yet done")
        with self._turn:
            try:
                self._caller = thread
                if self._closed:
                    raise RuntimeError(
                        "world.run was called by a thread that a test has left behind, after the last test"
                    )
                yield
            finally:
                self._caller = 0

    def _call(
        self,
        ranks: Members,
        with_group: bool,
        timeout: float | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        __tracebackhide__ = True
        if with_group:
            self._joins.check()
        self._start()
        assert self._scratch is not None
        if with_group and ranks not in self._groups:
            self._join_group(ranks)
        name = shipping.describe(function)
        try:
            parcel = shipping.pack((function, args, kwargs), self._scratch.path)
        except Exception as error:  # pickling runs the objects' own code, which may raise anything
            parts = {name: function, **{f"argument {i + 1}": arg for i, arg in enumerate(args)}}
            for key, value in kwargs.items():
                parts |= value if isinstance(value, dict) else {key: value}
            reasons = "; ".join(shipping.unsendable(parts)) or str(error)
            raise TypeError(f"cannot be sent to the ranks: {reasons}") from None
        with self._killing_on_error():
            outcomes = self._round(ranks, name, with_group, parcel, self._seconds_left(timeout))
        shipping.discard(parcel)
        _echo_output(outcomes)
        for kind, exception in RAISED_AGAIN.items():
            told = {rank: outcome for rank, outcome in outcomes.items() if outcome.kind == kind}
            if told:
                text = next(iter(told.values())).error_text
                where = "" if len(told) == len(ranks) else f" (on {ranks_text(told)} of {len(ranks)} only)"
                ending = exception(text + where)
                ending._use_item_location = True  # type: ignore[attr-defined]  # a skip is told at the test, not here
                raise ending
        with self._killing_on_error():
            return [self._result(rank, outcomes[rank], name) for rank in ranks]

    def _join_group(self, ranks: Members) -> None:
        __tracebackhide__ = True
        from pytest_gpufleet.world import process_group

        assert self._scratch is not None
        folder = self._scratch.path
        parcel = shipping.pack((process_group.join, (ranks, str(folder / "store")), {}), folder)
        with self._joins.counted(), self._killing_on_error():
            what = f"process group of {len(ranks)} ranks"
            self._round(self.everyone, what, False, parcel, max(self.timeout, MIN_START_SECONDS))
        self._groups.add(ranks)

    def _round(
        self, ranks: Members, name: str, with_group: bool, parcel: shipping.Parcel, timeout: float
    ) -> dict[int, Outcome]:
        __tracebackhide__ = True
        from pytest_gpufleet.world.worker.main import Call

        self.used_by = self._foreign_test() or self.used_by
        call = Call(next(self._numbers), self._test, name, ranks, with_group, parcel)
        for rank in ranks:
            self._engine.submit(rank, call)
        return self._collect(call.number, ranks, name, timeout)

    def _collect(self, number: int, ranks: Members, what: str, timeout: float) -> dict[int, Outcome]:
        """Wait until every rank has answered the call of this number. RankFailure if one fails or the deadline passes
        before."""
        __tracebackhide__ = True
        answers = Answers()
        until = time.monotonic() + timeout
        graceful = True
        remaining = timeout
        # One look after the deadline: this process may have been stopped (Ctrl-Z), and not the ranks.
        while not answers.ranks.issuperset(ranks) and remaining > 0:
            if self._stopping.is_set():
                raise RuntimeError(f"{what}: the world was stopped by another thread")
            remaining = until - time.monotonic()
            for event in self._engine.wait(min(remaining, TURN_SECONDS)):
                if isinstance(event, Death):
                    answers.deaths[event.rank] = event
                elif not isinstance(event.content, Outcome):
                    answers.deaths[event.rank] = Death(event.rank, "for its controller: it sent what is no answer")
                elif event.content.call == number:  # else it answers a call that is over
                    answers.outcomes[event.rank] = event.content
            if answers.failed and graceful:
                graceful = False
                until = min(until, time.monotonic() + GRACE_SECONDS)
        if answers.failed or not answers.ranks.issuperset(ranks):
            specs = {rank: self.specs[rank] for rank in sorted({*ranks, *answers.deaths})}
            raise diagnose(self._engine, specs, answers, what, timeout)
        return answers.outcomes

    def _seconds_left(self, timeout: float | None) -> float:
        """The deadline of a call: its own or the default, or that of the whole test if it comes first."""
        seconds = self.timeout if timeout is None else timeout
        until = self._test_deadline()
        return seconds if until is None else max(0.0, min(seconds, until - time.monotonic()))

    def _result(self, rank: int, outcome: Outcome, what: str) -> Any:
        __tracebackhide__ = True
        assert outcome.result is not None
        try:
            return shipping.unpack(outcome.result)
        except (Exception, SystemExit) as error:  # unpickling runs the object's own code, which may raise anything
            why = f"what cannot be unpickled here: {type(error).__name__}: {error}"
            report = RankReport(rank, self.specs[rank].name, "returned", why, output=outcome.output)
            raise RankFailure("exception", what, (report,)) from None
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
            self._stop()
            raise


def _environment() -> dict[str, str]:
    """What ranks find in their environment: all that the controller has, and these where it has nothing.

    CUDA_DEVICE_ORDER: CUDA counts GPUs as nvidia-smi does. *_SOCKET_IFNAME: NCCL and Gloo listen on loopback only.
    The heartbeat is torch's own deadline for a stuck NCCL watchdog; ours comes first. The buffer is the flight recorder
    of NCCL, which is read after a hang; torch before 2.8 knows it by its second name only.
    """
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(7 * 24 * 3600),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }
    return {**defaults, **os.environ}


def _rank_variables(spec: RankSpec) -> dict[str, str]:
    """The variables that torchrun sets, for code that expects them."""
    index, size = str(spec.index), str(spec.size)
    return {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def _echo_output(outcomes: dict[int, Outcome]) -> None:
    """Print what ranks printed, so that pytest's capture and -s show it with the test."""
    for rank in sorted(outcomes):
        for line in outcomes[rank].output.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
