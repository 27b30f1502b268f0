"""What a run came to as one JSON document for machines. summary.schema.json beside this file describes it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import SOFTWARE
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.accusations import causes, explaining, told

SCHEMA = 1

RUN = (
    "host", "utc", "command", "level", "burn_in_seconds", "gpus", "rehearsal", "ranks", "profile", "profile_sha256",
    "environment", "python", "pytest", "plugin",
)  # fmt: skip
GPU = ("place", "index", "name", "uuid", "serial", "pci_bus_id")


def summary(record: Record, sha256: str) -> dict[str, Any]:
    """The summary of a run that has a verdict. `sha256`: of its whole evidence file."""
    return {
        "schema": SCHEMA,
        "verdict": record.verdict,
        "reasons": record.reasons,
        "exit_status": record.exit_status,
        "evidence_sha256": sha256,
        "run": {name: codec.plain(getattr(record.run, name)) for name in RUN} | _because(record),
        "nodes": codec.plain(record.run.nodes),
        "software": {name: getattr(record.topology, name) for name in SOFTWARE},
        "gpus": [{name: codec.plain(getattr(gpu, name)) for name in GPU} for gpu in record.topology.gpus],
        "counts": {
            "checks": dict(Counter(check.outcome for check in record.checks.values())),
            "findings": dict(Counter(str(finding.state) for finding in record.findings)),
        },
        "checks": [_check(check) for check in record.checks.values()],
        "faults": [_fault(fault, record) for fault in told(record)],
        "findings": [_finding(finding) for finding in record.findings],
    }


def text(record: Record, sha256: str) -> str:
    """The summary as the file has it."""
    return json.dumps(summary(record, sha256), indent=1, allow_nan=False) + "\n"


def _because(record: Record) -> dict[str, str]:
    """Why it was a rehearsal, where it was one."""
    because = record.run.rehearsal_because
    return {"rehearsal_because": because} if because else {}


def _check(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "title": check.title,
        "outcome": check.outcome,
        "seconds": check.seconds,
        "message": check.message,
        "run": check.run or None,
    }


def _fault(fault: Fault, record: Record) -> dict[str, Any]:
    kind = fault.kind
    return {
        "check": fault.check or None,
        "code": kind.number,
        "name": kind.name,
        "category": kind.category,
        "action": kind.action,
        "subjects": [str(subject) for subject in fault.subjects],
        "what": fault.what,
        "next_step": kind.next_step,
        "explained_by": sorted({cause.kind.number for cause in explaining(fault, causes(record))}),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    measurement, limit = finding.measurement, finding.limit
    return {
        "check": finding.check,
        "metric": measurement.metric,
        "unit": measurement.unit,
        "better": measurement.definition.better,
        "conditions": dict(measurement.conditions),
        "values": _numbers(measurement.values),
        "limit": None
        if limit is None
        else {
            "sense": limit.sense,
            "value": limit.value,
            "kind": limit.kind,
            "source": limit.source,
            "profile": limit.profile or None,
            "contract": limit.contract,
        },
        "state": finding.state,
        "missed": codec.plain(finding.missed),
        "worse_than_peers": _numbers(finding.slower_than_peers or {}),
        "reason": finding.reason,
    }


def _numbers(values: Mapping[Where, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null, which no reader takes for a good figure."""
    return {str(place): value if math.isfinite(value) else None for place, value in values.items()}
