"""Runs side by side: outliers and all figures."""

from __future__ import annotations

import math

from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.several_runs import SeveralRuns, Table, runs_table, what
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, RunComparison

# More columns than this no terminal has room for.
MOST_COLUMNS = 4


def compared(comparison: RunComparison, most_columns: int) -> SeveralRuns:
    """What is to be told of a comparison; a column for each run only if they are at most so many."""
    tables = (
        runs_table(comparison.runs),
        _other_bits(comparison),
        _outliers(comparison),
        _figures(comparison, most_columns),
    )
    bad = bool(comparison.outliers or comparison.other_bits) or not comparison.rows
    return SeveralRuns(headline(comparison), bad, comparison.notes, tables)


def headline(comparison: RunComparison) -> str:
    """What the comparison found, in one line."""
    outliers = comparison.outliers
    if comparison.other_bits:
        apart = comparison.other_bits[0]
        machines = ", ".join(apart.hosts)
        if apart.usual is None:
            return f"These compute other bits than each other, and nobody can say which are wrong: {machines}."
        return f"Computes other bits than most with the same GPUs and libraries: {machines}."
    if not comparison.rows:
        return "There is nothing to compare: the runs have no figure in common."
    if not outliers:
        return f"No outlier among {wording.count(len(comparison.rows), 'figure')} of {len(comparison.runs)} runs."
    worst = outliers[0]
    return (
        f"{wording.count(len(outliers), 'outlier')}; the worst: {worst.figure.metric.title} of "
        f"{wording.place(worst.place)} in {worst.run}, {wording.percent(worst.worse)} worse."
    )


def _other_bits(comparison: RunComparison) -> Table:
    rows = (
        (machine, each.fact, value, each.usual or "nobody can say")
        for each in comparison.other_bits
        for value, machines in each.others.items()
        for machine in machines
    )
    return Table("Other bits from the same data", ("Run", "What", "Computed", "Most have"), tuple(rows))


def _outliers(comparison: RunComparison) -> Table:
    rows = (
        (
            outlier.run,
            outlier.identity if outlier.identity != str(outlier.place) else wording.place(outlier.place),
            what(outlier.figure),
            wording.quantity(outlier.value, outlier.figure.metric.unit),
            wording.quantity(outlier.reference, outlier.figure.metric.unit),
            wording.percent(outlier.worse),
        )
        for outlier in comparison.outliers
    )
    reference = "First run" if len(comparison.runs) == 2 else "Median"
    return Table("Outliers, the worst first", ("Run", "Where", "What", "Measured", reference, "Worse by"), tuple(rows))


def _figures(comparison: RunComparison, most_columns: int) -> Table:
    runs = tuple(comparison.runs) if len(comparison.runs) <= most_columns else ()
    last = "Change" if len(comparison.runs) == 2 else "Spread"
    rows = (
        (
            what(row.figure),
            *(_cell(row, index) for index in range(len(runs))),
            wording.quantity(row.median, row.figure.metric.unit),
            _change(row) if last == "Change" else wording.percent(row.spread),
            str(row.outliers or ""),
        )
        for row in comparison.rows
    )
    caption = "Figures: the worst place of each run" if runs else "Figures"
    return Table(caption, ("Figure", *runs, "Median of all places", last, "Outliers"), tuple(rows))


def _cell(row: ComparedFigure, index: int) -> str:
    worst = row.worst[index]
    if worst is None:
        return "—"
    value = wording.quantity(worst[1], row.figure.metric.unit)
    return value if worst[0] == WORLD else f"{value} ({wording.place(worst[0])})"


def _change(row: ComparedFigure) -> str:
    """From the worst place of the first run to the worst place of the second: "-3.2 %"."""
    (first, second) = row.worst
    if first is None or second is None or not math.isfinite(first[1]) or first[1] == 0:
        return "—"
    return f"{100 * (second[1] - first[1]) / abs(first[1]):+.1f} %"
