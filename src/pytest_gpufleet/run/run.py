"""One run: what it was asked for and given, its ranks, its telemetry and its evidence."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpufleet import lazy
from pytest_gpufleet.model import levels
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.redaction import throughout, use_aliases
from pytest_gpufleet.run.interruption import Interruption
from pytest_gpufleet.run.settings import Options, naming

if TYPE_CHECKING:
    from pytest_gpufleet.machine import health, host, local_node, software
    from pytest_gpufleet.machine.health import Guard, Health
    from pytest_gpufleet.model import codec, events, place, record
    from pytest_gpufleet.model.fault import Fault
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.model.metric import Measurement, Sample
    from pytest_gpufleet.run import target
    from pytest_gpufleet.run.folder import Evidence, RunFolder
    from pytest_gpufleet.run.target import OwnMachine, Target
    from pytest_gpufleet.verdict import judgement, orders, profile
    from pytest_gpufleet.verdict.fleet import fleet_verdict
    from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
    from pytest_gpufleet.verdict.fleet.host_runs import HostRun
    from pytest_gpufleet.verdict.profile import Profile
    from pytest_gpufleet.world import call, world
    from pytest_gpufleet.world.engines import local
    from pytest_gpufleet.world.world import Pool, World
else:
    health, host, local_node, software = lazy("machine", "health", "host", "local_node", "software")
    codec, events, place, record = lazy("model", "codec", "events", "place", "record")
    (target,) = lazy("run", "target")
    judgement, orders, profile, fleet_verdict = lazy("verdict", "judgement", "orders", "profile", "fleet.fleet_verdict")
    call, world, local = lazy("world", "call", "world", "engines.local")

AT_THE_END = "the end of the run"  # where a check is named
# What training imports: every optimizer and DDP torch's compiler, which takes seconds. No import here may start CUDA,
# which could not be used in processes that are forked afterwards.
OF_TRAINING = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_saver", "torchvision",
)  # fmt: skip


class Run:
    """What the tests of one session share, each part made at its first use. `lifetime` gives it evidence and a folder,
    if it was asked for, and its verdict. `tell(text)` shows a line at once, whatever else is shown.
    `prepare_rank` is called on each rank when it starts. `until`: when its time is up, on time.monotonic()."""

    evidence: Evidence | None = None
    folder: RunFolder  # only beside evidence
    latest: Sample | None = None  # of telemetry
    of_nodes: tuple[str, ...] = ()  # the checks that each of many nodes runs by itself
    earlier: Mapping[int, tuple[str, RunFolder]] = {}  # its own runs that need not be made again, by name and folder

    def __init__(
        self, options: Options, tell: Callable[[str], None] = print, prepare_rank: Callable[[], None] | None = None,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        self.began, self.started = time.monotonic(), datetime.now(timezone.utc)
        self.options = options
        self.tell = tell
        self.prepare_rank = prepare_rank
        self.ranks = Ranks(self)
        self.interruption = Interruption(self._tell_interruption, until)
        self.carried: set[str] = set()  # checks that an earlier run has done, by the names by which they are known
        self.not_imported: list[str] = []  # test files of which nothing could be collected
        self.absence_reported = False  # that no GPU is here
        self.never_began = False  # pytest was called in a wrong way: nothing of it is left
        self.pruned: tuple[list[str], list[str]] = [], []  # what --fleet-keep has removed, and could not
        self.exited = ""  # by pytest.exit(), and why
        self.exit_status: int | None = None  # that of the verdict
        self.unwritten: list[str] = []  # files that could not be written in the end, and why
        self.beginning = ExitStack()  # until it is closed a signal waits: pytest would end without a report
        self.open_things = ExitStack()  # closed before the evidence
        self.last_things = ExitStack()  # closed after it
        if options.alias:
            use_aliases(True)
            self.last_things.callback(use_aliases, False)
        self.hear_fault: Callable[[Fault], None] = lambda fault: None  # called with each that is put on record
        self.host_before: dict[str, Any] = {}  # facts of the host, as the first session of the run has told them first
        self._locks: ExitStack | None = None
        self._sampler: local_node.Sampler | None = None
        self._lost_samples = False  # said once: the words of the trouble change

    @cached_property
    def fleet(self) -> Fleet | None:
        """What all nodes of a run on many came to, when it is over."""
        record = self.written.record
        return fleet_verdict.ended(record, self.runs_of_nodes() or self.folder.own_runs(record))[1]

    @property
    def written(self) -> Evidence:
        """Its evidence, of a run that has any."""
        assert self.evidence is not None
        return self.evidence

    @cached_property
    def own_machine(self) -> OwnMachine:
        return target.find(self.options, self.open_things)

    @property
    def target(self) -> Target:
        return self.own_machine

    @cached_property
    def health(self) -> Guard | None:
        """Watches the health of the GPUs from its first use on; None without GPUs."""
        return health.Guard(self.own_machine.node) if self.own_machine.machine.gpus else None

    @cached_property
    def profile(self) -> Profile | None:
        """The profile for this run's GPUs, None if there is none. Refused if a given one is bad or does not fit."""
        models = [gpu.name for gpu in self.target.topology.gpus]
        with naming("--fleet-profile"):
            return profile.choose(self.options.profile, models)

    @cached_property
    def order(self) -> events.Order | None:
        with naming("--fleet-order"):
            return orders.load(self.options.order) if self.options.order else None

    @property
    def burn_in_seconds(self) -> float:
        usual = 10.0 if self.target.rehearsal_ranks else levels.BURN_IN_SECONDS
        until_rare = levels.seconds_until_rare(self.options.bound or 0.0, self.target.size)
        return max(self.options.burn_in or usual, until_rare)

    def watch(self, hear: Callable[[Sample], None]) -> None:
        """Heed signals from here on. With GPUs, start telemetry: a thread of its own calls `hear(sample)`."""
        self.last_things.enter_context(self.interruption.heed())
        self.beginning.enter_context(self.interruption.deferred())
        if (guard := self.health) is None:
            return

        def take_in(sample: Sample) -> None:
            self.note_lost_samples()
            self.record(events.Telemetry(sample=sample))
            self.latest = sample
            guard.note(sample)
            hear(sample)

        self._sampler = local_node.Sampler(self.own_machine.node, self.options.interval, take_in)
        self.open_things.callback(self._sampler.stop)
        self._sampler.start()

    def note_lost_samples(self) -> None:
        """Nobody sees a GPU slow down between two tests without them."""
        if self._sampler and self._sampler.trouble and self.evidence is not None and not self._lost_samples:
            self._lost_samples = True
            self.evidence.spoil(f"telemetry lost samples: {self._sampler.trouble}")

    def check_health(self, check: str, failed: bool = False) -> list[Fault]:
        """What got worse on any GPU since the last time, put on record as of this check, which has `failed` anyway."""
        if self.evidence is None:
            return []
        faults: list[Fault] = []
        for now in self.health_now(failed):
            found = [fault.changed(check=check, watched=True) for fault in now.faults]
            for fault in found:
                self.accuse(fault)
            self.notice(shown.changed(check=check, watched=True) for shown in now.noticed)
            self.evidence.spoil(now.unseen)
            faults += found
        return faults

    def health_now(self, failed: bool) -> Iterable[Health]:
        """What got worse since the last time, of each node that takes part."""
        return [self.health.check(failed)] if self.health else []

    def judged(self, check: str, measurements: Iterable[Measurement], required: bool) -> list[Finding]:
        """Measurements of a check, held against this run's limits, and what is unsteady among them."""
        topology, rehearsal = self.target.topology, bool(self.target.rehearsal_ranks)
        before = self.evidence.record if self.evidence else record.Record()
        now = tuple(before.transport.corrected(each) if before.transport else each for each in measurements)
        judge = judgement.judged_by(before, self.profile, now, topology=topology, rehearsal=rehearsal)
        findings = [judge(each, check=check, required=required) for each in now]
        return findings + [spread for each in findings if (spread := judgement.unsteady(each, topology))]

    def lock(self) -> None:
        """Make the GPUs of this run its own, until this process is gone. Refused if somebody else has one."""
        self._locks = self._locks or self.own_machine.node.lock()

    def record(self, event: events.Event) -> None:
        if self.evidence is not None:
            with self.interruption.deferred():  # half of a line would be taken for damage
                self.evidence.add(event)

    def accuse(self, fault: Fault) -> None:
        self.record(events.FaultFound(fault=fault))
        self.hear_fault(fault)

    def notice(self, shown: Iterable[Fault]) -> None:
        """Put on record what is told beside the verdict and speaks against nothing."""
        for fault in shown:
            self.record(events.Noticed(fault=fault))

    def cluster_header(self, header: events.RunHeader) -> events.RunHeader:
        """With what evidence says first of a run on many nodes."""
        return header

    def machines(self) -> tuple[local_node.Machine, ...]:
        """Those that take part, with the facts that do not change."""
        return (self.own_machine.machine,)

    def runs_of_nodes(self) -> dict[int, HostRun]:
        """What each node has come to by itself, also those that were lost or left out since."""
        return {}

    def host_now(self, fact: str) -> Any:
        """A fact of the host now, None or Missing if it cannot be read; on record where the run has not read it."""
        value = self.hosts_now(fact)[0]
        if host.FACTS[fact].on_request and value is not None and not isinstance(value, place.Missing):
            self.record(events.HostFactRead(fact=fact, value=value))
        self.host_before.setdefault(fact, value)
        return value

    def hosts_now(self, fact: str) -> dict[int, Any]:
        """A fact of the host of each node that takes part, at this moment; None where its system does not tell."""
        return {0: self.own_machine.node.host((fact,))[fact]}

    @property
    def clocks_ahead(self) -> Mapping[int, float]:
        """By how many seconds the clock of each node is ahead of this machine's."""
        return {}

    def finish(self, cut_short: bool) -> None:
        """What is left to do when the last test has ended, before the verdict. `cut_short`: not all of them have."""
        if self._sampler is not None:
            self._sampler.stop()
        self.check_health(AT_THE_END)
        if not cut_short and not self.exited:  # else pytest takes down fixtures after this, which may still use them
            self.ranks.let_go()

    def write(self, path: Path, write: Callable[[Path], None]) -> None:
        """Write one of the files that a run leaves. If that fails, the others are written all the same."""
        try:
            write(path)
        except OSError as error:
            self.unwritten.append(f"{path} could not be written: {error.strerror}")

    def close(self) -> None:
        with self.last_things:
            self.ranks.close()
            self.open_things.close()
            if self._locks is not None:
                self._locks.close()
            if self.evidence is not None:
                self.evidence.close()
                if self.never_began:
                    shutil.rmtree(self.folder.path, ignore_errors=True)

    def _tell_interruption(self, what: str) -> None:
        where = self.options.folder if self.evidence is None else self.folder
        self.tell(f"{what}: writing the report to {where}, a few seconds ...")


def likely(options: Options) -> tuple[str, ...]:
    """Modules that ranks are likely to need, for processes to import that have nothing else to do yet."""
    return () if options.level == "quick" else OF_TRAINING


class Ranks:
    """The ranks of a run, shared by all tests. Nothing here touches a GPU before a test does, or is about to."""

    nodes = 1  # that they are on

    def __init__(self, run: Run) -> None:
        self._run = run
        self.test = ""  # the running one
        self.foreign_test = ""  # the running test, if it is none of the suite
        self.environment: dict[str, str] = {}  # what of it steers drivers and libraries, when the run began

    @cached_property
    def _local_engine(self) -> local.LocalEngine:
        return local.LocalEngine(likely=likely(self._run.options))

    def get_ready(self) -> None:
        """Begin with what takes seconds before ranks can start, while pytest still collects."""
        self._local_engine.get_ready(self._run.prepare_rank or call.nothing)

    def begin(self) -> None:
        """Start them while pytest collects what needs them. What keeps them from it the first test tells."""
        with suppress(Exception):
            self.pool.begin()

    @cached_property
    def pool(self) -> Pool:
        """Refused without a GPU, or if somebody else has one of them."""
        run = self._run
        if not run.target.size:
            raise Refused(f"there is no GPU to run on: {run.target.why}")
        run.lock()
        return world.Pool(
            self._engine(), self._specs(), run.options.timeout,
            foreign_test=lambda: self.foreign_test, on_event=self._record, on_wait=run.tell,
        )  # fmt: skip

    def _record(self, event: events.WorldStarted | events.Losses) -> None:
        """What the pool tells while a test runs; ranks choose the words of losses."""
        self._run.record(codec.typed({**throughout(codec.plain(event)), "check": self.test}, type(event)))

    def _engine(self) -> call.Engine:
        return self._local_engine

    def _specs(self) -> list[call.RankSpec]:
        """Numbered from 0 on, over all nodes."""
        nodes, specs = self._gpus_of_nodes(), list[call.RankSpec]()
        size = sum(len(gpus) for gpus, _ in nodes.values())
        for node, (gpus, name) in nodes.items():
            threads = self._threads(node, size, len(gpus))
            for index, of_rank in enumerate(gpus):
                specs.append(call.RankSpec(
                    index=len(specs), size=size, node=node, local_index=index, local_size=len(gpus),
                    device="cpu" if of_rank is None else f"cuda:{index}", gpu=of_rank, cpu_threads=threads,
                    prepare=self._run.prepare_rank or call.nothing, host=name,
                ))  # fmt: skip
        return specs

    def _gpus_of_nodes(self) -> Mapping[int, tuple[Sequence[place.Gpu | None], str]]:
        """By node the GPU of each of its ranks, None of a CPU rank, and its name where there are several."""
        target = self._run.target
        return {0: ((None,) * target.rehearsal_ranks or target.topology.gpus, "")}

    def _threads(self, node: int, size: int, here: int) -> int:
        """Of each of `here` ranks on its node: torch takes all processors for each, and each would wait for all."""
        return max(1, len(os.sched_getaffinity(0)) // size)

    @property
    def in_use(self) -> Pool | None:
        """The pool if a test has used it, else None."""
        return self.__dict__.get("pool")

    def world(self, with_group: bool) -> World:
        return world.World(self.pool, with_group)

    def begin_test(self, test: str, of_the_suite: bool, fresh: bool) -> None:
        """A test of the suite finds ranks and an environment that no other has used; `fresh`: it asks for new ranks."""
        self.test, self.foreign_test = test, "" if of_the_suite else test
        if of_the_suite:
            software.put_back(self.environment)
        if (pool := self.in_use) is None:
            return
        pool.begin_test()
        if fresh or (pool.started and pool.used_by and of_the_suite):
            pool.stop()

    def let_go(self) -> None:
        """Have them killed while the report is written: one that has used a GPU takes a quarter of a second to go."""
        if self.in_use is not None:
            threading.Thread(target=self.in_use.stop, daemon=True).start()

    def close(self) -> None:
        """Kill the ranks, wait until they are gone, and end what they are forked from."""
        if self.in_use is not None:
            self.in_use.stop(for_good=True)
        if (engine := self.__dict__.get("_local_engine")) is not None:
            engine.end()
