"""Runs side by side: outliers and all figures."""

from __future__ import annotations

import math

from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.several_runs import SeveralRuns, Table, runs_table, what
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, RunComparison

# More columns than this no terminal has room for.
MOST_COLUMNS = 4


def compared(comparison: RunComparison, most_columns: int, say: Say = english) -> SeveralRuns:
    """What is to be told of a comparison; a column for each run only if they are at most so many."""
    tables = (
        runs_table(comparison.runs, say),
        _other_bits(comparison, say),
        _outliers(comparison, say),
        _figures(comparison, most_columns, say),
    )
    bad = bool(comparison.outliers or comparison.other_bits) or not comparison.rows
    return SeveralRuns(headline(comparison, say), bad, comparison.notes, tables)


def headline(comparison: RunComparison, say: Say = english) -> str:
    """What the comparison found, in one line."""
    outliers, runs, figures = comparison.outliers, len(comparison.runs), len(comparison.rows)
    if comparison.other_bits:
        apart = comparison.other_bits[0]
        machines = say(", ").join(apart.hosts)
        if apart.usual is None:
            text = "These compute other bits than each other, and nobody can say which are wrong: {machines}."
            return say(text, machines=machines)
        return say("Computes other bits than most with the same GPUs and libraries: {machines}.", machines=machines)
    if not figures:
        return say("There is nothing to compare: the runs have no figure in common.")
    if not outliers:
        one, several = "No outlier among 1 figure of {runs} runs.", "No outlier among {count} figures of {runs} runs."
        return say(one if figures == 1 else several, count=figures, runs=runs)
    worst = outliers[0]
    return say(
        "{count} outliers; the worst: {metric} of {place} in {run}, {percent} worse."
        if len(outliers) != 1
        else "1 outlier; the worst: {metric} of {place} in {run}, {percent} worse.",
        count=len(outliers),
        metric=say(worst.figure.metric.title),
        place=wording.place(worst.place, say=say),
        run=worst.run,
        percent=wording.percent(worst.worse),
    )


def _other_bits(comparison: RunComparison, say: Say) -> Table:
    rows = (
        (machine, say(each.fact), value, each.usual or say("nobody can say"))
        for each in comparison.other_bits
        for value, machines in each.others.items()
        for machine in machines
    )
    return Table(
        say("Other bits from the same data"), (say("Run"), say("What"), say("Computed"), say("Most have")), tuple(rows)
    )


def _outliers(comparison: RunComparison, say: Say) -> Table:
    rows = (
        (
            outlier.run,
            outlier.identity if outlier.identity != str(outlier.place) else wording.place(outlier.place, say=say),
            what(outlier.figure, say),
            wording.quantity(outlier.value, outlier.figure.metric.unit),
            wording.quantity(outlier.reference, outlier.figure.metric.unit),
            wording.percent(outlier.worse),
        )
        for outlier in comparison.outliers
    )
    reference = "First run" if len(comparison.runs) == 2 else "Median"
    heads = (say("Run"), say("Where"), say("What"), say("Measured"), say(reference), say("Worse by"))
    return Table(say("Outliers, the worst first"), heads, tuple(rows))


def _figures(comparison: RunComparison, most_columns: int, say: Say) -> Table:
    runs = tuple(comparison.runs) if len(comparison.runs) <= most_columns else ()
    last = "Change" if len(comparison.runs) == 2 else "Spread"
    rows = (
        (
            what(row.figure, say),
            *(_cell(row, index, say) for index in range(len(runs))),
            wording.quantity(row.median, row.figure.metric.unit),
            _change(row) if last == "Change" else wording.percent(row.spread),
            str(row.outliers or ""),
        )
        for row in comparison.rows
    )
    caption = "Figures: the worst place of each run" if runs else "Figures"
    heads = (say("Figure"), *runs, say("Median of all places"), say(last), say("Outliers"))
    return Table(say(caption), heads, tuple(rows))


def _cell(row: ComparedFigure, index: int, say: Say) -> str:
    worst = row.worst[index]
    if worst is None:
        return "—"
    value = wording.quantity(worst[1], row.figure.metric.unit)
    return value if worst[0] == WORLD else f"{value} ({wording.place(worst[0], say=say)})"


def _change(row: ComparedFigure) -> str:
    """From the worst place of the first run to the worst place of the second: "-3.2 %"."""
    (first, second) = row.worst
    if first is None or second is None or not math.isfinite(first[1]) or first[1] == 0:
        return "—"
    return f"{round(100 * (second[1] - first[1]) / abs(first[1]), 1) + 0.0:+.1f} %"  # never -0.0
