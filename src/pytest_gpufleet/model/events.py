"""The events of the evidence, a class each. A new one is a class here, and a case of Record.add if a record keeps it.
Other versions have fewer fields or more: what is missing is left out, and what nobody here knows is not looked at."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.codec import Amount, Finite, Moment, about
from pytest_gpufleet.model.endings import NOT_ASKED, Refused
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, GivenLimits, Grade
from pytest_gpufleet.model.language import Language
from pytest_gpufleet.model.levels import Level
from pytest_gpufleet.model.metric import Measurement, Sample
from pytest_gpufleet.model.place import GpuTopology, Missing, Where, typed_facts
from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.redaction import aliased
from pytest_gpufleet.safe_files import open_regular

LONGEST_LINE = 64 << 20  # bytes
BEGINNING = 80  # bytes, in which a run writes which event it is
STARTED_BY = "GPUFLEET_STARTED_BY"  # the variable in which who calls pytest with the suite says so
ONE_OF_MANY = "GPUFLEET_ONE_OF_MANY"  # set for the own run of each of many nodes, which may lack what a site names


class Order(msgspec.Struct, frozen=True):
    """The file that was given with --fleet-order: its name, its SHA-256, and what it says, as TOML has it."""

    file: str
    sha256: str
    content: Mapping[str, Any]


def read_events(
    path: Path, quick: "Callable[[bytes], Event | None] | None" = None
) -> "Iterator[tuple[int, Event | None]]":
    """The event of each line, None if this version knows no such event, with the line's number. A last line that a
    dying machine cut short is left out. `quick`: reads lines instead of `as_written`; without telemetry. OSError if the
    file cannot be read; ValueError that names the line if one is no event, or beyond all bounds; Refused as `typed`."""
    read = quick or as_written
    with open_regular(path) as file:
        ended = False
        for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), 1):
            if quick and line.find(b'"event": "telemetry"', 0, BEGINNING) > 0:  # in a text quotes are escaped
                continue
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{path}, line {number}: it is longer than {LONGEST_LINE >> 20} MiB")
            if (event := read(line)) is None:
                try:
                    event = typed(json.loads(line))
                except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                    if line.endswith(b"\n") or ended:
                        raise ValueError(f"{path}, line {number}: not JSON") from None
                    return
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: not an event of a run ({error})") from None
            ended = isinstance(event, Verdict)
            yield number, event


def as_written(line: bytes) -> "Event | None":
    """The event of a line as `line` writes it; None of any other, of which `typed` says what is wrong with it."""
    try:
        return LINES.decode(line) if line.isascii() else None  # what is skipped is not looked at for other characters
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


class Requirement(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of --fleet-requirements: the checks and metrics that answer it, or why none does."""

    id: str
    text: str
    checks: Annotated[tuple[str, ...], about("That answer it.")] = ()
    metrics: Annotated[tuple[str, ...], about("That answer it.")] = ()
    out_of_scope: str = ""


class Requirements(msgspec.Struct, frozen=True):
    """The file that was given with --fleet-requirements: its name, its SHA-256, its title and its lines."""

    file: str
    sha256: str
    name: str
    content: tuple[Requirement, ...]


class CommandLine(msgspec.Struct, frozen=True):
    """`start`: what was typed before all arguments. `arguments`: those typed, as a shell takes them. `suite`: arguments
    that name the whole suite; "" where `start` names it. `variable`: of make, in which arguments stand."""

    start: str
    arguments: str
    suite: str = ""
    variable: str = ""

    def typed(self, *more: str, whole_suite: bool = False) -> str:
        """As it was typed, with `more` arguments; of the `whole_suite` with these alone."""
        text = " ".join(filter(None, (self.suite if whole_suite else self.arguments, *more)))
        if self.variable:
            text = f"{self.variable}={shlex.quote(text)}" if text else ""
        return " ".join(filter(None, (self.start, text)))


Count = Annotated[int, Meta(ge=0, le=10**15)]
T = TypeVar("T")
OfNodes = Annotated[list[T], Meta(min_length=1)]
VerdictWord = Literal["ACCEPTED", "REJECTED", "INCOMPLETE", "REHEARSAL"]
Secured = Literal["secret", "token", "loopback", "insecure"]
NO_NETWORK = "none"  # what --fleet-network says where nothing is asked of it
Network = Annotated[str, Meta(pattern=rf"^({NO_NETWORK}|[0-9]+([.][0-9]+)?)?$")]
Sum = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]  # SHA-256; "" of what is not there


class Plugin(msgspec.Struct, frozen=True):
    name: str
    version: str


class PythonFile(msgspec.Struct, frozen=True):
    file: str
    sha256: str


class Earlier(msgspec.Struct, frozen=True):
    """A run that this one goes on with, and the checks that failed there."""

    run: str
    utc: Moment
    failed: tuple[str, ...]


class NodeFound(msgspec.Struct, frozen=True):
    """A machine of the run: its number in places, its name, the serial number of its board, the UUIDs of its GPUs."""

    index: Count
    host: str
    serial: str | None = None
    gpus: tuple[str, ...] = ()


class FactsFound(msgspec.Struct, frozen=True):
    """The facts of a GPU that evidence must have, in their types; it may have others."""

    index: Count
    name: str | Missing | None = None
    uuid: str | Missing | None = None
    compute_capability: tuple[Count, Count] | Missing | None = None


class HostFound(msgspec.Struct, frozen=True):
    """The facts of a host, Missing where it is known why it does not tell one, and when all were read."""

    taken: str = ""
    host: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "host", typed_facts(self.host))

    def get(self, fact: str) -> Any:
        value = self.host.get(fact)
        return None if isinstance(value, Missing) else value


class LossCurve(msgspec.Struct, frozen=True):
    """The losses of a training, for trackers elsewhere; nothing is judged by them. `training`: what was trained, and
    how. `steps`: how many were done when the loss at the same position was that. `place`: the GPU, or WORLD of one
    model on all ranks; None of a rank that does not say, whose own it then is."""

    training: Mapping[str, str | int | float | bool]
    steps: tuple[Count, ...]
    losses: tuple[Finite, ...]
    place: Where | None = None

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.losses):
            raise ValueError(f"{len(self.losses)} losses of {len(self.steps)} steps")


class Part(msgspec.Struct, frozen=True):
    """A piece of work: SHA-256 of the bits that go in and out; `output` "" if the second time gave others."""

    inputs: Sum
    output: Sum


class Fingerprint(msgspec.Struct, frozen=True):
    """The parts as one place computed them, each named by its shapes and types. `kind`: the model, its compute
    capability and its number of SMs. `software`: the versions of what computes, and the variables that steer it. Only
    places with the same kind and software must have the same bits."""

    place: Where
    kind: str
    software: Mapping[str, str]
    parts: Mapping[str, Part]


Outcome = Literal["passed", "failed", "skipped", "not applicable"]
# What made a check fail: figures that missed their limits and nothing else, or anything else. Only the first can be
# undone by judging the figures against other limits.
FailedBy = Literal["", "limits", "other"]


@dataclass(frozen=True)
class Check:
    id: Annotated[str, about("pytest's node id.")]
    outcome: Outcome
    seconds: Amount
    title: str = ""  # first line of its docstring
    doc: str = ""  # the rest: why it matters, what to do
    message: Annotated[str, about("Why it failed, was skipped or does not apply.")] = ""
    run: str = ""  # the earlier run that this was carried over from
    failed_by: FailedBy = ""
    log: str = ""  # what it printed and logged

    @property
    def asked(self) -> bool:
        """Whether somebody asked for it: else no report shows it."""
        return self.message not in NOT_ASKED


SCHEMA = 2
FOLLOWS = ("state", "missed", "slower_than_peers")  # what of a finding is computed
E = TypeVar("E", bound="Event")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """`t`: when it was written. `in_run`: the earlier run that it was taken over from."""

    t: Moment = Moment("")
    in_run: str = ""

    @property
    def where(self) -> str:
        return f" (in run {self.in_run})" if self.in_run else ""


class RunHeader(Event, frozen=True, tag="run"):
    """What evidence says of its run first; summary.json has what is described here. `basis`: the lowest grade of a
    limit that a figure may be held against which needs one. `code`: SHA-256 over the files of pytest-gpufleet. Of a run
    on many nodes `interfaces` are in the order of `nodes`."""

    schema: int = SCHEMA
    host: str = ""
    nodes: tuple[NodeFound, ...] = ()
    utc: Annotated[Moment, about("When the run began, ISO 8601.")] = Moment("")
    command: str = ""
    command_line: CommandLine = CommandLine("pytest", "", "acceptance/")  # the same, to be started again
    level: Level = "standard"
    burn_in_seconds: Annotated[Amount, about("0 below level burnin.")] = 0
    deadline_seconds: Annotated[Amount, about("What --fleet-deadline gave it, if anything.")] = 0
    basis: Grade = "physical"
    network: Annotated[Network, about("What --fleet-network said: Gbit/s of each GPU, or none.")] = ""
    without: Annotated[tuple[str, ...], about("Parts of the host that were not judged by request.")] = ()
    used: Annotated[bool, about("Whether --fleet-used said that the hardware is not new.")] = False
    gpus: Annotated[str, about("As asked for: a number, all or auto.")] = ""
    gpus_present: Count = 0
    rehearsal: bool = False
    rehearsal_because: Annotated[str, about("Why there were no GPUs; only in a rehearsal.")] = ""
    ranks: Count | None = None
    profile: Annotated[str | None, about("Where the limits come from.")] = None
    profile_sha256: str | None = None
    order: Annotated[str | None, about("The file that says what was bought, if one was given.")] = None
    order_sha256: str | None = None
    environment: Annotated[Mapping[str, str], about("The variables that can change a result.")] = {}
    python: str = ""
    pytest: str = ""
    plugin: Annotated[str, about("The version of pytest-gpufleet.")] = ""
    commit: Annotated[str, about("Of the checkout that the suite ran from, -dirty where it differed.")] = ""
    code: Sum = ""
    notes: Annotated[Mapping[str, str], about("What --fleet-note gave.")] = {}
    language: Language = "en"  # of its report
    resumed: tuple[Earlier, ...] = ()
    nodes_wanted: Annotated[Count, about("What --nodes asked for, if it was a number.")] = 0
    nodes_missing: Annotated[tuple[str, ...], about("That did not come, as far as anybody knows.")] = ()
    transport: Annotated[str, about("Of a run on many nodes: what has started them.")] = ""
    secured: Annotated[Secured | None, about("How strangers are kept out of that.")] = None
    interfaces: Annotated[tuple[str, ...], about("That the ranks of each node use, in their order.")] = ()


class TopologyFound(Event, frozen=True, tag="topology"):
    """Of each node, in the order of the run's, as it describes itself, with the facts of its GPUs before the run."""

    nodes: OfNodes[GpuTopology]

    def __post_init__(self) -> None:
        for node in self.nodes:
            codec.typed([{**gpu.facts, "index": gpu.index} for gpu in node.gpus], tuple[FactsFound, ...])
            if [len(row) for row in node.links] != [count := len(node.gpus)] * len(node.gpus):
                raise ValueError(f"the links of {count} GPUs are no table of {count} rows and columns")


class ProfileGiven(Event, frozen=True, tag="profile"):
    profile: GivenLimits


class OrderGiven(Event, frozen=True, tag="order"):
    order: Order


class RequirementsGiven(Event, frozen=True, tag="requirements"):
    requirements: Requirements


class MachineRead(Event, frozen=True, tag="machine"):
    nodes: OfNodes[HostFound]


class HostFactRead(Event, frozen=True, tag="host_fact"):
    """A fact of the host that is read only when a check asks for it."""

    fact: str
    value: Any


class NodeLost(Event, frozen=True, tag="node_lost"):
    """Nothing is heard of a node any more, or ever was: it takes no part in what follows."""

    node: Count
    why: str


class NodeLeftOut(Event, frozen=True, tag="node_left_out"):
    """A node that is there takes no part in checks between nodes, since its own run rejected it, or for what it is."""

    node: Count
    why: str


class NodeFinished(Event, frozen=True, tag="node_finished"):
    """What a node's own run came to. `run`: the name of its folder there. `basis`: the lowest grade of its limits.
    `sha256`: of its evidence as it was brought here; "" if it could not be."""

    node: Count
    run: str
    verdict: VerdictWord | None
    reasons: tuple[str, ...] = ()
    basis: Grade | None = None
    exit_status: Count | None = None
    sha256: Sum = ""


class WorldStarted(Event, frozen=True, tag="world_started"):
    """`check`: the one that needed the ranks, and waited for them so many seconds."""

    check: str = ""
    ranks: Count = 0
    seconds: Amount = 0


class CheckStarted(Event, frozen=True, tag="check_started"):
    check: str


class Progress(Event, frozen=True, tag="progress"):
    """Of a check that takes long: seconds, and of how many. `doing`: what was done."""

    check: str
    done: Amount
    of: Amount
    doing: str = ""


class Telemetry(Event, frozen=True, tag="telemetry"):
    sample: Sample


class Judged(Event, frozen=True, tag="finding"):
    """Of a finding what it follows from: the measurement, limit and tolerances as they were resolved, whether it needs
    a limit, why it has none (`reason`), and why it was measured again. What follows is in evidence of 0.3 alone."""

    finding: Finding


class Judging(Event, frozen=True, tag="judging"):
    """By which version of verdict.judgement.held findings follow from what was recorded, and how many comparisons the
    whole suite of its level makes, whatever was selected (verdict.judgement.comparisons); 0: nobody counted (0.3)."""

    formula: Count = 1
    comparisons: Count = 0


class FingerprintsTaken(Event, frozen=True, tag="fingerprint"):
    check: str
    fingerprints: tuple[Fingerprint, ...]


class TransportRead(Event, frozen=True, tag="transport"):
    """What NCCL did between so many ranks by its log (machine.nccl_log.NcclLog); `nvls`: None if it does not say."""

    check: str
    ranks: Count
    nvls: bool | None
    log: Any

    def corrected(self, measurement: Measurement) -> Measurement:
        """With the condition nvls as it was, where it is of all these ranks: what measured it knows what could be."""
        under = measurement.conditions
        known = self.nvls is not None and "nvls" in under and under.get("ranks") == self.ranks
        return replace(measurement, conditions={**under, "nvls": bool(self.nvls)}) if known else measurement


class Losses(Event, frozen=True, tag="losses"):
    """Of a training of a check, if its probe gives them."""

    curve: LossCurve
    check: str = ""


class FaultFound(Event, frozen=True, tag="fault"):
    fault: Fault


class Noticed(Event, frozen=True, tag="noticed"):
    """What is shown and speaks against nothing, such as corrected errors. Its `check`: the one that ran; "" before."""

    fault: Fault


class CheckFinished(Event, frozen=True, tag="check_finished"):
    check: Check


class SuiteSeen(Event, frozen=True, tag="suite"):
    """`altered`: files of the suite that are not as they were shipped."""

    altered: tuple[str, ...] = ()
    manifest: Suite | None = None


class Session(Event, frozen=True, tag="session"):
    """What else ran in the process of the checks. Nothing is judged by it."""

    plugins: tuple[Plugin, ...] = ()
    conftests: tuple[PythonFile, ...] = ()


class Spoiled(Event, frozen=True, tag="spoiled"):
    why: str


class Deselected(Event, frozen=True, tag="deselected"):
    checks: tuple[str, ...]


class Verdict(Event, frozen=True, tag="verdict"):
    """The last event. `broken`: why the run did not come to its end. `lasted`: seconds, by a clock that nobody sets."""

    verdict: VerdictWord
    reasons: tuple[str, ...]
    broken: str = ""
    exit_status: Count | None = None
    lasted: Amount = 0


Kept = (
    RunHeader | TopologyFound | MachineRead | HostFactRead | CheckStarted | Judged | FingerprintsTaken | FaultFound
    | CheckFinished | Verdict
)  # fmt: skip


class Returns(Event, frozen=True, tag="returns"):
    """What --fleet-returns gave: the run of this machine before its repair, by the name of its folder, and its events
    that this run is held against. `replaced`: what --fleet-replaced names. `required`: the checks it is to have."""

    run: str
    replaced: tuple[str, ...]
    required: tuple[str, ...]
    kept: tuple[Kept, ...]


KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}
LINES = codec.json_decoder(reduce(or_, {*KINDS.values()} - {RunHeader}))  # `typed` looks at the schema of a run


def now() -> Moment:
    return Moment(datetime.now(timezone.utc).isoformat(timespec="milliseconds"))


def recorded(event: E) -> tuple[E, str]:
    """An event as a reader of evidence has it, with aliases if wanted, and its line. ValueError if nobody could."""
    content = aliased(codec.plain(event))
    read = codec.typed(content, type(event))
    if not event.in_run:  # as of nearly all
        del content["in_run"]
    if isinstance(event, Judged):
        content["finding"] = {name: value for name, value in content["finding"].items() if name not in FOLLOWS}
        content["finding"]["reason"] = event.finding.reason if event.finding.state == "not judged" else ""
    return read, json.dumps(content)


def typed(event: Mapping[str, Any]) -> Event | None:
    """An event as one of these classes; None if this version knows no such event. ValueError that says what is wrong
    and where; Refused if its run has another schema."""
    if not isinstance(event, Mapping) or not isinstance(event.get("event"), str):
        raise ValueError("it has no event")
    kind = KINDS.get(event["event"])
    if kind is RunHeader and (schema := event.get("schema", SCHEMA)) != SCHEMA:
        whose = f"pytest-gpufleet {event.get('plugin', '')}".strip()
        raise Refused(f"{whose} wrote its evidence in schema {schema}, and this version reads schema {SCHEMA} alone")
    return codec.typed(event, kind) if kind else None
