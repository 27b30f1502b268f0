"""Several runs beside each other, or one machine over time: for the terminal, as a page, and as JSON."""

import math
from typing import Any

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.tables import Row, Table, number, of_figure, row, what
from pytest_gpufleet.verdict.across_runs.run_comparison import ComparedFigure, RunComparison
from pytest_gpufleet.verdict.fleet.equality import models
from pytest_gpufleet.verdict.outliers import Outlier

# A column for each run only if they are at most so many: more no terminal has room for.
MOST_COLUMNS = 4


def page(found: RunComparison) -> str:
    """A self-contained HTML page."""
    notes = [wording.clean(say(note)) for note in found.notes]
    return render(
        "comparison.html.jinja", title=say("GPU acceptance runs compared"), headline=headline(found), notes=notes,
        made="Made by {tool} from the evidence of each run.", tables=tables(found, len(found.runs)),
    )  # fmt: skip


def document(found: RunComparison) -> dict[str, Any]:
    """The same for programs."""
    runs = found.runs.items()
    worse = [
        {
            "run": each.run, "place": str(each.place), "identity": each.identity, **of_figure(each.figure),
            "value": number(each.value), "reference": number(each.reference), "worse": each.worse,
            "noise": each.allowed, "gpus": list(each.gpus),
            "history": {name: number(value) for name, value in each.history.items()},
        }
        for each in found.worse
    ]  # fmt: skip
    figures = []
    for each in found.rows:
        at_worst = ((name, at) for name, at in zip(found.runs, each.worst, strict=True) if at)
        worst = {name: {"place": str(place), "value": number(value)} for name, (place, value) in at_worst}
        middle = {"median": number(each.median), "spread": number(each.spread)}
        figures.append({**of_figure(each.figure), "worst": worst, **middle})
    return {
        "runs": {name: {"host": of.run.host, "utc": of.run.utc, "verdict": of.verdict} for name, of in runs},
        "notes": list(found.notes), "compared": found.compared, "worse" if found.over_time else "outliers": worse,
        "fingerprints": codec.plain(found.other_bits), "faults": codec.plain(found.faults), "figures": figures,
    }  # fmt: skip


def headline(found: RunComparison) -> str:
    last, figures = [*found.runs][-1], wording.count(found.compared, "measurement")
    if found.other_bits:
        apart = found.other_bits[0]
        unknown = "These compute different bits, and which are wrong is not known: {machines}."
        known = "Computes other bits than most with the same GPUs and libraries: {machines}."
        return say(unknown if apart.usual is None else known, machines=say(", ").join(apart.hosts))
    if not found.compared and not found.faults:
        none_before = "There is nothing to compare: no earlier run has a measurement of a GPU of {run}."
        nothing = "There is nothing to compare: the runs have no measurement in common."
        return say(none_before if found.over_time else nothing, run=last)
    if not found.worse and not found.faults:
        several = wording.count(len(found.runs) - found.over_time, "earlier run" if found.over_time else "run")
        text = "Nothing got worse in {run}: {figures} compared with {runs}."
        text = text if found.over_time else "No outlier among {figures} of {runs}."
        return say(text, run=last, figures=figures, runs=several)
    parts = []
    if found.faults:
        parts.append(say("{counters} grew", counters=wording.count(len(found.faults), "counter of errors")))
    for worst in found.worse[:1]:
        count = wording.count(len(found.worse), "measurement" if found.over_time else "outlier")
        text = "{count} got worse in {run}; the worst: {metric} of {place}, {percent} worse"
        text = text if found.over_time else "{count}; the worst: {metric} of {place} in {run}, {percent} worse"
        metric, place = say(worst.figure.metric.title), wording.place(worst.place)
        percent = wording.percent(worst.worse)
        parts.append(say(text, count=count, run=worst.run, metric=metric, place=place, percent=percent))
    return f"{say('; ').join(parts)}{say('.')}"


def tables(found: RunComparison, most_columns: int) -> list[Table]:
    """Those that have rows, with a column for each run only if they are at most so many."""
    newest = list(found.runs.values())[-1].topology
    runs = []
    for name, record in found.runs.items():
        gpus, run = len(record.topology.gpus), record.run
        model = f"{gpus} x {models(record)}" if gpus else say(models(record))
        runs.append(row(name, run.host, wording.moment(run.utc), model, say(record.verdict or "died")))
    bits = (
        row(machine, say(each.fact), value, each.usual or say("not known"))
        for each in found.other_bits
        for value, machines in each.others.items()
        for machine in machines
    )
    grew = (row(", ".join(map(newest.identity, of.subjects)), of.what, say(of.kind.action)) for of in found.faults)
    shown = tuple(found.runs) if len(found.runs) <= most_columns else ()
    last = "Change" if len(found.runs) == 2 else "Spread"
    figures = (
        row(
            what(each.figure),
            *(_cell(at, each.figure.metric.unit) for at in each.worst[: len(shown)]),
            wording.quantity(each.median, each.figure.metric.unit),
            _change(each) if last == "Change" else wording.percent(each.spread),
            each.outliers or "",
        )
        for each in found.rows
    )
    caption = "Measurements: the worst place of each run" if shown else "Measurements"
    over_time = "What got worse, the worst first" if found.over_time else "Outliers, the worst first"
    heads = ("What", "Measured", "Held against", "Worse by", "Noise")
    made = (
        Table(say("The runs"), "Run", ("Host", "Began", "GPUs", "Verdict"), tuple(runs)),
        Table(say("Other bits from the same data"), "Run", ("What", "Computed", "Most have"), tuple(bits)),
        Table(say(over_time), "Run", ("Where", *heads), tuple(map(_worse, found.worse))),
        Table(say("Counters of errors that grew"), "Where", ("What", "Action"), tuple(grew)),
        Table(say(caption), "Measurement", (*shown, "Median of all places", last, "Outliers"), tuple(figures)),
    )
    return [table for table in made if table.rows]


def _worse(each: Outlier) -> Row:
    """Over time with what was measured in each run: "6,200, 6,110, 5,900 images/s"."""
    unit, before = each.figure.metric.unit, list(each.history.values())[:-1]
    form = wording.percent if unit == "ratio" else wording.number
    measured = ", ".join([*map(form, before), wording.quantity(each.value, unit)])
    shares = map(wording.percent, (each.worse, each.allowed))
    where = each.identity if each.identity != str(each.place) else wording.place(each.place)
    return row(each.run, where, what(each.figure), measured, wording.quantity(each.reference, unit), *shares)


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
