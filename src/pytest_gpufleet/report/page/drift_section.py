"""One machine over time: what got worse."""

from __future__ import annotations

from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.several_runs import SeveralRuns, Table, runs_table, what
from pytest_gpufleet.verdict.across_runs.drift import Drift, Worsened


def drifted(drift: Drift, say: Say = english) -> SeveralRuns:
    """What is to be told of a machine over time."""
    bad = bool(drift.worse or drift.faults) or not drift.compared
    tables = (runs_table(drift.runs, say), _worse(drift, say), _faults(drift, say))
    return SeveralRuns(headline(drift, say), bad, drift.notes, tables)


def headline(drift: Drift, say: Say = english) -> str:
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
                place=wording.place(worst.place, say=say),
                percent=wording.percent(worst.worse),
            )
        )
    return f"{say('; ').join(parts)}{say('.')}"


def _worse(drift: Drift, say: Say) -> Table:
    rows = (
        (
            each.identity if each.identity != str(each.place) else wording.place(each.place, say=say),
            what(each.figure, say),
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


def _faults(drift: Drift, say: Say) -> Table:
    newest = list(drift.runs.values())[-1].topology
    rows = (
        (", ".join(map(newest.identity, fault.subjects)), fault.what, say(fault.kind.action)) for fault in drift.faults
    )
    return Table(say("Counters of errors that grew"), (say("Where"), say("What"), say("Action")), tuple(rows))
