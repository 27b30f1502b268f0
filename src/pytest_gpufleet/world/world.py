"""Ranks: as a test holds them, the pool of warm processes behind them, started afresh after a failure, and what each
knows about itself and the process groups that it has with others."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pytest_gpufleet.model.conditions import Conditions
from pytest_gpufleet.model.events import LossCurve, Losses, WorldStarted
from pytest_gpufleet.model.fault import Fault, expect_none
from pytest_gpufleet.model.metric import Size, conditions, number
from pytest_gpufleet.model.place import Gpu, Place, Where, grouped
from pytest_gpufleet.world import call as calls
from pytest_gpufleet.world.call import Call, Engine, Members, Outcome, RankSpec
from pytest_gpufleet.world.engines.rank_files import Progress
from pytest_gpufleet.world.failure import MAX_FAILED_STARTS, Answers, RankFailure, RankReport, attempt, diagnose

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__tracebackhide__ = True  # of no frame of this module is anything shown to authors of tests
KILL_SECONDS = 10.0
# Starting is no part of a test's deadline, and a short --fleet-timeout is not meant for it.
MIN_START_SECONDS = 60.0
SECONDS_A_RANK = 0.1  # for all to meet at one store
# After the first failure the other ranks get this long to tell their own story before they are killed.
GRACE_SECONDS = 0.4
WONDER_SECONDS = 30.0  # until it is said who has not answered; then whenever the time has doubled
TURN_SECONDS = 0.5  # between two looks at whether another thread stops the world, and how long a call has taken


@dataclass(eq=False)
class Pool:
    """Warm rank processes, and what is shared by everything that runs on them: waiting, deadlines and diagnosis.

    `timeout` is the default deadline of a call in seconds, `foreign_test()` the running test if it is none of the
    suite; `on_event` hears of every start, and of losses that ranks give, `on_wait` of a call that takes long."""

    engine: Engine
    specs: Sequence[RankSpec]
    timeout: float
    foreign_test: Callable[[], str] = lambda: ""
    on_event: Callable[[WorldStarted | Losses], None] = lambda event: None
    on_wait: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    started: bool = False
    used_by: str = ""  # the last test that was none of the suite and has used these ranks
    _ready: bool = False  # they were waited for, too
    _test: int = 0
    _turn: threading.RLock = field(default_factory=threading.RLock)  # of the thread whose call is at work
    _at_work: bool = False
    _stopping: bool = False
    _owner: int = field(default_factory=os.getpid)
    _joined: set[Members] = field(default_factory=set)  # the groups that have a process group
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(calls.START + 1))
    _starts: list[RankFailure] = field(default_factory=list)  # that failed in a row, and groups that did
    _joins: list[RankFailure] = field(default_factory=list)

    @property
    def everyone(self) -> Members:
        return tuple(range(len(self.specs)))

    def begin_test(self) -> None:
        """Another test begins: its first call finds nothing of the last one's."""
        self._test += 1

    def begin(self) -> None:
        """Start the ranks and do not wait: the first call does, and hears what is wrong with them."""
        with self._one_at_a_time(), self._killing_on_error():
            self._begin()

    def call(self, call: Call, timeout: float | None = None) -> dict[int, Any]:
        """The result of each rank. Calls of threads follow one another; the deadline of each begins with it."""
        with self._one_at_a_time():
            joins = self._joins if timeout is None else []  # with a time of its own it tries something out
            with attempt(joins) if call.with_group else contextlib.nullcontext():
                self._start()
                if call.with_group and (missing := tuple(each for each in call.groups if each not in self._joined)):
                    self._join(missing, self._start_seconds if timeout is None else max(timeout, MIN_START_SECONDS))
            outcomes = self._run(call, self.timeout if timeout is None else timeout)
            for rank, outcome in sorted(outcomes.items()):
                for line in outcome.output.splitlines():  # for pytest's capture, and -s, to show it with the test
                    sys.stdout.write(f"[rank {rank}] {line}\n")
            calls.raise_again(outcomes)
            with self._killing_on_error():
                return {rank: self._result(rank, outcomes[rank], call.name) for rank in call.ranks}

    def start_on(self, specs: Sequence[RankSpec]) -> None:
        """From the next start on have these ranks, after `stop`. That others could not start says nothing of them."""
        self.specs, self._starts, self._joins = specs, [], []

    def stop(self, for_good: bool = False) -> None:
        """Kill the ranks; the next use starts fresh ones, unless one could not be killed, or it is `for_good`. The call
        of a thread that a test has left behind ends first: two threads must not use the engine."""
        self._stopping = True
        in_turn = self._turn.acquire(timeout=KILL_SECONDS)
        try:
            self._stop()
        finally:
            self._stopping = for_good
            if in_turn:
                self._turn.release()

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if os.getpid() != self._owner:
            raise RuntimeError("world.run was called in a process that a test has forked, to which no rank listens")
        with self._turn:
            if self._at_work:
                raise RuntimeError("world.run was called while another world.run of the same thread was not yet done")
            self._look_whether_stopped()
            self._at_work = True
            try:
                yield
            finally:
                self._at_work = False

    def _look_whether_stopped(self) -> None:
        if self._stopping:
            raise RuntimeError("world.run of a thread that a test has left behind: its ranks are stopped")

    def _begin(self) -> None:
        if not self.started:
            self._joined, self.used_by, self.started = set(), "", True
            self.engine.start(self.specs)

    def _start(self) -> None:
        """Unless they run already."""
        if self._ready:
            return
        began = self.clock()
        with attempt(self._starts), self._killing_on_error():
            self._begin()
            self._collect(self._of_everyone("start of the ranks", b""), self._start_seconds)
        self._ready = True
        self.on_event(WorldStarted(ranks=len(self.specs), seconds=round(self.clock() - began, 3)))

    def _join(self, groups: tuple[Members, ...], seconds: float) -> None:
        what = f"process group of {' and '.join(str(len(members)) for members in groups)} ranks"
        several = len({spec.node for spec in self.specs}) > 1
        make, more = (join_alone, (next(self._numbers),)) if several else (join, ())
        work = calls.pack_work(make, (groups, *more, self.engine.rendezvous()), {})
        self._run(self._of_everyone(what, work), seconds)
        if several:  # their members have left what they had
            gone = {rank for members in groups for rank in members}
            self._joined = {members for members in self._joined if gone.isdisjoint(members)}
        self._joined.update(groups)

    @property
    def _start_seconds(self) -> float:
        return max(self.timeout, MIN_START_SECONDS) + SECONDS_A_RANK * len(self.specs)

    def _of_everyone(self, name: str, work: bytes) -> Call:
        return Call(name, (self.everyone,), tuple(spec.node for spec in self.specs), False, work)

    def _run(self, call: Call, timeout: float) -> dict[int, Outcome]:
        self.used_by = self.foreign_test() or self.used_by
        numbered = replace(call, number=next(self._numbers), test=self._test)
        with self._killing_on_error():
            self.engine.submit(call.ranks, calls.pack(numbered))
            return self._collect(numbered, timeout)

    def _collect(self, call: Call, timeout: float) -> dict[int, Outcome]:
        """The outcome of each rank. RankFailure if one fails or is late, RuntimeError if another thread stops all."""
        answers, missing, graceful = Answers(), {*call.ranks}, True
        began, remaining, said_after = self.clock(), timeout, WONDER_SECONDS
        until = began + timeout
        # One look after the deadline: this process may have been stopped (Ctrl-Z), and not the ranks.
        while missing and remaining > 0:
            self._look_whether_stopped()
            remaining = until - self.clock()
            for event in self.engine.wait(min(remaining, TURN_SECONDS)):
                answers.add(event, call.number)
            missing -= answers.ranks
            if missing and self.clock() - began >= said_after:
                who = calls.ranks_text(missing) if len(missing) < len(call.ranks) else "all ranks"
                self.on_wait(f"{call.name}: waiting for {who} for {said_after:g} s (deadline: {timeout:g} s)")
                said_after *= 2
            if answers.failed and graceful:
                graceful = False
                until = min(until, self.clock() + GRACE_SECONDS)
        for rank, outcome in sorted(answers.outcomes.items()):
            for curve in outcome.losses:
                self.on_event(Losses(curve=msgspec.structs.replace(curve, place=curve.place or self.specs[rank].place)))
        if answers.failed or missing:
            raise diagnose(self.engine, self.specs, call, answers, timeout)
        return answers.outcomes

    def _result(self, rank: int, outcome: Outcome, what: str) -> Any:
        try:
            return calls.unpack(outcome.result)
        except (Exception, SystemExit) as error:  # unpickling runs the object's own code, which may raise anything
            why = f"what cannot be unpickled here: {type(error).__name__}: {error}"
            report = RankReport(rank, self.specs[rank].name, "returned", why, output=outcome.output, to_blame=True)
            raise RankFailure("exception", what, (report,)) from None

    @contextlib.contextmanager
    def _killing_on_error(self) -> Iterator[None]:
        """Whatever ends a call early (a failure, Ctrl-C, pytest-timeout) ends the ranks: their state is unknown."""
        try:
            yield
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if not self.started or os.getpid() != self._owner:
            return
        for rank, state in self.engine.kill(KILL_SECONDS).items():
            why = f"and could not be killed within {KILL_SECONDS:g} s {state}".rstrip()
            then = "reset this GPU or restart the machine"
            report = RankReport(rank, self.specs[rank].name, "running", f"{why}: {then}", to_blame=True)
            never_again = RankFailure("hang", "nothing is started on this GPU again", (report,))
            self._starts[:] = [never_again] * MAX_FAILED_STARTS
        self.started = self._ready = False


class NoProcessGroup(AttributeError):
    """A world was used as the process group that it is on ranks only."""


class World:
    """Some or all ranks of a pool, with or without a process group. Processes start at the first `run`."""

    def __init__(self, pool: Pool, with_group: bool, ranks: Members | None = None) -> None:
        self._pool, self._with_group, self._chosen = pool, with_group, ranks

    @property
    def _ranks(self) -> Members:
        return self._pool.everyone if self._chosen is None else self._chosen

    @property
    def _specs(self) -> list[RankSpec]:
        return [self._pool.specs[rank] for rank in self._ranks]

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPU of each rank; empty in a rehearsal."""
        return tuple(spec.gpu for spec in self._specs if spec.gpu is not None)

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each rank's own figures: its GPU, in a rehearsal "cpu3"."""
        return tuple(spec.place for spec in self._specs)

    @property
    def hosts(self) -> dict[int, str]:
        """The names of the nodes, by their numbers, where there are several."""
        return {spec.node: spec.host or f"node {spec.node}" for spec in self._specs}

    def name_of(self, index: int) -> str:
        """ "rank 3 of 8, GPU 3 NVIDIA H200, serial ..." """
        return self._specs[index].name

    @property
    def nodes(self) -> tuple[World, ...]:
        """The ranks of each node, as a world of its own."""
        by_node = grouped((place.node, index) for index, place in enumerate(self.places))
        return tuple(self.subset(by_node[node]) for node in sorted(by_node))

    def run(self, probe: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Run `probe(rank, *args, **kwargs)` on every rank; the results by rank.

        Code and values are sent by cloudpickle, also closures. A tensor on a GPU comes back as its copy on the CPU; a
        Size among the arguments arrives as the one for these ranks. `timeout`: seconds, `--fleet-timeout` by default.
        Raises RankFailure if a rank raises, dies or does not answer in time, TypeError if something cannot be sent,
        ValueError if `timeout` is not above 0. pytest.skip on a rank skips the test."""
        return self.each([self], probe, *args, timeout=timeout, **kwargs)[0]

    def each(
        self, groups: Sequence[Sequence[int] | World], function: Callable[..., Any], /, *args: Any,
        timeout: float | None = None, **kwargs: Any,
    ) -> list[list[Any]]:  # fmt: skip
        """As `run`, on several groups of ranks at the same time; for each group its results by rank.

        A group is the ranks of a `subset`, or such a subset itself: `world.each([[0, 1], [2, 3]], probe)`,
        `world.each(world.nodes, probe)`. In each ranks count from 0 and have a process group of their own. A rank that
        is in none does nothing; ValueError if one is in two."""
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
        members = tuple((group if isinstance(group, World) else self.subset(group))._ranks for group in groups)
        ranks = [rank for group in members for rank in group]
        if not {*ranks} <= {*self._ranks}:
            raise ValueError(f"ranks {sorted({*ranks} - {*self._ranks})} are not of this world")
        if len(set(ranks)) < len(ranks):
            shown = " and ".join(str(list(group._ranks if isinstance(group, World) else group)) for group in groups)
            raise ValueError(f"groups that run at the same time share no rank, as {shown} do")
        sized = [value.on(self) if isinstance(value, Size) else value for value in (*args, *kwargs.values())]
        named = dict(zip(kwargs, sized[len(args) :], strict=True))
        work = calls.pack_work(function, tuple(sized[: len(args)]), named)
        nodes = tuple(self._pool.specs[rank].node for rank in ranks)
        results = self._pool.call(Call(calls.describe(function), members, nodes, self._with_group, work), timeout)
        return [[results[rank] for rank in group] for group in members]

    @contextlib.contextmanager
    def restarted(self, environments: Sequence[Mapping[str, str]]) -> Iterator[None]:
        """Within this block ranks are others, started afresh, each with these variables besides all that it finds, for
        what libraries read but once. The next call after it starts them as they were."""
        pool, more = self._pool, dict(zip(self._ranks, environments, strict=True))
        usual, joins = pool.specs, pool._joins
        pool.stop()
        pool.specs = [replace(spec, environment=more.get(spec.index, {})) for spec in usual]
        pool._joins = []  # what keeps these from meeting each other says nothing of the usual ones
        try:
            yield
        finally:
            pool.stop()
            pool.specs, pool._joins = usual, joins

    def faultless(self, probe: Callable[..., str], *args: Any, code: str, **kwargs: Any) -> None:
        """Run a probe that returns what is wrong on its rank, or "". Raises Faults of this `code`; else as `run`."""
        expect_none(self.faults(code, self.run(probe, *args, **kwargs)))

    def faults(self, code: str, texts: Sequence[str]) -> list[Fault]:
        """A fault for each rank whose text says what is wrong; "" if nothing is."""
        return [Fault(code, (place,), what) for place, what in zip(self.places, texts, strict=True) if what]

    def subset(self, ranks: Sequence[int]) -> World:
        """Fewer ranks, in ascending order, counted from 0, with a group of their own. ValueError for one not here."""
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ValueError(f"ranks {list(ranks)} are not a subset of the {self.size} ranks here")
        return World(self._pool, self._with_group, tuple(self._ranks[rank] for rank in chosen))

    def __getattr__(self, name: str) -> NoReturn:
        """What torch.distributed asks a process group for, if a test gives it this one."""
        from torch.distributed import ProcessGroup

        if hasattr(ProcessGroup, name) and not name.startswith("__"):
            raise NoProcessGroup(
                f"nccl_group.{name}: nccl_group is a process group only in the body of a test marked "
                "@pytest.mark.spmd; without the marker call nccl_group.run(function), where rank.group is one"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("world and nccl_group stay in the controller; on a rank, use its argument `rank`")


@dataclass
class Rank:
    """One process of a world, seen from inside.

    `index` and `size` count within the world, subset or group that runs the function, `local_size` the ranks of this
    machine (`node`) that run it, in whatever group: they share its cores. `device` is already the current one of torch,
    `gpu` None in a rehearsal. `kept`: what functions leave here for the next call of the same test, by name."""

    index: int
    size: int
    node: int
    local_size: int
    device: torch.device
    gpu: Gpu | None
    kept: dict[str, Any] = field(repr=False)
    _groups: dict[Members, ProcessGroup] = field(repr=False)
    _members: Members | None = field(repr=False)  # of the group, if it has one
    _progress: Progress = field(repr=False)
    _losses: list[LossCurve] = field(default_factory=list, repr=False)
    _phase: str = field(default="", repr=False)

    @property
    def group(self) -> ProcessGroup:
        """The process group of this world, subset or group: NCCL on GPUs, Gloo on CPUs."""
        if self._members is None:
            raise RuntimeError("this rank has no process group: use the fixture nccl_group instead of world")
        return self._groups[self._members]

    def record_losses(self, training: Conditions, by_step: Mapping[int, float], place: Where | None = None) -> None:
        """Put the losses of a training on record, for trackers: `gpufleet export` has them. Nothing is judged by them.

        `training`: what was trained and how, like {"model": "resnet50", "ranks": 1}. `by_step`: the loss by steps done,
        if it is finite. `place`: this rank's own GPU, or WORLD where all train one model, which one of them records."""
        losses = {int(step): number(loss, "a loss") for step, loss in by_step.items()}
        finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
        about = conditions(training, "what was trained")
        self._losses.append(LossCurve(about, tuple(finite), tuple(finite.values()), place))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank is doing, for the report of a hang or crash. Phases nest; costs about a microsecond. An
        exception leaves the phase as it is, so that the report shows where it was raised."""
        outer, self._phase = self._phase, name
        self._progress.phase(name)
        yield
        self._phase = outer
        self._progress.phase(outer)


# The deadline of a call is the controller's; the process group's own must never fire before it.
TIMEOUT = timedelta(days=7)
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_stores: list[Any] = []  # where the ranks of all nodes meet, once they have


def alone(rank: Rank, init_method: str) -> Rank:
    """This rank with a process group of those that run the function, who meet by `init_method` and do nothing else."""
    everyone = tuple(range(rank.size))
    join(rank, [everyone], init_method)
    return replace(rank, _members=everyone)


def join(rank: Rank, groups: Sequence[Members], init_method: str) -> None:
    """Make the process group of each of `groups`. Every rank of the world calls it, in the same order of groups."""
    import torch.distributed as dist

    if not dist.is_initialized():
        with rank.phase(f"process group: {BACKENDS[rank.device.type]}"):
            _begin(rank, init_method=init_method, rank=rank.index, world_size=rank.size)
    everyone = tuple(range(rank.size))
    for members in groups:
        with rank.phase(f"process group of ranks {list(members)}"):
            group = dist.group.WORLD if members == everyone else dist.new_group(list(members), timeout=TIMEOUT)
            if rank.index in members:
                assert isinstance(group, dist.ProcessGroup)
                _connect(rank, members, group)


def join_alone(rank: Rank, groups: Sequence[Members], number: int, init_method: str) -> None:
    """Make a world of its own of each of `groups`, which have no rank in common, in the place of what its members had.
    Every rank of the whole world calls it, with another `number` each time. For ranks of several nodes.

    Only its members make a world, at the same time as others, and one that hangs keeps nobody else. By
    torch.distributed.new_group all ranks make each group, one after the other. (With use_local_synchronization members
    find each other by how many groups each has made before, which differs here.)"""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if not _stores:
        with rank.phase("meeting of all ranks"):
            _stores.append(next(rendezvous(init_method, rank.index, rank.size, timeout=TIMEOUT))[0])
    # All members of a world leave it together, also those that get no other: on two H200 (NCCL 2.28) one that went
    # alone did not come back, and torch asks that all ranks call destroy_process_group.
    leaving = {each for members in groups for each in members}
    if dist.is_initialized() and not leaving.isdisjoint({rank.index}.union(*rank._groups)):
        with rank.phase("leaving a process group"):
            dist.destroy_process_group()
        rank._groups.clear()
    for index, members in enumerate(groups):
        if rank.index in members:
            with rank.phase(f"process group of ranks {list(members)}"):
                store = PrefixStore(f"{number}/{index}", _stores[0])
                _begin(rank, store=store, rank=members.index(rank.index), world_size=len(members))
                assert isinstance(dist.group.WORLD, dist.ProcessGroup)
                _connect(rank, members, dist.group.WORLD)


def _begin(at: Rank, **members: Any) -> None:
    import torch.distributed as dist

    device = at.device if at.device.type == "cuda" else None
    dist.init_process_group(BACKENDS[at.device.type], timeout=TIMEOUT, device_id=device, **members)


def _connect(rank: Rank, members: Members, group: ProcessGroup) -> None:
    """By a first collective: here, so that no measurement pays for it."""
    import torch
    import torch.distributed as dist

    rank._groups[members] = group
    dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
