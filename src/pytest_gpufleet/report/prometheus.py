"""Verdict and figures for Prometheus, by the textfile collector of node_exporter.

Written by Prometheus' own client, which knows how to escape labels and to replace the file in one step.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from pytest_gpufleet.report.stamp import STAMPS
from pytest_gpufleet.verdict.evidence import Record
from pytest_gpufleet.verdict.figures import Figure, figures

Labels = Mapping[str, str]


def write(path: Path, record: Record) -> None:
    """Write the textfile for a run that has a verdict. It appears at once or not at all. OSError if it cannot be."""
    registry = CollectorRegistry()
    run = record.run
    host = {"host": str(run.get("host") or "")}
    _gauge(
        registry,
        "gpufleet_verdict",
        "Whether the last acceptance run came to this verdict.",
        [({"verdict": verdict, **host}, float(verdict == record.verdict)) for verdict in STAMPS],
    )
    _gauge(
        registry,
        "gpufleet_run_timestamp_seconds",
        "When the last acceptance run began.",
        [(host, datetime.fromisoformat(run["utc"]).timestamp() if run.get("utc") else math.nan)],
    )
    _gauge(
        registry,
        "gpufleet_exit_status",
        "Exit status of the last acceptance run.",
        [(host, math.nan if record.exit_status is None else record.exit_status)],
    )
    outcomes = Counter(check.outcome for check in record.checks.values())
    _gauge(
        registry,
        "gpufleet_checks",
        "Checks of the last acceptance run by outcome.",
        [({"outcome": name}, outcomes[name]) for name in ("passed", "failed", "skipped", "not applicable")],
    )
    serials = {gpu.place: gpu.serial or "" for gpu in record.topology.gpus}
    measured = [
        ({**_labels(figure), "place": place, "serial": _serial(place, serials)}, value)
        for figure, values in figures(record.findings).items()
        for place, value in values.items()
    ]
    _gauge(registry, "gpufleet_figure", "What was measured, by place; the label unit has its unit.", measured)
    limits = [
        ({**_labels(figure), "sense": finding.limit.sense}, finding.limit.value)
        for finding in record.findings
        if finding.limit
        for figure in figures([finding])
    ]
    _gauge(registry, "gpufleet_limit", "The limit that a figure was held against: min or max.", limits)
    write_to_textfile(str(path), registry)


def _gauge(registry: CollectorRegistry, name: str, text: str, series: Sequence[tuple[Labels, float]]) -> None:
    """A label that a series does not have is empty, which to Prometheus is the same."""
    if not series:
        return
    names = sorted({label for labels, _ in series for label in labels})
    gauge = Gauge(name, text, names, registry=registry)
    for labels, value in series:
        gauge.labels(**{label: labels.get(label, "") for label in names}).set(value)


def _labels(figure: Figure) -> dict[str, str]:
    """Conditions have a prefix, since authors of checks may call them as they like: `instance`, `place`, `job`."""
    conditions = {f"condition_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": str(value) for name, value in figure.conditions}
    return {"metric": figure.name, "unit": figure.metric.unit, **conditions}


def _serial(place: str, serials: Mapping[str, str]) -> str:
    return "-".join(serials[part] for part in place.split("-") if part in serials)
