"""One machine over time: what got worse."""

from __future__ import annotations

from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.several_runs import SeveralRuns, Table, runs_table, what
from pytest_gpufleet.verdict.across_runs.drift import Drift, Worsened


def drifted(drift: Drift) -> SeveralRuns:
    """What is to be told of a machine over time."""
    bad = bool(drift.worse or drift.faults) or not drift.compared
    return SeveralRuns(headline(drift), bad, drift.notes, (runs_table(drift.runs), _worse(drift), _faults(drift)))


def headline(drift: Drift) -> str:
    """What was found, in one line."""
    *_, last = drift.runs
    if not drift.compared and not drift.faults:
        return f"There is nothing to compare: no earlier run has a figure of a GPU of {last}."
    if not drift.worse and not drift.faults:
        figures, runs = wording.count(drift.compared, "figure"), wording.count(len(drift.runs) - 1, "earlier run")
        return f"Nothing got worse in {last}: {figures} held against {runs}."
    parts = []
    if drift.faults:
        parts.append(f"{wording.count(len(drift.faults), 'counter')} of errors grew")
    if drift.worse:
        worst = drift.worse[0]
        parts.append(
            f"{wording.count(len(drift.worse), 'figure')} got worse in {last}; the worst: {worst.figure.metric.title} "
            f"of {wording.place(worst.place)}, {wording.percent(worst.worse)} worse"
        )
    return f"{'; '.join(parts)}."


def _worse(drift: Drift) -> Table:
    rows = (
        (
            each.identity if each.identity != str(each.place) else wording.place(each.place),
            what(each.figure),
            _history(each),
            wording.percent(each.worse),
            wording.percent(each.allowed),
        )
        for each in drift.worse
    )
    return Table(
        "What got worse, the worst first", ("Where", "What", "From run to run", "Worse by", "Noise"), tuple(rows)
    )


def _history(each: Worsened) -> str:
    """ "6,200, 6,110, 5,900 images/s" """
    *before, last = each.history.values()
    quantities = [wording.number(value) for value in before] if each.figure.metric.unit != "ratio" else []
    earlier = quantities or [wording.percent(value) for value in before]
    return ", ".join([*earlier, wording.quantity(last, each.figure.metric.unit)])


def _faults(drift: Drift) -> Table:
    newest = list(drift.runs.values())[-1].topology
    rows = ((", ".join(map(newest.identity, fault.subjects)), fault.what, fault.kind.action) for fault in drift.faults)
    return Table("Counters of errors that grew", ("Where", "What", "Action"), tuple(rows))
