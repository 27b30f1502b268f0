"""What a run came to as one JSON document for machines.

summary.schema.json beside this file is made from these types: `python -m pytest_gpufleet.run.summary`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.event_values import NodeFound, VerdictWord
from pytest_gpufleet.model.events import NodeFinished
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.summary_parts import (
    SCHEMA,
    Counts,
    OfBasis,
    OfCheck,
    OfFault,
    OfFinding,
    OfGpu,
    OfLimit,
    OfNode,
    OfRun,
    OfUnusedLimit,
    Part,
    Software,
    Summary,
)
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import causes, explaining, told
from pytest_gpufleet.verdict.given_limits import unused
from pytest_gpufleet.verdict.node_verdicts import of_one_host

FILE = Path(__file__).parent / "summary.schema.json"

P = TypeVar("P", bound=Part)


def summary(record: Record, sha256: str, report_sha256: str = "") -> Summary:
    """The summary of a run that has a verdict. `sha256`: of its whole evidence file. `report_sha256`: of its page."""
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
        OfBasis(record.run.basis, basis.lowest(record), basis.by_grade(record), basis.told(record)),
        tuple(_part(OfCheck, check, run=check.run or None) for check in record.checks.values()),
        tuple(_fault(fault, record) for fault in told(record)),
        tuple(map(_finding, record.findings)),
        tuple(_part(OfUnusedLimit, limit, number=number, limit=_limit(limit)) for number, limit in unused(record)),
        report_sha256,
    )


def text(record: Record, sha256: str, report_sha256: str = "") -> str:
    """The summary as the file has it."""
    return json.dumps(codec.plain(summary(record, sha256, report_sha256)), indent=1, allow_nan=False) + "\n"


def schema() -> str:
    """The JSON Schema of the file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "summary.json of pytest-gpufleet"}
    return json.dumps(dialect | msgspec.json.schema(Summary), indent=1) + "\n"


def _part(kind: type[P], of: object, **otherwise: Any) -> P:
    """What the model has under the same names, but for what is called or counted otherwise here."""
    same = (name for name in kind.__struct_fields__ if name not in otherwise)
    return kind(**{name: codec.plain(getattr(of, name)) for name in same}, **otherwise)


def _node(node: NodeFound, record: Record) -> OfNode:
    end = record.finished.get(node.index, NodeFinished(node=node.index, run="", verdict=None))
    why = {name: told.get(node.index) for name, told in (("lost", record.lost), ("left_out", record.left_out))}
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
        OfFinding, finding,
        metric=measurement.metric,
        unit=measurement.unit,
        better=measurement.definition.better,
        conditions=measurement.conditions,
        values=_numbers(measurement.values),
        limit=limit and _limit(limit),
        worse_than_peers=_numbers(finding.slower_than_peers or {}),
    )  # fmt: skip


def _limit(limit: Limit) -> OfLimit:
    return _part(OfLimit, limit, profile=limit.profile or None)


def _numbers(values: Mapping[Where, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null, which no reader takes for a good figure."""
    return {str(place): value if math.isfinite(value) else None for place, value in values.items()}


if __name__ == "__main__":
    FILE.write_text(schema(), encoding="utf-8")
