"""Runs side by side, and one machine over time, as CSV for spreadsheets: a row for each value."""

from __future__ import annotations

from pytest_gpufleet.model.place import Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.csv_text import Row, csv_text
from pytest_gpufleet.verdict.across_runs.drift import Drift
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure, figures
from pytest_gpufleet.verdict.across_runs.run_comparison import RunComparison

COLUMNS = (
    "run", "host", "utc", "place", "identity", "metric", "unit", "conditions", "value", "median", "reference", "worse",
)  # fmt: skip


def of_comparison(comparison: RunComparison) -> str:
    """Every value of the figures that were compared. `median` is that of all places; only outliers have a `reference`
    and by what fraction they are `worse`."""
    outliers = {(each.run, each.figure, each.place): (each.reference, each.worse) for each in comparison.outliers}
    medians = {row.figure: row.median for row in comparison.rows}
    rows = (
        (
            *_subject(name, record, place, record.topology.identity(place), figure),
            value,
            medians[figure],
            *outliers.get((name, figure, place), (None, None)),
        )
        for name, record in comparison.runs.items()
        for figure, values in figures(record.findings).items()
        if figure in medians
        for place, value in values.items()
    )
    return csv_text(COLUMNS, rows)


def of_drift(drift: Drift) -> str:
    """What got worse, run by run; in the row of the last run stands by how much."""
    *_, last = drift.runs
    rows = (
        (
            *_subject(name, drift.runs[name], each.place, each.identity, each.figure),
            value,
            None,
            *((each.reference, each.worse) if name == last else (None, None)),
        )
        for each in drift.worse
        for name, value in each.history.items()
    )
    return csv_text(COLUMNS, rows)


def _subject(run: str, record: Record, place: Where, identity: str, figure: Figure) -> Row:
    conditions = "; ".join(f"{name}={value}" for name, value in figure.conditions)
    return run, record.run.host, record.run.utc, str(place), identity, figure.name, figure.metric.unit, conditions
