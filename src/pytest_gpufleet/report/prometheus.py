"""Verdict and figures for Prometheus, by the textfile collector of node_exporter.

Prometheus' own client knows how to escape labels. From the beginning of a run on it says that it is running, so
that a verdict does not stay when the machine dies in the next run.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.events import Outcome
from pytest_gpufleet.model.finding import GRADES
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import STAMPS
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import all_faults
from pytest_gpufleet.verdict.across_runs.run_comparison import figures
from pytest_gpufleet.verdict.outliers import Figure

Series = list[tuple[Mapping[str, str], float]]  # a value for each set of labels

HELP = {
    "gpufleet_running": "Whether an acceptance run goes on.",
    "gpufleet_verdict": "Whether the last acceptance run came to this verdict; all 0 while it goes on.",
    "gpufleet_run_timestamp_seconds": "When the last acceptance run began.",
    "gpufleet_run_end_timestamp_seconds": "When the last acceptance run ended; NaN while it goes on.",
    "gpufleet_exit_status": "Exit status of the last acceptance run.",
    "gpufleet_figures_judged": "Measurements of the last acceptance run by the grade of their limits.",
    "gpufleet_basis": "Whether this is the lowest grade of the limits of the last acceptance run.",
    "gpufleet_checks": "Checks of the last acceptance run by outcome.",
    # Of a run on many nodes what the own run of each came to; of one on its own machine nothing.
    "gpufleet_node_verdict": "Whether the own run of a node came to this verdict in the last run of many.",
    "gpufleet_node_lost": "Whether a node was lost in the last acceptance run of many.",
    "gpufleet_figure": "What was measured, by place; the label unit has its unit.",
    "gpufleet_limit": "The limit of a measurement: min or max.",
    "gpufleet_fault": "What is wrong, by code and place.",
}


def write(path: Path, record: Record) -> None:
    """Write the textfile for a run, which goes on as long as it has no verdict. OSError if it cannot be written."""
    registry = CollectorRegistry()
    found = {**_of_the_run(record), **_of_places(record)}
    for name, series in ((name, found[name]) for name in HELP if found[name]):
        names = sorted({label for labels, _ in series for label in labels})
        gauge = Gauge(name, HELP[name], names, registry=registry)
        for labels, value in series:  # a label that a series does not have is empty, which to Prometheus is the same
            gauge.labels(**{label: wording.clean(labels.get(label, "")) for label in names}).set(value)
    safe_files.write_text(path, generate_latest(registry).decode())


def _of_the_run(record: Record) -> dict[str, Series]:
    run, running, host = record.run, record.verdict is None, {"host": record.run.host}
    outcomes = Counter(check.outcome for check in record.checks.values())
    counts, worst = basis.by_grade(record), basis.lowest(record)
    status = math.nan if record.exit_status is None else record.exit_status
    nodes = record.hosts if record.of_cluster else {}
    ends = {node: end.verdict for node, end in record.finished.items()}
    return {
        "gpufleet_running": [(host, float(running))],
        "gpufleet_verdict": [({"verdict": word, **host}, float(word == record.verdict)) for word in STAMPS],
        "gpufleet_run_timestamp_seconds": [(host, run.began or math.nan)],
        "gpufleet_run_end_timestamp_seconds": [(host, math.nan if running else time.time())],
        "gpufleet_exit_status": [(host, status)],
        "gpufleet_figures_judged": [({"grade": grade}, counts.get(grade, 0)) for grade in GRADES],
        "gpufleet_basis": [({"grade": grade, **host}, float(grade == worst)) for grade in GRADES],
        "gpufleet_checks": [({"outcome": name}, outcomes[name]) for name in get_args(Outcome)],
        "gpufleet_node_verdict": [
            ({"verdict": word, "node": name}, float(word == ends.get(node)))
            for node, name in nodes.items()
            for word in STAMPS
        ],
        "gpufleet_node_lost": [({"node": name}, float(node in record.lost)) for node, name in nodes.items()],
    }


def _of_places(record: Record) -> dict[str, Series]:
    serials = {gpu.place: gpu.serial or "" for gpu in record.topology.gpus}

    def at(where: Where) -> dict[str, str]:
        found = {"place": str(where), "serial": "-".join(serials[part] for part in where.parts if part in serials)}
        nodes = dict.fromkeys(record.hosts.get(part.node, "") for part in where.parts if part.is_on_node)
        return {**found, "node": "-".join(nodes)} if record.of_cluster else found

    return {
        "gpufleet_figure": [
            ({**_labels(figure), **at(place)}, value)
            for figure, values in figures(record.findings).items()
            for place, value in values.items()
        ],
        "gpufleet_limit": [
            ({**_labels(figure), "sense": finding.limit.sense}, finding.limit.value)
            for finding in record.findings
            if finding.limit
            for figure in figures([finding])
        ],
        "gpufleet_fault": [
            ({"code": str(fault.kind.number), "name": fault.name, "action": fault.kind.action, **at(where)}, 1.0)
            for fault in all_faults(record)
            for where in fault.subjects or (WORLD,)
        ],
    }


def _labels(figure: Figure) -> dict[str, str]:
    """Conditions have a prefix, since authors of checks may call them as they like: `instance`, `place`, `job`."""
    conditions = {f"condition_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": str(value) for name, value in figure.conditions}
    return {"metric": figure.name, "unit": figure.metric.unit, **conditions}
