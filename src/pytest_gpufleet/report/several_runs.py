"""Several runs beside each other, or one machine over time: for the terminal, as a page, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.tables import Table, difference, number, of_figure, on_screen, row, what
from pytest_gpufleet.verdict.across_runs.drift import Drift
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, RunComparison
from pytest_gpufleet.verdict.fleet.equality import models
from pytest_gpufleet.verdict.outliers import Outlier

if TYPE_CHECKING:
    from rich.console import Group


class SeveralRuns(NamedTuple):
    """What was found, in one line and in tables; `bad`: it is something that should not be. Tables without rows are
    left out. `document`: the same for programs."""

    headline: str
    bad: bool
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    document: Mapping[str, Any]


def page(found: SeveralRuns) -> str:
    """A self-contained HTML page."""
    return render(
        "comparison.html.jinja",
        title=say("GPU acceptance runs compared"),
        made="Made by {tool} from the evidence of each run.",
        headline=found.headline,
        notes=[wording.clean(say(note)) for note in found.notes],
        tables=[table for table in found.tables if table.rows],
    )


def screen(found: SeveralRuns) -> Group:
    """What rich prints on a terminal."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(on_screen(table) for table in found.tables if table.rows),
        *(Text(f"Note: {wording.clean(note)}", style="yellow") for note in found.notes),
        Text(wording.clean(found.headline), style="bold red" if found.bad else "bold green"),
    )


def _runs(runs: Mapping[str, Record]) -> Table:
    rows = []
    for name, record in runs.items():
        run, gpus = record.run, record.topology.gpus
        fields = {"host": run.host, "utc": run.utc, "verdict": record.verdict}
        model = f"{len(gpus)} x {models(record)}" if gpus else say(models(record))
        rows.append(row(name, run.host, wording.moment(run.utc), model, say(record.verdict or "died"), fields=fields))
    return Table(say("The runs"), "Run", ("Host", "Began", "GPUs", "Verdict"), tuple(rows))


def _document(runs: Table, notes: Iterable[str], **found: Any) -> dict[str, Any]:
    tables = {name: each.fields if isinstance(each, Table) else each for name, each in found.items()}
    return {"runs": {row.name: row.fields for row in runs.rows}, "notes": list(notes), **tables}


def _fields(of: Outlier) -> dict[str, Any]:
    where = {"place": str(of.place), "identity": of.identity, **of_figure(of.figure)}
    return {**where, "reference": number(of.reference), "worse": of.worse}


def _who(found: Outlier) -> str:
    return found.identity if found.identity != str(found.place) else wording.place(found.place)


def _worst(worst: Outlier) -> dict[str, str]:
    """What a headline says of it."""
    metric, place = say(worst.figure.metric.title), wording.place(worst.place)
    return {"metric": metric, "place": place, "percent": wording.percent(worst.worse)}


# More columns than this no terminal has room for.
MOST_COLUMNS = 4


def compared(comparison: RunComparison, most_columns: int) -> SeveralRuns:
    """What is to be told of a comparison; a column for each run only if they are at most so many."""
    runs, outliers, compared = _runs(comparison.runs), _outliers(comparison), _figures(comparison, most_columns)
    bits = [difference(each) for each in comparison.other_bits]
    document = _document(runs, comparison.notes, outliers=outliers, fingerprints=bits, figures=compared)
    bad = bool(comparison.outliers or comparison.other_bits) or not comparison.rows
    others = tuple(
        row(machine, say(each.fact), value, each.usual or say("not known"))
        for each in comparison.other_bits
        for value, machines in each.others.items()
        for machine in machines
    )
    other_bits = Table(say("Other bits from the same data"), "Run", ("What", "Computed", "Most have"), others)
    tables = (runs, other_bits, outliers, compared)
    return SeveralRuns(_side_by_side(comparison), bad, comparison.notes, tables, document)


def _side_by_side(comparison: RunComparison) -> str:
    """What the comparison found, in one line."""
    outliers, runs, figures = comparison.outliers, len(comparison.runs), len(comparison.rows)
    if comparison.other_bits:
        apart = comparison.other_bits[0]
        unknown = "These compute different bits, and which are wrong is not known: {machines}."
        known = "Computes other bits than most with the same GPUs and libraries: {machines}."
        return say(unknown if apart.usual is None else known, machines=say(", ").join(apart.hosts))
    if not figures:
        return say("There is nothing to compare: the runs have no measurement in common.")
    if not outliers:
        one, several = (
            "No outlier among 1 measurement of {runs} runs.",
            "No outlier among {count} measurements of {runs} runs.",
        )
        return say(one if figures == 1 else several, count=figures, runs=runs)
    one = "1 outlier; the worst: {metric} of {place} in {run}, {percent} worse."
    several = "{count} outliers; the worst: {metric} of {place} in {run}, {percent} worse."
    text = one if len(outliers) == 1 else several
    return say(text, count=len(outliers), run=outliers[0].run, **_worst(outliers[0]))


def _outliers(comparison: RunComparison) -> Table:
    rows = []
    for each in comparison.outliers:
        held = (wording.quantity(value, each.figure.metric.unit) for value in (each.value, each.reference))
        fields = {"run": each.run, **_fields(each), "value": number(each.value)}
        rows.append(row(each.run, _who(each), what(each.figure), *held, wording.percent(each.worse), fields=fields))
    reference = "First run" if len(comparison.runs) == 2 else "Median"
    heads = ("Where", "What", "Measured", reference, "Worse by")
    return Table(say("Outliers, the worst first"), "Run", heads, tuple(rows))


def _figures(comparison: RunComparison, most_columns: int) -> Table:
    runs = tuple(comparison.runs) if len(comparison.runs) <= most_columns else ()
    last = "Change" if len(comparison.runs) == 2 else "Spread"
    rows = []
    for each in comparison.rows:
        by_run = zip(comparison.runs, each.worst, strict=True)
        worst = {name: {"place": str(at[0]), "value": number(at[1])} for name, at in by_run if at}
        fields = {"worst": worst, "median": number(each.median), "spread": number(each.spread)}
        cells = (
            *(_cell(at, each.figure.metric.unit) for at in each.worst[: len(runs)]),
            wording.quantity(each.median, each.figure.metric.unit),
            _change(each) if last == "Change" else wording.percent(each.spread),
            str(each.outliers or ""),
        )
        rows.append(row(what(each.figure), *cells, fields={**of_figure(each.figure), **fields}))
    caption = "Measurements: the worst place of each run" if runs else "Measurements"
    return Table(say(caption), "Measurement", (*runs, "Median of all places", last, "Outliers"), tuple(rows))


def _cell(worst: tuple[Where, float] | None, unit: str) -> str:
    if worst is None:
        return "—"
    value = wording.quantity(worst[1], unit)
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
    newest = list(drift.runs.values())[-1].topology
    grew = tuple(
        row(", ".join(map(newest.identity, each.subjects)), each.what, say(each.kind.action), fields=codec.plain(each))
        for each in drift.faults
    )
    faults = Table(say("Counters of errors that grew"), "Where", ("What", "Action"), grew)
    runs, worse = _runs(drift.runs), _worse(drift)
    document = _document(runs, drift.notes, compared=drift.compared, worse=worse, faults=faults)
    return SeveralRuns(_over_time(drift), bad, drift.notes, (runs, worse, faults), document)


def _over_time(drift: Drift) -> str:
    """What was found, in one line."""
    *earlier, last = drift.runs
    if not drift.compared and not drift.faults:
        return say("There is nothing to compare: no earlier run has a measurement of a GPU of {run}.", run=last)
    if not drift.worse and not drift.faults:
        figures = say("{count} measurements" if drift.compared != 1 else "1 measurement", count=drift.compared)
        runs = say("{count} earlier runs" if len(earlier) != 1 else "1 earlier run", count=len(earlier))
        return say("Nothing got worse in {run}: {figures} compared with {runs}.", run=last, figures=figures, runs=runs)
    parts = []
    if count := len(drift.faults):
        parts.append(say("{count} counters of errors grew" if count != 1 else "1 counter of errors grew", count=count))
    if count := len(drift.worse):
        one = "1 measurement got worse in {run}; the worst: {metric} of {place}, {percent} worse"
        more = "{count} measurements got worse in {run}; the worst: {metric} of {place}, {percent} worse"
        parts.append(say(one if count == 1 else more, count=count, run=last, **_worst(drift.worse[0])))
    return f"{say('; ').join(parts)}{say('.')}"


def _worse(drift: Drift) -> Table:
    rows = []
    for each in drift.worse:
        history = {name: number(value) for name, value in each.history.items()}
        fields = {**_fields(each), "gpus": list(each.gpus), "history": history, "noise": each.allowed}
        shares = map(wording.percent, (each.worse, each.allowed))
        rows.append(row(_who(each), what(each.figure), _history(each), *shares, fields=fields))
    heads = ("What", "From run to run", "Worse by", "Noise")
    return Table(say("What got worse, the worst first"), "Where", heads, tuple(rows))


def _history(each: Outlier) -> str:
    """ "6,200, 6,110, 5,900 images/s" """
    *before, last = each.history.values()
    form = wording.percent if each.figure.metric.unit == "ratio" else wording.number
    return ", ".join([*map(form, before), wording.quantity(last, each.figure.metric.unit)])
