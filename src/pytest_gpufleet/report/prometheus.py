"""Verdict and figures for Prometheus, by the textfile collector of node_exporter.

Prometheus' own client knows how to escape labels. From the beginning of a run on it says that it is running, so
that a verdict does not stay when the machine dies in the next run.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.place import WORLD, Place, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import STAMPS
from pytest_gpufleet.verdict.accusations import told
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure, figures

Labels = Mapping[str, str]


def write(path: Path, record: Record) -> None:
    """Write the textfile for a run, which goes on as long as it has no verdict. It appears at once or not at all.

    OSError if it cannot be written.
    """
    registry = CollectorRegistry()
    run, running = record.run, record.verdict is None
    host = {"host": str(run.host or "")}
    _gauge(registry, "gpufleet_running", "Whether an acceptance run goes on.", [(host, float(running))])
    _gauge(
        registry,
        "gpufleet_verdict",
        "Whether the last acceptance run came to this verdict; all 0 while it goes on.",
        [({"verdict": verdict, **host}, float(verdict == record.verdict)) for verdict in STAMPS],
    )
    _gauge(
        registry,
        "gpufleet_run_timestamp_seconds",
        "When the last acceptance run began.",
        [(host, datetime.fromisoformat(run.utc).timestamp() if run.utc else math.nan)],
    )
    _gauge(
        registry,
        "gpufleet_run_end_timestamp_seconds",
        "When the last acceptance run ended; NaN while it goes on.",
        [(host, math.nan if running else time.time())],
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
        ({**_labels(figure), "place": str(place), "serial": _serial(place, serials)}, value)
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
    faults = [
        (
            {"code": str(fault.kind.number), "name": fault.code, "action": fault.kind.action,
             "place": str(where), "serial": _serial(where, serials)},
            1.0,
        )
        for fault in told(record)
        for where in fault.subjects or (WORLD,)
    ]  # fmt: skip
    _gauge(registry, "gpufleet_fault", "What is wrong, by code and place.", faults)
    safe_files.write_text(path, generate_latest(registry).decode())


def _gauge(registry: CollectorRegistry, name: str, text: str, series: Sequence[tuple[Labels, float]]) -> None:
    """A label that a series does not have is empty, which to Prometheus is the same."""
    if not series:
        return
    names = sorted({label for labels, _ in series for label in labels})
    gauge = Gauge(name, text, names, registry=registry)
    for labels, value in series:
        gauge.labels(**{label: wording.clean(labels.get(label, "")) for label in names}).set(value)


def _labels(figure: Figure) -> dict[str, str]:
    """Conditions have a prefix, since authors of checks may call them as they like: `instance`, `place`, `job`."""
    conditions = {f"condition_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": str(value) for name, value in figure.conditions}
    return {"metric": figure.name, "unit": figure.metric.unit, **conditions}


def _serial(where: Where, serials: Mapping[Place, str]) -> str:
    return "-".join(serials[part] for part in where.parts if part in serials)
