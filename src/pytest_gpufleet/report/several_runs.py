"""What is told of several runs together, on the terminal and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.verdict.across_runs.drift import Drift, Worsened
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, Figure, Outlier, RunComparison
from pytest_gpufleet.verdict.fleet.equality import models

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Table:
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SeveralRuns:
    """What was found, in one line and in tables; `bad`: it is something that should not be. Tables without rows are
    left out."""

    headline: str
    bad: bool
    notes: tuple[str, ...]
    tables: tuple[Table, ...]


def page(told: SeveralRuns) -> str:
    """A self-contained HTML page."""
    return render(
        "comparison.html.jinja",
        title=say("GPU acceptance runs compared"),
        made="Made by {tool} from the evidence of each run.",
        headline=told.headline,
        notes=[wording.clean(say(note)) for note in told.notes],
        tables=[table for table in told.tables if table.rows],
    )


def screen(told: SeveralRuns) -> Group:
    """What rich prints on a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[RichTable | Text] = []
    for table in (table for table in told.tables if table.rows):
        drawn = RichTable(title=table.caption, title_justify="left", box=box.SIMPLE_HEAD)
        for name in table.header:
            drawn.add_column(Text(wording.clean(name)), overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(wording.clean(cell)) for cell in row))
        parts.append(drawn)
    parts += [Text(f"Note: {wording.clean(note)}", style="yellow") for note in told.notes]
    return Group(*parts, Text(wording.clean(told.headline), style="bold red" if told.bad else "bold green"))


def runs_table(runs: Mapping[str, Record]) -> Table:
    rows = (
        (
            name,
            record.run.host,
            wording.moment(record.run.utc),
            f"{len(record.topology.gpus)} x {models(record)}" if record.topology.gpus else say(models(record)),
            say(record.verdict or "died"),
        )
        for name, record in runs.items()
    )
    return Table(say("The runs"), (say("Run"), say("Host"), say("Began"), say("GPUs"), say("Verdict")), tuple(rows))


def what(figure: Figure) -> str:
    return say(", ").join([say(figure.metric.title), *wording.words(dict(figure.conditions))])


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
    return SeveralRuns(_side_by_side(comparison), bad, comparison.notes, tables)


def _side_by_side(comparison: RunComparison) -> str:
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
        place=wording.place(worst.place),
        run=worst.run,
        percent=wording.percent(worst.worse),
    )


def _who(found: Outlier | Worsened) -> str:
    return found.identity if found.identity != str(found.place) else wording.place(found.place)


def _other_bits(comparison: RunComparison) -> Table:
    rows = (
        (machine, say(each.fact), value, each.usual or say("nobody can say"))
        for each in comparison.other_bits
        for value, machines in each.others.items()
        for machine in machines
    )
    return Table(
        say("Other bits from the same data"), (say("Run"), say("What"), say("Computed"), say("Most have")), tuple(rows)
    )


def _outliers(comparison: RunComparison) -> Table:
    rows = (
        (
            outlier.run,
            _who(outlier),
            what(outlier.figure),
            wording.quantity(outlier.value, outlier.figure.metric.unit),
            wording.quantity(outlier.reference, outlier.figure.metric.unit),
            wording.percent(outlier.worse),
        )
        for outlier in comparison.outliers
    )
    reference = "First run" if len(comparison.runs) == 2 else "Median"
    heads = (say("Run"), say("Where"), say("What"), say("Measured"), say(reference), say("Worse by"))
    return Table(say("Outliers, the worst first"), heads, tuple(rows))


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
    heads = (say("Figure"), *runs, say("Median of all places"), say(last), say("Outliers"))
    return Table(say(caption), heads, tuple(rows))


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
    return f"{round(100 * (second[1] - first[1]) / abs(first[1]), 1) + 0.0:+.1f} %"  # never -0.0


def drifted(drift: Drift) -> SeveralRuns:
    """What is to be told of a machine over time."""
    bad = bool(drift.worse or drift.faults) or not drift.compared
    tables = (runs_table(drift.runs), _worse(drift), _faults(drift))
    return SeveralRuns(_over_time(drift), bad, drift.notes, tables)


def _over_time(drift: Drift) -> str:
    """What was found, in one line."""
    *earlier, last = drift.runs
    if not drift.compared and not drift.faults:
        return say("There is nothing to compare: no earlier run has a figure of a GPU of {run}.", run=last)
    if not drift.worse and not drift.faults:
        figures = say("{count} figures" if drift.compared != 1 else "1 figure", count=drift.compared)
        runs = say("{count} earlier runs" if len(earlier) != 1 else "1 earlier run", count=len(earlier))
        return say("Nothing got worse in {run}: {figures} held against {runs}.", run=last, figures=figures, runs=runs)
    parts = []
    if drift.faults:
        grew = "{count} counters of errors grew" if len(drift.faults) != 1 else "1 counter of errors grew"
        parts.append(say(grew, count=len(drift.faults)))
    if drift.worse:
        worst = drift.worse[0]
        one = "1 figure got worse in {run}; the worst: {metric} of {place}, {percent} worse"
        more = "{count} figures got worse in {run}; the worst: {metric} of {place}, {percent} worse"
        parts.append(
            say(
                more if len(drift.worse) != 1 else one,
                count=len(drift.worse),
                run=last,
                metric=say(worst.figure.metric.title),
                place=wording.place(worst.place),
                percent=wording.percent(worst.worse),
            )
        )
    return f"{say('; ').join(parts)}{say('.')}"


def _worse(drift: Drift) -> Table:
    rows = (
        (
            _who(each),
            what(each.figure),
            _history(each),
            wording.percent(each.worse),
            wording.percent(each.allowed),
        )
        for each in drift.worse
    )
    heads = (say("Where"), say("What"), say("From run to run"), say("Worse by"), say("Noise"))
    return Table(say("What got worse, the worst first"), heads, tuple(rows))


def _history(each: Worsened) -> str:
    """ "6,200, 6,110, 5,900 images/s" """
    *before, last = each.history.values()
    quantities = [wording.number(value) for value in before] if each.figure.metric.unit != "ratio" else []
    earlier = quantities or [wording.percent(value) for value in before]
    return ", ".join([*earlier, wording.quantity(last, each.figure.metric.unit)])


def _faults(drift: Drift) -> Table:
    newest = list(drift.runs.values())[-1].topology
    rows = (
        (", ".join(map(newest.identity, fault.subjects)), fault.what, say(fault.kind.action)) for fault in drift.faults
    )
    return Table(say("Counters of errors that grew"), (say("Where"), say("What"), say("Action")), tuple(rows))
