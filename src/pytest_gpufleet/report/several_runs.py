"""Several runs beside each other, or one machine over time: for the terminal, as a page, as JSON and as CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.tables import Table, csv_text, difference, number, of_figure, on_screen, row, what
from pytest_gpufleet.verdict.across_runs.drift import Drift
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, RunComparison, figures
from pytest_gpufleet.verdict.fleet.equality import models
from pytest_gpufleet.verdict.outliers import Figure, Outlier

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class SeveralRuns:
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
    rows = (
        row(
            name,
            record.run.host,
            wording.moment(record.run.utc),
            f"{len(record.topology.gpus)} x {models(record)}" if record.topology.gpus else say(models(record)),
            say(record.verdict or "died"),
            fields={"host": record.run.host, "utc": record.run.utc, "verdict": record.verdict},
        )
        for name, record in runs.items()
    )
    return Table(say("The runs"), "Run", ("Host", "Began", "GPUs", "Verdict"), tuple(rows))


def _document(runs: Table, notes: Iterable[str], **found: Any) -> dict[str, Any]:
    tables = {name: each.fields if isinstance(each, Table) else each for name, each in found.items()}
    return {"runs": {row.name: row.fields for row in runs.rows}, "notes": list(notes), **tables}


def _of_place(place: Where, identity: str, figure: Figure) -> dict[str, Any]:
    return {"place": str(place), "identity": identity, **of_figure(figure)}


# Of CSV. `median`: that of all places; only outliers, or what got worse, have a `reference` and by what fraction.
COLUMNS = (
    "run", "host", "utc", "place", "identity", "metric", "unit", "conditions", "value", "median", "reference", "worse",
)  # fmt: skip


def values_compared(comparison: RunComparison) -> str:
    """Every value of the figures that were compared, as CSV."""
    outliers = {(each.run, each.figure, each.place): each for each in comparison.outliers}
    medians = {row.figure: row.median for row in comparison.rows}
    return _csv(
        {
            **_run(name, record),
            **_of_place(place, record.topology.identity(place), figure),
            "value": value,
            "median": medians[figure],
            **_reference(outliers.get((name, figure, place))),
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
            **_of_place(each.place, each.identity, each.figure),
            "value": value,
            **_reference(each if name == last else None),
        }
        for each in drift.worse
        for name, value in each.history.items()
    )


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    return csv_text((COLUMNS, *([row.get(column) for column in COLUMNS] for row in rows)))


def _run(name: str, record: Record) -> dict[str, str]:
    return {"run": name, "host": record.run.host, "utc": record.run.utc}


def _reference(found: Outlier | None) -> dict[str, float | None]:
    return {"reference": number(found.reference), "worse": found.worse} if found else {}


# More columns than this no terminal has room for.
MOST_COLUMNS = 4


def compared(comparison: RunComparison, most_columns: int) -> SeveralRuns:
    """What is to be told of a comparison; a column for each run only if they are at most so many."""
    runs, outliers, compared = _runs(comparison.runs), _outliers(comparison), _figures(comparison, most_columns)
    bits = [difference(each) for each in comparison.other_bits]
    document = _document(runs, comparison.notes, outliers=outliers, fingerprints=bits, figures=compared)
    bad = bool(comparison.outliers or comparison.other_bits) or not comparison.rows
    tables = (runs, _other_bits(comparison), outliers, compared)
    return SeveralRuns(_side_by_side(comparison), bad, comparison.notes, tables, document)


def _side_by_side(comparison: RunComparison) -> str:
    """What the comparison found, in one line."""
    outliers, runs, figures = comparison.outliers, len(comparison.runs), len(comparison.rows)
    if comparison.other_bits:
        apart = comparison.other_bits[0]
        machines = say(", ").join(apart.hosts)
        if apart.usual is None:
            text = "These compute different bits, and which are wrong is not known: {machines}."
            return say(text, machines=machines)
        return say("Computes other bits than most with the same GPUs and libraries: {machines}.", machines=machines)
    if not figures:
        return say("There is nothing to compare: the runs have no measurement in common.")
    if not outliers:
        one, several = (
            "No outlier among 1 measurement of {runs} runs.",
            "No outlier among {count} measurements of {runs} runs.",
        )
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


def _who(found: Outlier) -> str:
    return found.identity if found.identity != str(found.place) else wording.place(found.place)


def _other_bits(comparison: RunComparison) -> Table:
    rows = (
        row(machine, say(each.fact), value, each.usual or say("not known"))
        for each in comparison.other_bits
        for value, machines in each.others.items()
        for machine in machines
    )
    return Table(say("Other bits from the same data"), "Run", ("What", "Computed", "Most have"), tuple(rows))


def _outliers(comparison: RunComparison) -> Table:
    rows = (
        row(
            each.run,
            _who(each),
            what(each.figure),
            wording.quantity(each.value, each.figure.metric.unit),
            wording.quantity(each.reference, each.figure.metric.unit),
            wording.percent(each.worse),
            fields={
                "run": each.run,
                **_of_place(each.place, each.identity, each.figure),
                "value": number(each.value),
                **_reference(each),
            },
        )
        for each in comparison.outliers
    )
    reference = "First run" if len(comparison.runs) == 2 else "Median"
    heads = ("Where", "What", "Measured", reference, "Worse by")
    return Table(say("Outliers, the worst first"), "Run", heads, tuple(rows))


def _figures(comparison: RunComparison, most_columns: int) -> Table:
    runs = tuple(comparison.runs) if len(comparison.runs) <= most_columns else ()
    last = "Change" if len(comparison.runs) == 2 else "Spread"
    rows = (
        row(
            what(each.figure),
            *(_cell(each, index) for index in range(len(runs))),
            wording.quantity(each.median, each.figure.metric.unit),
            _change(each) if last == "Change" else wording.percent(each.spread),
            str(each.outliers or ""),
            fields={
                **of_figure(each.figure),
                "worst": {
                    name: {"place": str(worst[0]), "value": number(worst[1])}
                    for name, worst in zip(comparison.runs, each.worst, strict=True)
                    if worst
                },
                "median": number(each.median),
                "spread": number(each.spread),
            },
        )
        for each in comparison.rows
    )
    caption = "Measurements: the worst place of each run" if runs else "Measurements"
    return Table(say(caption), "Measurement", (*runs, "Median of all places", last, "Outliers"), tuple(rows))


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
    runs, worse, faults = tables = (_runs(drift.runs), _worse(drift), _faults(drift))
    document = _document(runs, drift.notes, compared=drift.compared, worse=worse, faults=faults)
    return SeveralRuns(_over_time(drift), bad, drift.notes, tables, document)


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
    if drift.faults:
        grew = "{count} counters of errors grew" if len(drift.faults) != 1 else "1 counter of errors grew"
        parts.append(say(grew, count=len(drift.faults)))
    if drift.worse:
        worst = drift.worse[0]
        one = "1 measurement got worse in {run}; the worst: {metric} of {place}, {percent} worse"
        more = "{count} measurements got worse in {run}; the worst: {metric} of {place}, {percent} worse"
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
        row(
            _who(each),
            what(each.figure),
            _history(each),
            wording.percent(each.worse),
            wording.percent(each.allowed),
            fields={
                **_of_place(each.place, each.identity, each.figure),
                "gpus": list(each.gpus),
                "history": {name: number(value) for name, value in each.history.items()},
                **_reference(each),
                "noise": each.allowed,
            },
        )
        for each in drift.worse
    )
    heads = ("What", "From run to run", "Worse by", "Noise")
    return Table(say("What got worse, the worst first"), "Where", heads, tuple(rows))


def _history(each: Outlier) -> str:
    """ "6,200, 6,110, 5,900 images/s" """
    *before, last = each.history.values()
    quantities = [wording.number(value) for value in before] if each.figure.metric.unit != "ratio" else []
    earlier = quantities or [wording.percent(value) for value in before]
    return ", ".join([*earlier, wording.quantity(last, each.figure.metric.unit)])


def _faults(drift: Drift) -> Table:
    newest = list(drift.runs.values())[-1].topology
    rows = (
        row(", ".join(map(newest.identity, each.subjects)), each.what, say(each.kind.action), fields=codec.plain(each))
        for each in drift.faults
    )
    return Table(say("Counters of errors that grew"), "Where", ("What", "Action"), tuple(rows))
