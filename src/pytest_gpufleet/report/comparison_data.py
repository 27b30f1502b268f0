"""Runs side by side, and one machine over time, as JSON for programs and as CSV for spreadsheets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gpufleet.model.place import Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.csv_text import csv_text
from pytest_gpufleet.verdict.across_runs.drift import Drift, Worsened
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure, figures
from pytest_gpufleet.verdict.across_runs.run_comparison import Outlier, RunComparison
from pytest_gpufleet.verdict.fleet.equality import Difference

# Of CSV. `median`: that of all places; only outliers, or what got worse, have a `reference` and by what fraction.
COLUMNS = (
    "run", "host", "utc", "place", "identity", "metric", "unit", "conditions", "value", "median", "reference", "worse",
)  # fmt: skip


def of_comparison(comparison: RunComparison) -> dict[str, Any]:
    """The outliers of several runs, and the worst place of each figure in each run."""
    return {
        "runs": _runs(comparison.runs),
        "notes": list(comparison.notes),
        "outliers": [
            {
                "run": each.run,
                **_subject(each.place, each.identity, each.figure),
                "value": number(each.value),
                "reference": number(each.reference),
                "worse": each.worse,
            }
            for each in comparison.outliers
        ],
        "fingerprints": [difference(each) for each in comparison.other_bits],
        "figures": [
            {
                **of_figure(row.figure),
                "worst": {
                    name: {"place": str(worst[0]), "value": number(worst[1])}
                    for name, worst in zip(comparison.runs, row.worst, strict=True)
                    if worst
                },
                "median": number(row.median),
                "spread": number(row.spread),
            }
            for row in comparison.rows
        ],
    }


def of_drift(drift: Drift) -> dict[str, Any]:
    """What got worse in the last run, and what it is held against."""
    return {
        "runs": _runs(drift.runs),
        "notes": list(drift.notes),
        "compared": drift.compared,
        "worse": [
            {
                **_subject(each.place, each.identity, each.figure),
                "gpus": list(each.gpus),
                "history": {name: number(value) for name, value in each.history.items()},
                "reference": number(each.reference),
                "worse": each.worse,
                "noise": each.allowed,
            }
            for each in drift.worse
        ],
        "faults": [fault.to_json() for fault in drift.faults],
    }


def values_compared(comparison: RunComparison) -> str:
    """Every value of the figures that were compared, as CSV."""
    outliers = {(each.run, each.figure, each.place): each for each in comparison.outliers}
    medians = {row.figure: row.median for row in comparison.rows}
    return _csv(
        {
            **_run(name, record),
            **_subject(place, record.topology.identity(place), figure),
            "value": value,
            "median": medians[figure],
            **_worse(outliers.get((name, figure, place))),
        }
        for name, record in comparison.runs.items()
        for figure, values in figures(record.findings).items()
        if figure in medians
        for place, value in values.items()
    )


def values_over_time(drift: Drift) -> str:
    """What got worse, run by run, as CSV; in the row of the last run stands by how much."""
    *_, last = drift.runs
    return _csv(
        {
            **_run(name, drift.runs[name]),
            **_subject(each.place, each.identity, each.figure),
            "value": value,
            **_worse(each if name == last else None),
        }
        for each in drift.worse
        for name, value in each.history.items()
    )


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    def cell(row: Mapping[str, Any], column: str) -> Any:
        value = row.get(column)
        return "; ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else value

    return csv_text(COLUMNS, ([cell(row, column) for column in COLUMNS] for row in rows))


def _run(name: str, record: Record) -> dict[str, str]:
    return {"run": name, "host": record.run.host, "utc": record.run.utc}


def _worse(found: Outlier | Worsened | None) -> dict[str, float]:
    return {"reference": found.reference, "worse": found.worse} if found else {}


def difference(found: Difference) -> dict[str, Any]:
    """In what machines differ: what most have, None if none has most, and who has what else."""
    others = {value: list(machines) for value, machines in found.others.items()}
    return {"fact": found.fact, "usual": found.usual, "others": others}


def _runs(runs: Mapping[str, Record]) -> dict[str, Any]:
    return {
        name: {"host": record.run.host, "utc": record.run.utc, "verdict": record.verdict}
        for name, record in runs.items()
    }


def _subject(place: Where, identity: str, figure: Figure) -> dict[str, Any]:
    return {"place": str(place), "identity": identity, **of_figure(figure)}


def of_figure(figure: Figure) -> dict[str, Any]:
    return {"metric": figure.name, "unit": figure.metric.unit, "conditions": dict(figure.conditions)}


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
