"""Runs side by side, on the terminal and as a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.standalone import render
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, RunComparison, models

if TYPE_CHECKING:
    from rich.console import Group

# More columns than this no terminal has room for.
MOST_COLUMNS = 4


@dataclass(frozen=True)
class ComparisonTable:
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def page(comparison: RunComparison) -> str:
    """A self-contained HTML page."""
    return render(
        "comparison.html.jinja",
        headline=headline(comparison),
        notes=[wording.clean(note) for note in comparison.notes],
        tables=_tables(comparison, len(comparison.runs)),
    )


def screen(comparison: RunComparison) -> Group:
    """What rich prints on a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[RichTable | Text] = []
    for table in _tables(comparison, MOST_COLUMNS):
        drawn = RichTable(title=table.caption, title_justify="left", box=box.SIMPLE_HEAD)
        for name in table.header:
            drawn.add_column(Text(wording.clean(name)), overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(wording.clean(cell)) for cell in row))
        parts.append(drawn)
    parts += [Text(f"Note: {wording.clean(note)}", style="yellow") for note in comparison.notes]
    return Group(
        *parts, Text(wording.clean(headline(comparison)), style="bold red" if comparison.outliers else "bold green")
    )


def headline(comparison: RunComparison) -> str:
    """What the comparison found, in one line."""
    outliers = comparison.outliers
    if not comparison.rows:
        return "There is nothing to compare: the runs have no figure in common."
    if not outliers:
        return f"No outlier among {wording.count(len(comparison.rows), 'figure')} of {len(comparison.runs)} runs."
    worst = outliers[0]
    return (
        f"{wording.count(len(outliers), 'outlier')}; the worst: {worst.figure.metric.title} of "
        f"{wording.place(worst.place)} in {worst.run}, {wording.percent(worst.worse)} worse."
    )


def _tables(comparison: RunComparison, most_columns: int) -> list[ComparisonTable]:
    tables = [_runs(comparison), _outliers(comparison), _figures(comparison, most_columns)]
    return [table for table in tables if table.rows]


def _runs(comparison: RunComparison) -> ComparisonTable:
    rows = (
        (
            name,
            record.run.host,
            record.run.utc,
            f"{len(record.topology.gpus)} x {models(record)}" if record.topology.gpus else models(record),
            record.verdict or "died",
        )
        for name, record in comparison.runs.items()
    )
    return ComparisonTable("The runs", ("Run", "Host", "Date (UTC)", "GPUs", "Verdict"), tuple(rows))


def _outliers(comparison: RunComparison) -> ComparisonTable:
    rows = (
        (
            outlier.run,
            outlier.identity if outlier.identity != str(outlier.place) else wording.place(outlier.place),
            _what(outlier.figure),
            wording.quantity(outlier.value, outlier.figure.metric.unit),
            wording.quantity(outlier.reference, outlier.figure.metric.unit),
            wording.percent(outlier.worse),
        )
        for outlier in comparison.outliers
    )
    reference = "First run" if len(comparison.runs) == 2 else "Median"
    return ComparisonTable(
        "Outliers, the worst first", ("Run", "Where", "What", "Measured", reference, "Worse by"), tuple(rows)
    )


def _figures(comparison: RunComparison, most_columns: int) -> ComparisonTable:
    runs = tuple(comparison.runs) if len(comparison.runs) <= most_columns else ()
    last = "Change" if len(comparison.runs) == 2 else "Spread"
    rows = (
        (
            _what(row.figure),
            *(_cell(row, index) for index in range(len(runs))),
            wording.quantity(row.median, row.figure.metric.unit),
            _change(row) if last == "Change" else wording.percent(row.spread),
            str(row.outliers or ""),
        )
        for row in comparison.rows
    )
    caption = "Figures: the worst place of each run" if runs else "Figures"
    return ComparisonTable(caption, ("Figure", *runs, "Median of all places", last, "Outliers"), tuple(rows))


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


def _what(figure: Figure) -> str:
    return ", ".join([figure.metric.title, *wording.words(dict(figure.conditions))])
