"""`gpufleet compare`: runs side by side, or one machine over time."""

import argparse
import json

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model.language import LANGUAGES, in_language

FILE_COLUMNS = 160  # where the output is no terminal, which would say how wide it is


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.several_runs import document, page, screen
    from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift

    command.check_output(given.output)
    runs = {name: run.record for name, run in verify.all_checked([given.first, *given.others]).items()}
    found = drift(runs) if given.same_machine else compare(runs)
    if given.output:
        with in_language(given.language):
            command.write(given.output, page(found))
    console = command.new_console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    with command.printing():
        if given.json:
            print(json.dumps(document(found)))
        else:
            console.print(screen(found))
            if given.output:
                command.print_line(f"report: {given.output}")
    return int(found.bad)


COMPARE = command.Command(
    "compare runs: one node over time, or many nodes of one GPU model, and name the outliers",
    _run,
    (
        command.folder(name="first"),
        command.folder("the folders of those to compare it with", "others", nargs="+", metavar="OTHER_DIR"),
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
