"""The events of the evidence, a class each. A new one is a class here, and a case of Record.add if a record keeps it.

Earlier versions had fewer fields, and later ones may have more: what is missing is left out, and what nobody here knows
is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.codec import Amount, Moment
from pytest_gpufleet.model.command_line import CommandLine
from pytest_gpufleet.model.event_values import (
    Count,
    Earlier,
    FactsFound,
    FaultTold,
    HostFound,
    LossCurve,
    NodeFound,
    OfNodes,
    Plugin,
    PythonFile,
    Sample,
    Secured,
    Sum,
    VerdictWord,
)
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.fingerprint import Fingerprint
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.language import Language
from pytest_gpufleet.model.levels import Level
from pytest_gpufleet.model.limit import GivenLimits, Grade
from pytest_gpufleet.model.order_given import Order
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.model.suite import Suite

SCHEMA = 2


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """`t`: when it was written. `in_run`: the earlier run that it was taken over from."""

    t: Moment = Moment("")
    in_run: str = ""

    @property
    def seconds(self) -> float:
        """Since the epoch; 0 if nobody says."""
        return datetime.fromisoformat(self.t).timestamp() if self.t else 0.0

    @property
    def where(self) -> str:
        return f" (in run {self.in_run})" if self.in_run else ""


class RunHeader(Event, frozen=True, tag="run"):
    """What evidence says of its run first. `gpus`: what --gpus asked for. `deadline_seconds`: 0 if there was none.
    `basis`: the lowest grade of a limit that a figure may be held against which needs one. `notes`: what --fleet-note
    gave. `commit`: of the checkout that the suite ran from, with "-dirty" where files differed from it; "" without one.

    Of a run on many nodes: `nodes_wanted` is what --nodes asked for (0: whatever is there), `transport` what carries
    messages ("local", or "ray" with its version), `secured` how the cluster keeps strangers out, and `interfaces` those
    that the ranks of each node use, in the order of `nodes`. A run on its own machine has no transport."""

    schema: int = SCHEMA
    host: str = ""
    nodes: tuple[NodeFound, ...] = ()
    utc: Moment = Moment("")
    command: str = ""
    command_line: CommandLine = CommandLine("pytest", "", "acceptance/")  # the same, to be started again
    level: Level = "standard"
    burn_in_seconds: Amount = 0
    deadline_seconds: Amount = 0
    basis: Grade = "physical"
    gpus: str = ""
    gpus_present: Count = 0
    rehearsal: bool = False
    rehearsal_because: str = ""
    ranks: Count | None = None
    profile: str | None = None
    profile_sha256: str | None = None
    order: str | None = None  # the name of its file
    order_sha256: str | None = None
    environment: Mapping[str, str] = {}
    python: str = ""
    pytest: str = ""
    plugin: str = ""  # the version of pytest-gpufleet
    commit: str = ""
    notes: Mapping[str, str] = {}
    language: Language = "en"  # of its report
    resumed: tuple[Earlier, ...] = ()
    nodes_wanted: Count = 0
    transport: str = ""
    secured: Secured | None = None
    interfaces: tuple[str, ...] = ()


class TopologyFound(Event, frozen=True, tag="topology"):
    """Of each node, in the order of the run's, as it describes itself, with all facts of its GPUs as they were when the
    run began."""

    nodes: OfNodes[GpuTopology]

    def __post_init__(self) -> None:
        for node in self.nodes:
            codec.typed([{**gpu.facts, "index": gpu.index} for gpu in node.gpus], tuple[FactsFound, ...])
            if [len(row) for row in node.links] != [len(node.gpus)] * len(node.gpus):
                count = len(node.gpus)
                raise ValueError(f"the links of {count} GPUs are no table of {count} rows and columns")


class ProfileGiven(Event, frozen=True, tag="profile"):
    profile: GivenLimits


class OrderGiven(Event, frozen=True, tag="order"):
    order: Order


class MachineRead(Event, frozen=True, tag="machine"):
    nodes: OfNodes[HostFound]


class HostFact(Event, frozen=True, tag="host_fact"):
    """A fact of the host that is read only when a check asks for it."""

    fact: str
    value: Any


class NodeLost(Event, frozen=True, tag="node_lost"):
    """Nothing is heard of a node any more, or nothing ever was: it takes no part in what follows."""

    node: Count
    why: str


class NodeLeftOut(Event, frozen=True, tag="node_left_out"):
    """A node that is there takes no part in checks between nodes, since its own run rejected it, or for what it is."""

    node: Count
    why: str


class NodeFinished(Event, frozen=True, tag="node_finished"):
    """What a node's own run came to. `run`: the name of its folder there. `verdict`: None if it has none. `basis`: the
    lowest grade of its limits. `sha256`: of its evidence as it was brought here; "" if it could not be. Made by
    node_verdicts.finished."""

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
    """Of a check that takes long: seconds, and of how many."""

    check: str
    done: Amount
    of: Amount


class Telemetry(Event, frozen=True, tag="telemetry"):
    sample: Sample


class Judged(Event, frozen=True, tag="finding"):
    finding: Finding


class FingerprintsTaken(Event, frozen=True, tag="fingerprint"):
    """What the GPUs computed of fixed data in a check."""

    check: str
    fingerprints: tuple[Fingerprint, ...]


class LossesTold(Event, frozen=True, tag="losses"):
    """A training of a check, if its probe tells its losses."""

    check: str
    curve: LossCurve


class FaultFound(Event, frozen=True, tag="fault"):
    fault: FaultTold


class Noticed(Event, frozen=True, tag="noticed"):
    """What is shown and speaks against nothing, such as errors that were corrected, in the words of a fault. Its
    `check`: the one that ran, "" if it was before the run."""

    fault: FaultTold


class CheckFinished(Event, frozen=True, tag="check_finished"):
    check: Check


class SuiteSeen(Event, frozen=True, tag="suite"):
    """`altered`: files of the suite that are not as they were shipped."""

    altered: tuple[str, ...] = ()
    manifest: Suite | None = None


class FreshWorld(Event, frozen=True, tag="fresh_world"):
    """For who reads the file: a check of the suite got new ranks after another test."""

    check: str
    after: str


class Session(Event, frozen=True, tag="session"):
    """What else ran in the process of the checks. Nothing is judged by it."""

    plugins: tuple[Plugin, ...] = ()
    conftests: tuple[PythonFile, ...] = ()


class Spoiled(Event, frozen=True, tag="spoiled"):
    why: str


class Deselected(Event, frozen=True, tag="deselected"):
    checks: tuple[str, ...]


class Verdict(Event, frozen=True, tag="verdict"):
    """The last event. `broken`: why the run did not come to its end. `lasted`: the seconds of the run, by a clock that
    nobody sets."""

    verdict: VerdictWord
    reasons: tuple[str, ...]
    broken: str = ""
    exit_status: Count | None = None
    lasted: Amount = 0


KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}


def typed(event: Mapping[str, Any]) -> Event | None:
    """An event as one of these classes; None if this version knows no such event. ValueError that says what is wrong,
    and where; Refused if its run has another schema."""
    if not isinstance(event, Mapping) or not isinstance(event.get("event"), str):
        raise ValueError("it has no event")
    kind = KINDS.get(event["event"])
    if kind is RunHeader and (schema := event.get("schema", SCHEMA)) != SCHEMA:
        whose = f"pytest-gpufleet {event.get('plugin', '')}".strip()
        raise Refused(f"{whose} wrote its evidence in schema {schema}, and this version reads schema {SCHEMA} alone")
    return codec.typed(event, kind) if kind else None
