"""The runs of a fleet: which one of each host counts, and what keeps them from being the whole fleet."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.events import BEGINNING, Event, HostFound, Judged, NodeFinished, as_written
from pytest_gpufleet.model.finding import Finding, Limit
from pytest_gpufleet.model.language import Said, say, some
from pytest_gpufleet.model.metric import GpuState, Measurement, Metric, Tolerance
from pytest_gpufleet.model.place import GpuTopology, Where, grouped, where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.accusations import NEIGHBOUR, at, causes
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.outliers import Figure, figure_of
from pytest_gpufleet.verdict.verdict import DIED, MOST_NAMES, settled

GapKind = Literal[
    "missing", "unexpected", "unusable", "rehearsal", "incomplete", "lost", "left out", "unfinished", "not here",
    "one name", "one GPU", "run otherwise",
]  # fmt: skip
NOTHING: Mapping[Any, Any] = {}
FIELDS = tuple(each.name for each in fields(Measurement))


@dataclass(frozen=True)
class HostRun:
    """The run of a host. `folder`: as it was given; `sha256`: of its evidence; `earlier`: older runs of the machine."""

    folder: str
    sha256: str
    record: Record
    earlier: tuple[Record, ...] = ()

    @property
    def host(self) -> str:
        return self.record.run.host or self.folder

    @property
    def serial(self) -> str | None:
        """Of the machine's board, by its firmware; None if the run could not read it."""
        return next((node.serial for node in self.record.run.nodes), None)

    def measured_before(self, figure: Figure) -> Iterator[Mapping[Where, float]]:
        """What else this host measured of a figure: before it was measured again, and in earlier runs."""
        before = [finding for finding in self.record.findings if finding.again]
        before += [finding for record in self.earlier for finding in record.findings]
        return (each.measurement.values for each in before if figure_of(each.measurement) == figure)

    @property
    def held_back(self) -> bool:
        """Whether something that is no fault of any GPU makes its figures low, and has to be mended first."""
        return any("performance" in cause.kind.explains for cause in causes(self.record))

    def shared(self, places: Iterable[Where]) -> bool:
        """Whether a process of somebody else used a GPU in each of these places of it, whatever its number."""
        busy = {part.index for cause in causes(self.record) if cause.name == NEIGHBOUR for part in at(cause.subjects)}
        parts = ([part for part in place.parts if part.kind in ("gpu", "node")] for place in places)
        return all(busy and any(part.kind == "node" or part.index in busy for part in each) for each in parts)

    @property
    def gpus(self) -> frozenset[str]:
        """What its GPUs are known by wherever they are."""
        return frozenset(filter(None, (gpu.lasting_id for gpu in self.record.topology.gpus)))


NodeRuns = Mapping[int, HostRun]


class Unusable(msgspec.Struct, frozen=True):
    """A folder of which nothing counts, and why. `host`: whose it says that it is, if it says so."""

    folder: str
    host: str
    why: str


class Gap(msgspec.Struct, frozen=True):
    """What keeps a fleet from being complete: the hosts, by their names, and what it is."""

    kind: GapKind
    hosts: tuple[str, ...]
    what: str


T = TypeVar("T")


class Common:
    """What the runs of many hosts have in common, which is nearly all of them but numbers: it is in memory once."""

    def __init__(self) -> None:
        self._known: dict[object, Any] = {}

    def __call__(self, value: T, *key: object) -> T:
        """The value that was known by this key first, if it is the same; by itself, without one."""
        known: T = self._known.setdefault((type(value), *key) if key else value, value)
        return known if known == value else value

    def facts(self, facts: Mapping[str, Any], *key: object) -> dict[str, Any]:
        large = {fact: self(value, fact, *key) for fact, value in facts.items() if isinstance(value, dict | list | str)}
        return {**facts, **large}

    def topology(self, found: GpuTopology) -> GpuTopology:
        gpus = tuple(replace(gpu, facts=self.facts(gpu.facts, gpu.index)) for gpu in found.gpus)
        return replace(found, gpus=gpus, links=self(found.links))

    def machine(self, found: HostFound) -> HostFound:
        return msgspec.structs.replace(found, host=self.facts(found.host))

    def event(self, line: bytes) -> Event | None:
        """As `as_written`, of a finding without samples and details; what others have in the same words is not read."""
        if b'"event": "finding"' not in line[:BEGINNING] or b'"state": ' in line or not line.isascii():
            return as_written(line)  # until 0.3 findings had a state
        try:
            found = FINDINGS.decode(line).finding
            of = found.measurement
            under, definition = self._read("conditions", of.conditions), self._read("definition", of.definition)
            limit, tolerances = self._read("limit", found.limit), self._read("tolerances", found.tolerances)
            values, states = ({where(at): each for at, each in by.items()} for by in (of.values, of.gpu_states))
        except (KeyError, TypeError, ValueError, RecursionError):
            return None
        lean = Finding(
            self(found.check), _lean(self(of.metric), values, under, definition, states), limit=limit,
            reason=found.reason, required=found.required, again=found.again, tolerances=tolerances,
        )  # fmt: skip
        return Judged(finding=lean)

    def _read(self, part: str, text: msgspec.Raw) -> Any:
        key = part, bytes(text)
        if key not in self._known:
            self._known[key] = PARTS[part].decode(text)
        return self._known[key]


class _Measured(msgspec.Struct):
    metric: str
    values: dict[str, float]
    conditions: msgspec.Raw
    definition: msgspec.Raw
    gpu_states: dict[str, GpuState] = {}


class _Found(msgspec.Struct):
    check: str
    measurement: _Measured
    limit: msgspec.Raw = msgspec.Raw(b"null")
    tolerances: msgspec.Raw = msgspec.Raw(b"[]")
    reason: str = ""
    required: bool = True
    again: str = ""


class _Judged(msgspec.Struct, tag_field="event", tag="finding"):
    """As Judged, but for what is common to many runs, which is not read yet."""

    finding: _Found


FINDINGS = codec.json_decoder(_Judged)
PARTS = {
    "conditions": codec.json_decoder(dict[str, Condition]),
    "definition": codec.json_decoder(Metric),
    "limit": codec.json_decoder(Limit | None),
    "tolerances": codec.json_decoder(tuple[Tolerance, ...]),
}


def _lean(metric: str, values: Any, under: Any, definition: Metric, states: Any) -> Measurement:
    """Without samples and details. What is in it was checked where it was read, which takes longer than all this."""
    lean, states = object.__new__(Measurement), states or NOTHING
    for name, value in zip(FIELDS, (metric, values, under, NOTHING, NOTHING, definition, states), strict=True):
        object.__setattr__(lean, name, value)
    return lean


def _without_samples(found: Finding) -> Finding:
    if (of := found.measurement).samples is NOTHING:
        return found
    return replace(found, measurement=_lean(of.metric, of.values, of.conditions, of.definition, of.gpu_states))


def read_own(path: Path, common: Common, host: str = "") -> Record:
    """Of the evidence of a run what a fleet needs, as `kept` has it. Raises what `read` does."""
    record = read(path, common.event)
    return kept(record if record.verdict else read(path), common, host)  # what one that died comes to needs all of it


def kept(record: Record, common: Common, host: str = "") -> Record:
    """What a fleet needs of a run, a fifth of its memory: no telemetry, samples and times of checks, and once what is
    `common` to many. A run that died has the verdict that it amounts to. `host`: its name in a run on many nodes."""
    record = record if record.verdict else settled(record, DIED)
    checks = [common(replace(check, seconds=0.0), check.id) for check in record.checks.values()]
    topology = common.topology(record.topology)
    return replace(
        record, run=msgspec.structs.replace(record.run, host=host or record.run.host),
        manifest=common(record.suite, "suite"), topology=topology,
        topologies=dict.fromkeys(record.topologies, topology), telemetry=[], losses=[], spans=[], _begun={},
        machines={node: common.machine(found) for node, found in record.machines.items()},
        started=[*map(common, record.started)], findings=[*map(_without_samples, record.findings)],
        checks={check.id: check for check in checks},  # by names that are common, too
        fingerprints={common(check): common(each, check) for check, each in record.fingerprints.items()},
    )  # fmt: skip


def counted(runs: Iterable[HostRun]) -> tuple[tuple[HostRun, ...], list[str], list[Gap]]:
    """The newest run of each host, by name; which others there are; and names and GPUs that two machines have."""
    hosts, notes, gaps = list[HostRun](), list[str](), list[Gap]()
    for host, found in sorted(grouped((run.host, run) for run in runs).items(), key=lambda item: natural(item[0])):
        *others, newest = sorted(found, key=lambda run: run.record.run.utc.seconds)
        hosts.append(replace(newest, earlier=tuple(run.record for run in others if run.gpus & newest.gpus)))
        if others:
            text = "{host} has {count} runs: the newest counts, {folder} of {utc} ({verdict}), and not {others}"
            older = ", ".join(f"{run.folder} ({run.record.verdict})" for run in others)
            newer = {"folder": newest.folder, "utc": newest.record.run.utc, "verdict": newest.record.verdict}
            notes.append(Said(text, host=host, count=len(found), others=older, **newer))
        if strangers := [run.folder for run in others if run.gpus and not run.gpus & newest.gpus]:
            text = "{folder} and {others} have one name and no GPU in common: are these two machines?"
            gaps.append(Gap("one name", (host,), Said(text, folder=newest.folder, others=", ".join(strangers))))
    gaps += _in_several((gpu, run.host) for run in hosts for gpu in run.gpus)
    return tuple(hosts), notes, gaps


def _in_several(owners: Iterable[tuple[str, str]]) -> list[Gap]:
    """Of GPUs, each with a host that has it."""
    several = sorted({tuple(names) for names in grouped(owners).values() if len(names) > 1})
    return [Gap("one GPU", names, Said("the same GPU is in all of these: one run is there twice")) for names in several]


def muster(hosts: Iterable[HostRun], unusable: Iterable[Unusable], expected: Collection[str] | None) -> list[Gap]:
    """Who is missing, who was not expected, and whose run does not count as a whole."""
    names = [run.host for run in hosts]
    damaged = {each.host: each for each in unusable if each.host}
    known = {host: expected_as(host, expected) for host in (*names, *damaged)} if expected is not None else {}
    there = {known.get(name) for name in names}
    gaps = [Gap("unusable", (each.host or each.folder,), f"{each.folder}: {each.why}") for each in unusable]
    if expected is not None:
        for name in sorted(set(expected) - there, key=natural):
            whose = [each.folder for host, each in damaged.items() if known[host] == name]
            damage = Said("its run cannot be used: {folders}", folders=", ".join(whose))
            gaps.append(Gap("missing", (name,), damage if whose else Said("there is no run of it")))
        strangers = [name for name in names if known[name] is None]
        gaps += [Gap("unexpected", (name,), Said("it is not among the expected hosts")) for name in strangers]
    for run in hosts:
        if run.record.run.rehearsal:
            no_gpu = Said("a rehearsal on CPU ranks, which says nothing about any GPU")
            gaps.append(Gap("rehearsal", (run.host,), no_gpu))
        elif run.record.verdict == "INCOMPLETE":
            gaps.append(Gap("incomplete", (run.host,), next(iter(run.record.reasons), Said("it does not say why"))))
    return gaps


def of_nodes(record: Record, there: Collection[str]) -> Iterator[Gap]:
    """Of many nodes who is gone, took no part, or left no evidence; and GPUs that two have. `there`: who has a run."""
    for node, host in record.hosts.items():
        end = record.finished.get(node)
        if node in record.lost:
            yield Gap("lost", (host,), record.lost[node].why)
        elif node in record.left_out and not (end and rejected(end)):
            yield Gap("left out", (host,), record.left_out[node].why)
        elif end is None or end.verdict is None:
            yield Gap("unfinished", (host,), Said("its own run has no verdict"))
        elif not end.sha256 or host not in there:
            yield Gap("not here", (host,), Said("its evidence could not be brought here"))
    yield from _in_several((gpu, node.host) for node in record.run.nodes for gpu in {*node.gpus})


def rejected(end: NodeFinished | Record) -> bool:
    return end.verdict == "REJECTED" or (end.verdict == "REHEARSAL" and end.exit_status == 1)


def between(record: Record) -> Record:
    """A record without the checks of each node, which stood in those of runs on many nodes too until 0.3."""
    of_nodes = {check for check in (*record.started, *record.checks) if record.suite.contains(check)}
    twice = {check for check in of_nodes if record.of_cluster and not record.suite.between_nodes(check)}
    return replace(
        record,
        checks={name: check for name, check in record.checks.items() if name not in twice},
        started=[check for check in record.started if check not in twice],
        faults=[each for each in record.faults if each.check not in twice or each.name == "node_lost"],
    )


def of_one_host(record: Record) -> list[tuple[int, ...]]:
    """Nodes that one kernel runs, by their numbers; none of a rehearsal, which are meant to be on one machine."""
    machines = {} if record.run.rehearsal else record.machines
    by_kernel = grouped((kernel, number) for number, machine in machines.items() if (kernel := machine.get("boot_id")))
    return [tuple(numbers) for numbers in by_kernel.values() if len(numbers) > 1]


def one_host(record: Record) -> list[str]:
    """ "2 nodes are one host (vm (1), vm (2)): ..." """
    text = "{count} nodes are one host ({hosts}): its memory, PCIe, drives and network adapters are there once"
    return [
        say(text, count=len(numbers), hosts=some([record.hosts[number] for number in numbers], MOST_NAMES))
        for numbers in of_one_host(record)
    ]


def expected_as(host: str, expected: Collection[str]) -> str | None:
    """The expected name of a host: its own; else one like it up to the first dot, if one of both has a domain."""
    if host in expected:
        return host
    short = host.partition(".")[0]
    found = [name for name in expected if name.partition(".")[0] == short and ("." in name) != ("." in host)]
    return found[0] if len(found) == 1 else None


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Puts node-9 before node-10."""
    parts = enumerate(re.split("([0-9]+)", name))
    return tuple((len(part.lstrip("0")), part.lstrip("0")) if number % 2 else (0, part) for number, part in parts)
