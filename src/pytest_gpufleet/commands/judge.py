"""`gpufleet judge`: recorded figures held against other limits."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest_gpufleet.commands.command import Command, check_output, print_lines, tell, write
from pytest_gpufleet.commands.recorded import Done, check_one, checked, for_each
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.limit import GRADES, Grade
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.profiles import profile


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=RunFolder.of, nargs="+", metavar="DIR", help="the folders of runs")
    parser.add_argument(
        "--fleet-profile", type=Path, metavar="PATH",
        help="limits from this TOML file (default: the shipped ones for this GPU model)",
    )  # fmt: skip
    parser.add_argument(
        "--fleet-basis", choices=GRADES, metavar="GRADE",
        help=f"what limits have to be at least: {', '.join(GRADES)} (default: what the run asked for)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="no summary, but one JSON object")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write a report of this judgement as HTML, of one folder"
    )


def _run(given: argparse.Namespace) -> int:
    check_output(given.output, [given.fleet_profile])
    check_one(given.folders, given.output)
    return for_each(given.folders, partial(_judge, given), given.json)


def _judge(given: argparse.Namespace, folder: RunFolder) -> Done:
    from pytest_gpufleet.report.terminal import summary_lines

    with folder.of_anybody():
        try:
            record = judged(folder, given.fleet_profile, given.fleet_basis)
        except profile.FileError as error:
            raise Refused(f"--fleet-profile: {error}") from None
        if given.output:
            from pytest_gpufleet.report.page.report_page import page

            runs = folder.own_runs(record)
            reports = folder.reports(runs.values(), given.output.parent)
            write(given.output, page(record, folder.digest(), runs, reports))
        document = {"summary": codec.plain(summary.summary(record, folder.digest()))}
        lines = summary_lines.summary_lines(record)

    def show() -> None:
        print_lines(lines)
        if given.output:
            tell(f"report: {given.output}")

    assert record.exit_status is not None
    return Done(record.exit_status, document, show)


def judged(folder: RunFolder, given: Path | None, basis: Grade | None) -> Record:
    """A run by the limits of a given file, or the shipped ones; of one on many nodes first each node's own. Refused if
    the evidence of a node is not what the run over all tells of. FileError of a file that is bad or does not fit."""
    record = checked(folder, nodes=False).record
    own = {}
    for number, end in record.finished.items():
        if end.sha256:
            of_node = folder.of_node(record.node(number))
            own[number] = replace(judged(of_node, given, basis), telemetry=[], spans=[])  # half of its memory
            if of_node.digest() != end.sha256:
                raise Refused(f"{of_node}: its evidence is not that of which the run over all nodes tells")
    limits = profile.choose(given, {gpu.name for gpu in record.topology.gpus})
    return judge_again(record, limits, basis, own)


JUDGE = Command(
    "hold the figures that a run recorded against other limits, without the machine",
    _arguments,
    _run,
    "What a check compared itself, like the number of GPUs, is not judged again.",
    "Else as of a run: 0 ACCEPTED or a clean REHEARSAL, 1 REJECTED, 10 INCOMPLETE; of several runs the worst.",
)
