"""What a run came to as one JSON document for machines. Its JSON Schema is made from these types:
`python -m pytest_gpufleet.run.summary` prints it."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec
from msgspec import Meta

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.codec import about
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import Check, NodeFinished, NodeFound, Outcome, Requirement, RunHeader, VerdictWord
from pytest_gpufleet.model.fault import Action, Fault
from pytest_gpufleet.model.finding import Finding, Grade, Limit, State, distinct
from pytest_gpufleet.model.place import GpuTopology, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.folder import SUMMARY
from pytest_gpufleet.verdict import basis, requirements
from pytest_gpufleet.verdict.accusations import all_faults, causes, explaining
from pytest_gpufleet.verdict.fleet.fleet_verdict import FailedNode, Fleet, failed_nodes
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, expected_as, of_one_host
from pytest_gpufleet.verdict.gaps import answered

Natural = Annotated[int, Meta(ge=0)]
Some = Annotated[int, Meta(ge=1)]
Values = Mapping[str, float | None]  # null: no number
SUM = "^[0-9a-f]{64}$"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What stands in a summary: all of its keys and no other, but for one that has a default."""


def part(name: str, model: Any, always: str, unless_default: str = "", **own: Any) -> Any:
    """Fields of a type of the model, as it describes them. `own`: type, or type and default, of what differs here."""
    types = get_type_hints(model, include_extras=True) | own
    fields: list[Any] = [(each, types[each]) for each in always.split()]
    for each in unless_default.split():
        fields.append((each, *(own[each] if each in own else (types[each], getattr(model(), each)))))
    return msgspec.defstruct(name, fields, bases=(Part,), frozen=True)


OfRun = part(
    "OfRun", RunHeader,
    "host utc command level burn_in_seconds gpus rehearsal ranks profile profile_sha256 environment python pytest "
    "plugin",
    "order order_sha256 commit notes ended seconds rehearsal_because deadline_seconds nodes_wanted nodes_missing "
    "transport secured interfaces network without used",
    ended=(Annotated[str, about("When the verdict was written, ISO 8601.")], ""),
    seconds=(Annotated[float, about("How long the run took; 0 if unknown.", ge=0)], 0),
)  # fmt: skip
Software = part("Software", GpuTopology, "driver cuda_driver cuda cudnn nccl torch")
EarlierRun = Annotated[str | None, about("The earlier run that it was carried over from.")]
OfCheck = part("OfCheck", Check, "id title outcome seconds message run", run=EarlierRun)
LimitFile = Annotated[str | None, about("The file of the limit.")]
OfLimit = part("OfLimit", Limit, "sense value grade source profile measured given", profile=LimitFile)
Number = Annotated[Some, about("In the order of the profile.")]
OfUnusedLimit = part("OfUnusedLimit", Limit, "number metric unit conditions limit", number=Number, limit=OfLimit)
Unused = tuple[OfUnusedLimit, ...]  # type: ignore[valid-type]
Why = Annotated[str, about("Of one that is not met.")]
OfRequirement = part(
    "OfRequirement", Requirement, "id text state why checks metrics", state=requirements.State, why=Why
)
Answers = tuple[OfRequirement, ...]  # type: ignore[valid-type]


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


class OfFinding(Part, frozen=True):
    check: Annotated[str, about("The id of the check that measured it.")]
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    conditions: Mapping[str, Condition]
    details: Annotated[Mapping[str, Condition], about("What people read beside it, such as what was compared.")]
    values: Annotated[Values, about("By place: gpu3, pair gpu0-gpu5, node1, rail node1/rail3, world. null: no number.")]
    limit: OfLimit | None  # type: ignore[valid-type]
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
    run: OfRun  # type: ignore[valid-type]
    nodes: Annotated[tuple[OfNode, ...], about("The machines of the run.")]
    software: Software  # type: ignore[valid-type]
    gpus: tuple[OfGpu, ...]
    counts: Counts
    basis: Annotated[OfBasis, about("What the verdict rests on.")]
    checks: tuple[OfCheck, ...]  # type: ignore[valid-type]
    faults: Annotated[tuple[OfFault, ...], about("What is wrong, as codes: match these, and no text.")]
    failed_nodes: Annotated[tuple[FailedNode, ...], about("That are REJECTED, lost or missing, and why: drain these.")]
    findings: tuple[OfFinding, ...]
    limits_not_applied: Annotated[Unused, about("Of a given profile, without a measurement.")]
    report_sha256: Annotated[str, about("Of report.html beside this one.", pattern=SUM)] = ""
    requirements: Annotated[Answers, about("Of --fleet-requirements, as answered.")] = ()


def to_run_again(folder: Path, own: str = "") -> tuple[str, ...]:
    """The hosts that failed in the run on many nodes in this folder, with two that were good; `own`: of the head."""
    try:
        nodes = [("nodes", tuple[OfNode, ...]), ("failed_nodes", tuple[FailedNode, ...])]
        said: Any = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=msgspec.defstruct("Nodes", nodes))
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
    return tuple(failed + good[:2])  # a node is named only if it fails with two good ones


def summary(record: Record, sha256: str, report_sha256: str = "", fleet: Fleet | None = None) -> Summary:
    """Of a run with a verdict. `sha256`: of its evidence, `report_sha256`: of its page. `fleet`: of many nodes."""
    own = HostRun(record.run.host, sha256, record)
    return Summary(
        2,
        cast(VerdictWord, record.verdict),
        tuple(record.reasons),
        cast(int, record.exit_status),
        sha256,
        _part(OfRun, record.run, ended=str(record.ended), seconds=record.lasted),
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
        fleet.failed if fleet else failed_nodes([own], (), ()),
        tuple(map(_finding, record.findings)),
        tuple(_part(OfUnusedLimit, each, number=number, limit=_limit(each)) for number, each in basis.unused(record)),
        report_sha256,
        tuple(
            _part(OfRequirement, each.requirement, state=each.state, why=each.why)
            for each in answered(record, [run.record for run in (fleet.hosts if fleet else ())])
        ),
    )


def text(record: Record, sha256: str, report_sha256: str = "", fleet: Fleet | None = None) -> str:
    return json.dumps(codec.plain(summary(record, sha256, report_sha256, fleet)), indent=1, allow_nan=False) + "\n"


def schema() -> str:
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "summary.json of pytest-gpufleet"}
    return json.dumps(dialect | msgspec.json.schema(Summary, schema_hook=lambda _: {"type": "string"}), indent=1)


def _part(kind: Any, of: object, **otherwise: Any) -> Any:
    """What the model has under the same names, but for what is called or counted otherwise here."""
    same = (name for name in kind.__struct_fields__ if name not in otherwise)
    return kind(**{name: codec.plain(getattr(of, name)) for name in same}, **otherwise)


def _node(node: NodeFound, record: Record) -> Any:
    end = record.finished.get(node.index, NodeFinished(node=node.index, run="", verdict=None))
    gone = {"lost": record.lost.get(node.index), "left_out": record.left_out.get(node.index)}
    together = next((numbers for numbers in of_one_host(record) if node.index in numbers), ())
    return _part(
        OfNode, node, verdict=end.verdict, reasons=end.reasons, evidence_sha256=end.sha256,
        same_host=tuple(number for number in together if number != node.index),
        **{name: event.why if event else "" for name, event in gone.items()},
    )  # fmt: skip


def _fault(fault: Fault, record: Record) -> Any:
    explained_by = tuple(sorted({cause.kind.number for cause in explaining(fault, (*causes(record), *record.faults))}))
    return _part(
        OfFault, fault.kind, check=fault.check or None, code=fault.kind.number, subjects=codec.plain(fault.subjects),
        what=fault.what, explained_by=explained_by,
    )  # fmt: skip


def _finding(finding: Finding) -> Any:
    measurement, limit = finding.measurement, finding.limit
    return _part(
        OfFinding, finding, metric=measurement.metric, unit=measurement.unit, better=measurement.definition.better,
        conditions=measurement.conditions, details=measurement.details, values=_numbers(measurement.values),
        limit=limit and _limit(limit), worse_than_peers=_numbers(finding.slower_than_peers or {}),
    )  # fmt: skip


def _limit(limit: Limit) -> Any:
    return _part(OfLimit, limit, profile=limit.profile or None)


def _numbers(values: Mapping[Where, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null, which no reader takes for a good figure."""
    return {str(place): value if math.isfinite(value) else None for place, value in values.items()}


if __name__ == "__main__":
    print(schema())
