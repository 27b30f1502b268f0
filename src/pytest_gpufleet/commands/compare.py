"""`gpufleet compare`: runs side by side, or one machine over time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model.language import LANGUAGES, in_language

if TYPE_CHECKING:
    from pytest_gpufleet.model.record import Record
    from pytest_gpufleet.report.several_runs import SeveralRuns

FILE_COLUMNS = 160  # where the output is no terminal, which would say how wide it is


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.several_runs import MOST_COLUMNS, page, screen

    command.check_output(given.output)
    runs = {name: run.record for name, run in verify.all_checked([given.first, *given.others]).items()}
    build = _compared(runs, given.same_machine)
    shown = build(MOST_COLUMNS)
    if given.output:
        with in_language(given.language):
            command.write(given.output, page(build(len(runs))))
    console = command.new_console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    with command.printing():
        if given.json:
            print(json.dumps(shown.document))
            return int(shown.bad)
        console.print(screen(shown))
        if given.output:
            command.print_line(f"report: {given.output}")
    return int(shown.bad)


def _compared(runs: Mapping[str, Record], same_machine: bool) -> Callable[[int], SeveralRuns]:
    """The tables, for as many columns as there is room for."""
    from pytest_gpufleet.report.several_runs import compared, drifted
    from pytest_gpufleet.verdict.across_runs.drift import drift
    from pytest_gpufleet.verdict.across_runs.run_comparison import compare

    if same_machine:
        found = drift(runs)
        return lambda columns: drifted(found)
    return partial(compared, compare(runs))


COMPARE = command.Command(
    "compare runs: one node over time, or many nodes of one GPU model, and name the outliers",
    _run,
    (
        command.folder(name="first"),
        command.folders("the folders of those to compare it with", "others"),
        command.argument("--same-machine", action="store_true",
                         help="compare each GPU of the last run, by its UUID, with its own earlier runs, and name what "
                         "got worse"),
        command.as_json("no tables, but one JSON object"),
        command.output("write the comparison as HTML"),
        command.argument("--language", choices=LANGUAGES, default="en", help="of that page (default: en)"),
    ),
    "An outlier is worse than the same place in most of the runs by more than healthy machines differ; of two runs, "
    "the second is held against the first.",
    "1 also if there is an outlier, if something got worse, or if there is nothing to compare.",
)  # fmt: skip
