"""`gpufleet compare`: runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpufleet.commands.command import Command, new_console, printing, tell
from pytest_gpufleet.commands.recorded import records_of
from pytest_gpufleet.commands.writing import check_output, write
from pytest_gpufleet.run.folder import RunFolder

FILE_COLUMNS = 160  # where the output is no terminal, which would say how wide it is


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "others", type=RunFolder.of, nargs="+", metavar="DIR", help="the folders of those to compare it with"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the comparison as HTML")


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.page import comparison_section as report
    from pytest_gpufleet.verdict.across_runs.run_comparison import compare

    check_output(given.output)
    comparison = compare(records_of([given.first, *given.others]))
    if given.output:
        write(given.output, report.page(comparison))
    console = new_console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    with printing():
        console.print(report.screen(comparison))
        if given.output:
            tell(f"report: {given.output}")
    return 1 if comparison.outliers or not comparison.rows else 0


COMPARE = Command(
    "set runs side by side: one node over time, or many nodes of one GPU model, and name the outliers",
    _arguments,
    _run,
    "An outlier is worse than the median of the same place over all runs by more than 3 % and by more than three "
    "standard deviations; of two runs, the second is held against the first.",
    "1 also if there is an outlier, or nothing to compare.",
)
