"""What a run came to as one JSON document for machines.

Its JSON Schema is made from these types: `python -m pytest_gpufleet.run.summary` prints it.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import NodeFinished, NodeFound, Outcome, Secured, VerdictWord
from pytest_gpufleet.model.fault import Action, Fault
from pytest_gpufleet.model.finding import Finding, Grade, Limit, State, distinct
from pytest_gpufleet.model.levels import Level
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.folder import SUMMARY
from pytest_gpufleet.verdict import basis, requirements
from pytest_gpufleet.verdict.accusations import all_faults, causes, explaining
from pytest_gpufleet.verdict.fleet.fleet_verdict import ALONE, FailedNode, failed_nodes, over_nodes
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, NodeRuns, expected_as, of_one_host
from pytest_gpufleet.verdict.gaps import answered

SCHEMA: Literal[2] = 2

Natural = Annotated[int, Meta(ge=0)]
Some = Annotated[int, Meta(ge=1)]
Values = Mapping[str, float | None]  # null: no number
SUM = "^[0-9a-f]{64}$"


def about(description: str, names: Any = None, **rules: Any) -> Meta:
    """What the schema says of a field. `names`: a Literal of the keys of a table, of which msgspec tells nothing."""
    keys = {"propertyNames": {"enum": get_args(names)}} if names else None
    return Meta(description=description or None, extra_json_schema=keys, **rules)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What stands in a summary: all of its keys and no other, but for one that has a default."""


class OfRun(Part, frozen=True):
    host: str
    utc: Annotated[str, about("When the run began, ISO 8601.")]
    command: str
    level: Level
    burn_in_seconds: Annotated[float, about("0 below level burnin.")]
    gpus: Annotated[str, about("As asked for: a number, all or auto.")]
    rehearsal: bool
    ranks: Natural | None
    profile: Annotated[str | None, about("Where the limits come from.")]
    profile_sha256: str | None
    environment: Annotated[Mapping[str, str], about("The variables that can change a result.")]
    python: str
    pytest: str
    plugin: Annotated[str, about("The version of pytest-gpufleet.")]
    order: Annotated[str | None, about("The file that says what was bought, if one was given.")] = None
    order_sha256: str | None = None
    commit: Annotated[str, about("Of the checkout that the suite ran from, -dirty where it differed.")] = ""
    notes: Annotated[Mapping[str, str], about("What --fleet-note gave.")] = {}
    ended: Annotated[str, about("When the verdict was written, ISO 8601.")] = ""
    seconds: Annotated[float, about("How long the run took; 0 if unknown.", ge=0)] = 0
    rehearsal_because: Annotated[str, about("Why there were no GPUs; only in a rehearsal.")] = ""
    deadline_seconds: Annotated[float, about("What --fleet-deadline gave it, if anything.")] = 0
    nodes_wanted: Annotated[Natural, about("What --nodes asked for, if it was a number.")] = 0
    nodes_missing: Annotated[tuple[str, ...], about("That did not come, as far as anybody knows.")] = ()
    transport: Annotated[str, about("Of a run on many nodes: what carries its messages.")] = ""
    secured: Annotated[Secured | None, about("How strangers are kept out of that.")] = None
    interfaces: Annotated[tuple[str, ...], about("That the ranks of each node use, in their order.")] = ()
    network: Annotated[str, about("What --fleet-network said: Gbit/s of each GPU, or none.")] = ""
    without: Annotated[tuple[str, ...], about("Parts of the host that were not judged by request.")] = ()
    used: Annotated[bool, about("Whether --fleet-used said that the hardware is not new.")] = False


class OfNode(Part, frozen=True):
    index: Annotated[Natural, about("How places name this machine; the first is not named.")]
    host: str
    serial: Annotated[str | None, about("By its firmware (DMI), if the run could read it.")]
    gpus: Annotated[tuple[str, ...], about("UUIDs.")]
    verdict: Annotated[VerdictWord | None, about("Of its own run, where many nodes each have one.")] = None
    reasons: Annotated[tuple[str, ...], about("Why, most important first.")] = ()
    evidence_sha256: Annotated[str, about("Of its own run: nodes/<index>-<host>/evidence.jsonl.")] = ""
    lost: Annotated[str, about("Why nothing was heard of it any more, if it was lost.")] = ""
    same_host: Annotated[tuple[Natural, ...], about("Other nodes of this run that are the same host.")] = ()
    left_out: Annotated[str, about("Why it took no part in checks between nodes, if it took none.")] = ""


class Software(Part, frozen=True):
    driver: str | None
    cuda_driver: Annotated[str | None, about("The CUDA version that the driver supports.")]
    cuda: Annotated[str | None, about("The one that torch was built for.")]
    cudnn: str | None
    nccl: str | None
    torch: str | None


class OfGpu(Part, frozen=True):
    place: Annotated[str, about("How findings name this GPU: gpu3, on the second of many nodes node1/gpu3.")]
    index: Annotated[Natural, about("As nvidia-smi counts on its node.")]
    name: str
    uuid: str
    serial: str | None
    pci_bus_id: str
    position: Annotated[str, about("Where it sits, if known: module 3, slot 21.")] = ""


class Counts(Part, frozen=True):
    checks: Annotated[Mapping[Outcome, Some], about("", Outcome)]
    findings: Annotated[Mapping[State, Some], about("Each measurement once, also if several checks show it.", State)]


class OfBasis(Part, frozen=True):
    wanted: Annotated[Grade, about("The lowest grade of limits that --fleet-basis is content with.")]
    lowest: Annotated[Grade | None, about("Of the limits used.")]
    figures: Annotated[Mapping[Grade, Some], about("Number of measurements judged by limits of each grade.", Grade)]
    told: Annotated[str, about("The same in words.")]


class OfCheck(Part, frozen=True):
    id: Annotated[str, about("pytest's node id.")]
    title: str
    outcome: Outcome
    seconds: Annotated[float, Meta(ge=0)]
    message: Annotated[str, about("Why it failed, was skipped or does not apply.")]
    run: Annotated[str | None, about("The earlier run that it was carried over from.")]


class OfFault(Part, frozen=True):
    check: Annotated[str | None, about("The id of the check that found it, or while which it happened.")]
    code: Annotated[int, about("What kind of fault: a number that never means another.", ge=100, le=999)]
    name: Annotated[str, about("The same in one word.")]
    category: str
    action: Annotated[Action, about("What happens to the node next.")]
    subjects: Annotated[tuple[str, ...], about("The places to blame, most suspicious first.")]
    what: str
    next_step: str
    explained_by: Annotated[tuple[int, ...], about("Codes of faults there that may be its cause: mend these first.")]


class OfLimit(Part, frozen=True):
    sense: Literal["min", "max"]
    value: Annotated[float, about("In the unit of the finding.")]
    grade: Grade
    source: str
    profile: Annotated[str | None, about("The file of the limit.")]
    measured: Annotated[float | None, about("The healthy value that it was made from, in the same unit.")]
    given: Annotated[bool, about("Whether it is the customer's and not a shipped one.")]


class OfRequirement(Part, frozen=True):
    id: str
    text: str
    state: requirements.State
    why: Annotated[str, about("Of one that is not met.")]
    checks: Annotated[tuple[str, ...], about("That answer it.")]
    metrics: Annotated[tuple[str, ...], about("That answer it.")]


class OfUnusedLimit(Part, frozen=True):
    number: Annotated[Some, about("In the order of the profile.")]
    metric: str
    unit: str
    conditions: Mapping[str, Condition]
    limit: OfLimit


class OfFinding(Part, frozen=True):
    check: Annotated[str, about("The id of the check that measured it.")]
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    conditions: Mapping[str, Condition]
    details: Annotated[Mapping[str, Condition], about("What people read beside it, such as what was compared.")]
    values: Annotated[
        Values, about("By place: gpu3, pair gpu0-gpu5, node1, its rail node1/rail3, or world. null: no number.")
    ]
    limit: OfLimit | None
    state: State
    missed: Annotated[tuple[str, ...], about("The places that missed the limit.")]
    worse_than_peers: Annotated[Values, about("By place: by what fraction below its peers, where that is too far.")]
    reason: str


class Summary(Part, frozen=True):
    """What one acceptance run came to. Made from evidence.jsonl, which has more."""

    schema: Annotated[Literal[2], about("Grows when a reader of the version before would go wrong.")]
    verdict: VerdictWord
    reasons: Annotated[tuple[str, ...], about("Why, most important first.")]
    exit_status: Annotated[int, about("0 accepted or a clean rehearsal, 1 rejected, 10 incomplete; 2 to 5: pytest's.")]
    evidence_sha256: Annotated[str, about("Of the whole file evidence.jsonl beside this one.", pattern=SUM)]
    run: OfRun
    nodes: Annotated[tuple[OfNode, ...], about("The machines of the run.")]
    software: Software
    gpus: tuple[OfGpu, ...]
    counts: Counts
    basis: Annotated[OfBasis, about("What the verdict rests on.")]
    checks: tuple[OfCheck, ...]
    faults: Annotated[tuple[OfFault, ...], about("What is wrong, as codes: match these, and no text.")]
    failed_nodes: Annotated[tuple[FailedNode, ...], about("That are REJECTED, lost or missing, and why: drain these.")]
    findings: tuple[OfFinding, ...]
    limits_not_applied: Annotated[tuple[OfUnusedLimit, ...], about("Of a given profile, without a measurement.")]
    report_sha256: Annotated[str, about("Of report.html beside this one.", pattern=SUM)] = ""
    requirements: Annotated[tuple[OfRequirement, ...], about("Of --fleet-requirements, as answered.")] = ()


class NodesOfSummary(msgspec.Struct, frozen=True):
    """What a summary says of the nodes."""

    nodes: tuple[OfNode, ...]
    failed_nodes: tuple[FailedNode, ...]


PARTNERS = 2  # that are good: a node is named only if it fails with two of them


def to_run_again(folder: Path, own: str = "") -> tuple[str, ...]:
    """The hosts that failed in the run on many nodes in this folder, with two that were good; `own`: of the head."""
    try:
        said = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=NodesOfSummary)
    except (OSError, msgspec.MsgspecError) as error:
        raise Refused(f"--fleet-only-failed {folder}: {SUMMARY} cannot be read: {error}") from None
    failed = [node.host for node in said.failed_nodes]
    fine = [node for node in said.nodes if node.verdict in ("ACCEPTED", "REHEARSAL") and not node.left_out]
    good = [node.host for node in fine if node.host not in failed]
    if not failed or not good:
        raise Refused(f"--fleet-only-failed {folder}: no node {'failed' if good else 'was good'} in that run")
    here = expected_as(own, [*failed, *good]) if own else good[0]
    if here is None:
        raise Refused(f"--fleet-only-failed {folder}: {own}, the head, neither failed nor was good in that run")
    good.sort(key=lambda host: host != here)
    return tuple(failed + good[:PARTNERS])


P = TypeVar("P", bound=Part)


def summary(record: Record, sha256: str, report_sha256: str = "", runs: NodeRuns = ALONE) -> Summary:
    """Of a run with a verdict. `sha256`: of its evidence, `report_sha256`: of its page. `runs`: the nodes' own."""
    own = HostRun(record.run.host, sha256, record)
    failed = over_nodes(record, runs).failed if record.of_cluster else failed_nodes([own], (), ())
    return Summary(
        SCHEMA,
        cast(VerdictWord, record.verdict),
        tuple(record.reasons),
        cast(int, record.exit_status),
        sha256,
        _part(OfRun, record.run, ended=record.ended, seconds=record.lasted),
        tuple(_node(node, record) for node in record.run.nodes),
        _part(Software, record.topology),
        tuple(_part(OfGpu, gpu) for gpu in record.topology.gpus),
        Counts(
            Counter(check.outcome for check in record.checks.values()),
            Counter(finding.state for finding in distinct(record.findings)),
        ),
        OfBasis(record.run.basis, basis.lowest(record), basis.by_grade(record), basis.described(record)),
        tuple(_part(OfCheck, check, run=check.run or None) for check in record.checks.values()),
        tuple(_fault(fault, record) for fault in all_faults(record)),
        failed,
        tuple(map(_finding, record.findings)),
        tuple(
            _part(OfUnusedLimit, limit, number=number, limit=_limit(limit)) for number, limit in basis.unused(record)
        ),
        report_sha256,
        tuple(
            _part(OfRequirement, each.requirement, state=each.state, why=each.why)
            for each in answered(record, [run.record for run in runs.values()])
        ),
    )


def text(record: Record, sha256: str, report_sha256: str = "", runs: NodeRuns = ALONE) -> str:
    """The summary as the file has it."""
    return json.dumps(codec.plain(summary(record, sha256, report_sha256, runs)), indent=1, allow_nan=False) + "\n"


def schema() -> str:
    """The JSON Schema of the file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "summary.json of pytest-gpufleet"}
    return json.dumps(dialect | msgspec.json.schema(Summary), indent=1)


def _part(kind: type[P], of: object, **otherwise: Any) -> P:
    """What the model has under the same names, but for what is called or counted otherwise here."""
    same = (name for name in kind.__struct_fields__ if name not in otherwise)
    return kind(**{name: codec.plain(getattr(of, name)) for name in same}, **otherwise)


def _node(node: NodeFound, record: Record) -> OfNode:
    end = record.finished.get(node.index, NodeFinished(node=node.index, run="", verdict=None))
    why = {name: events.get(node.index) for name, events in (("lost", record.lost), ("left_out", record.left_out))}
    gone = {name: event.why if event else "" for name, event in why.items()}
    together = next((numbers for numbers in of_one_host(record) if node.index in numbers), ())
    same = tuple(number for number in together if number != node.index)
    return _part(
        OfNode, node, verdict=end.verdict, reasons=end.reasons, evidence_sha256=end.sha256, same_host=same, **gone,
    )  # fmt: skip


def _fault(fault: Fault, record: Record) -> OfFault:
    explained_by = tuple(sorted({cause.kind.number for cause in explaining(fault, (*causes(record), *record.faults))}))
    subjects = codec.plain(fault.subjects)
    return _part(
        OfFault, fault.kind, check=fault.check or None, code=fault.kind.number, subjects=subjects, what=fault.what,
        explained_by=explained_by,
    )  # fmt: skip


def _finding(finding: Finding) -> OfFinding:
    measurement, limit = finding.measurement, finding.limit
    return _part(
        OfFinding, finding, metric=measurement.metric, unit=measurement.unit, better=measurement.definition.better,
        conditions=measurement.conditions, details=measurement.details, values=_numbers(measurement.values),
        limit=limit and _limit(limit), worse_than_peers=_numbers(finding.slower_than_peers or {}),
    )  # fmt: skip


def _limit(limit: Limit) -> OfLimit:
    return _part(OfLimit, limit, profile=limit.profile or None)


def _numbers(values: Mapping[Where, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null, which no reader takes for a good figure."""
    return {str(place): value if math.isfinite(value) else None for place, value in values.items()}


if __name__ == "__main__":
    print(schema())
