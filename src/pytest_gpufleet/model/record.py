"""What happened in a run: the fold of its evidence."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from pytest_gpufleet.model import events
from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.events import Order, Requirements
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, GivenLimits
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import GpuTopology, joined
from pytest_gpufleet.model.suite import Suite, shipped

T = TypeVar("T")
NO_RUN, NO_JUDGING, NEVER = events.RunHeader(), events.Judging(), Moment("")
MOST_SAMPLES = 4096
# Events of which a run has one.
ONCE = (
    events.RunHeader, events.ProfileGiven, events.OrderGiven, events.RequirementsGiven, events.Returns,
    events.TopologyFound, events.MachineRead,
)  # fmt: skip


@dataclass
class Record:
    """What happened in a run, folded from its events in their order."""

    run: events.RunHeader = NO_RUN
    topology: GpuTopology = field(default_factory=GpuTopology)  # of all nodes
    topologies: dict[int, GpuTopology] = field(default_factory=dict)  # of each node, by its number
    machines: dict[int, events.HostFound] = field(default_factory=dict)
    lost: dict[int, events.NodeLost] = field(default_factory=dict)  # by the number of the node, as the next two
    left_out: dict[int, events.NodeLeftOut] = field(default_factory=dict)
    finished: dict[int, events.NodeFinished] = field(default_factory=dict)
    profile: GivenLimits | None = None  # the one that was given, if any was
    order: Order | None = None  # likewise
    requirements: Requirements | None = None  # likewise
    returns: events.Returns | None = None  # of a machine that comes back from repair
    before: "Record | None" = None  # the run that it is held against
    worlds: list[events.WorldStarted] = field(default_factory=list)
    judging: events.Judging = NO_JUDGING
    findings: list[Finding] = field(default_factory=list)
    fingerprints: dict[str, tuple[events.Fingerprint, ...]] = field(default_factory=dict)  # by check
    transport: events.TransportRead | None = None  # the last that was read
    losses: list[events.Losses] = field(default_factory=list)
    checks: dict[str, events.Check] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    deselected: list[str] = field(default_factory=list)
    manifest: Suite | None = None  # of the suite that ran
    altered: list[str] = field(default_factory=list)  # files of the suite that are not as they were shipped
    sessions: list[events.Session] = field(default_factory=list)  # also of the runs that this one goes on with
    spoiled: list[str] = field(default_factory=list)  # what keeps the run from being complete, whatever its checks say
    progress: dict[str, tuple[float, float]] = field(default_factory=dict)  # check: seconds done, and of how many
    telemetry: list[Sample] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    noticed: list[Fault] = field(default_factory=list)  # shown, and against nothing
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # check, begin, end: seconds since the epoch
    _begun: dict[str, float] = field(default_factory=dict)
    _kinds: set[object] = field(default_factory=set)  # of events that were taken in
    _samples: int = 0
    _stride: int = 1
    verdict: events.VerdictWord | None = None
    judged_again: str = ""  # by which other limits, if these are not the figures' own
    reasons: list[str] = field(default_factory=list)
    broken: str = ""  # why the run did not come to its end
    exit_status: int | None = None
    ended: Moment = NEVER  # when the verdict was written
    lasted: float = 0  # seconds; 0 if nobody knows

    @classmethod
    def of(cls, *first: events.Event) -> "Record":
        record = cls()
        for event in first:
            record.add(event)
        return record

    @property
    def word(self) -> events.VerdictWord:
        assert self.verdict is not None
        return self.verdict

    @property
    def hosts(self) -> dict[int, str]:
        return {node.index: node.host for node in self.run.nodes} or {0: self.run.host}

    def node(self, number: int) -> events.NodeFound:
        """KeyError for one that the run does not have."""
        return {node.index: node for node in self.run.nodes}[number]

    @property
    def machine(self) -> events.HostFound:
        """The only one, or the first."""
        return next(iter(self.machines.values()), events.HostFound())

    @property
    def of_cluster(self) -> bool:
        """Whether this is of many nodes, whose own runs have evidence of their own. A cluster may have one node."""
        return bool(self.run.transport)

    @property
    def suite(self) -> Suite:
        """What the suite that made this evidence consists of; this version's where the run ended before it said."""
        return self.manifest or shipped()

    @property
    def required(self) -> list[str]:
        """The names of the checks that the level requires of this run: of one on many nodes those between them."""
        return self.required_by(self.suite)

    def required_by(self, suite: Suite) -> list[str]:
        names = suite.required(self.run.level, len(self.hosts))
        if self.returns:
            return [name for name in names if name in self.returns.required]
        return [name for name in names if suite.between_nodes(name)] if self.of_cluster else names

    @property
    def failed(self) -> tuple[str, ...]:
        """The checks that failed, also those that missed a limit and did not come to their end."""
        failed = [check.id for check in self.checks.values() if check.outcome == "failed"]
        missed = [finding.check for finding in self.findings if finding.state == "missed"]
        return tuple(dict.fromkeys([*failed, *missed]))

    @property
    def to_run_again(self) -> dict[str, None]:
        """What a repair has to mend, by known names: checks that failed, or began and did not come to their end."""
        unfinished = (check for check in self.started if check not in self.checks)
        return dict.fromkeys(map(self.suite.known_as, (*self.failed, *unfinished)))

    @property
    def again(self) -> dict[str, None]:
        return self.before.to_run_again if self.before else {}

    @property
    def began(self) -> bool:
        return self.run != NO_RUN

    def add(self, event: events.Event | None) -> None:
        """Take in one event; None is one that this version does not know. ValueError says what is wrong with it."""
        if self.verdict is not None:
            raise ValueError("it stands after the verdict, which is the last event of a run")
        if isinstance(event, ONCE) and type(event) in self._kinds:  # as where two files were joined
            raise ValueError(f"it is the second event {event.__struct_config__.tag} of one run")
        self._kinds.add(type(event))
        match event:
            case events.Telemetry(sample=sample):
                self._keep(sample)
            case events.CheckStarted(check=started):
                self.started.append(started)
                self._begun[started] = event.t.seconds
            case events.CheckFinished(check=check):
                self.checks[check.id] = check
                if check.id in self._begun:
                    self.spans.append((check.id, self._begun[check.id], event.t.seconds))
            case events.Judged(finding=finding):
                self.findings.append(finding)
            case events.RunHeader() | events.Judging() | events.TransportRead():
                setattr(self, str(event.__struct_config__.tag), event)  # as the field is named
            case events.ProfileGiven() | events.OrderGiven() | events.RequirementsGiven():
                named = str(event.__struct_config__.tag)
                setattr(self, named, getattr(event, named))
            case events.Returns():
                self.returns, self.before = event, Record.of(*event.kept)
            case events.TopologyFound():
                self.topologies = self._by_node(event.nodes)
                self.topology = joined(self.topologies, self.hosts)
            case events.MachineRead():
                self.machines = self._by_node(event.nodes)
            case events.HostFactRead():
                self._learn(event)
            case events.NodeLost() | events.NodeLeftOut() | events.NodeFinished():
                self._note(event)
            case events.WorldStarted():
                self.worlds.append(event)
            case events.Progress():
                self.progress[event.check] = (event.done, event.of)
            case events.FingerprintsTaken():
                self.fingerprints[event.check] = event.fingerprints
            case events.Losses():
                self.losses.append(event)
            case events.FaultFound() | events.Noticed():
                fault = event.fault.changed(what=f"{event.fault.what}{event.where}")
                (self.noticed if isinstance(event, events.Noticed) else self.faults).append(fault)
            case events.SuiteSeen():
                self.altered += [f"{name}{event.where}" for name in event.altered]
                self.manifest = self.manifest if event.in_run else event.manifest or self.manifest
            case events.Session():
                self.sessions.append(event)
            case events.Spoiled():
                self.spoiled.append(f"{event.why}{event.where}")
            case events.Deselected():
                self.deselected += event.checks
            case events.Verdict():
                self.verdict, self.reasons, self.broken = event.verdict, list(event.reasons), event.broken
                self.exit_status, self.ended, self.lasted = event.exit_status, event.t, event.lasted

    def _by_node(self, given: list[T]) -> dict[int, T]:
        if len(given) != len(self.hosts):
            raise ValueError(f"it tells of {len(given)} nodes, and the run has {len(self.hosts)}")
        return dict(zip(self.hosts, given, strict=True))

    def _learn(self, event: events.HostFactRead) -> None:
        if len(self.machines) != 1:
            raise ValueError("nobody knows of which node it is")
        ((node, found),) = self.machines.items()
        self.machines[node] = msgspec.structs.replace(found, host={**found.host, event.fact: event.value})

    def _note(self, event: events.NodeLost | events.NodeLeftOut | events.NodeFinished) -> None:
        if event.node not in self.hosts:
            raise ValueError(f"the run has no node {event.node}")
        kept: dict[type, Any] = {events.NodeLost: self.lost, events.NodeLeftOut: self.left_out}
        kept.get(type(event), self.finished)[event.node] = event

    def _keep(self, sample: Sample) -> None:
        """Telemetry for the plots: of a run of days every second sample, every fourth, and so on. The file has all."""
        if self._samples % self._stride == 0:
            self.telemetry.append(sample)
        self._samples += 1
        if len(self.telemetry) == MOST_SAMPLES:
            del self.telemetry[1::2]
            self._stride *= 2
