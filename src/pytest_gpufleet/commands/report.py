"""`gpufleet report`: the report of a run, made again from its evidence."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import Command, tell
from pytest_gpufleet.commands.writing import check_output, write
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.verdict import DIED, settled


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report there, and nothing else")


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.page.standalone import page

    folder, output = given.folder, given.output
    check_output(output)
    with folder.of_anybody():
        record, digest = folder.record(), folder.digest()
        if record.verdict is None:
            record = settled(record, DIED)
        runs = folder.own_runs(record)
        reports = folder.reports(runs.values(), (output or folder.report).parent)
        html, document = page(record, digest, runs, reports), summary.text(record, digest)
    if output is None:
        if signed := signatures.names(folder):
            raise Refused(f"{folder} is signed by {', '.join(map(ascii, signed))}: write this report to -o FILE")
        # A report that belongs to other evidence may be the only trace of what this evidence was before.
        for name, stated in folder.stated_sums().items():
            if stated and stated != digest:
                raise Refused(f"{folder / name} was made of other evidence: write this report to another -o FILE")
    write(output or folder.report, html)
    if output is None:
        write(folder.summary, document)
    tell(f"{output or folder.report}: {record.verdict}")
    return 0


REPORT_AGAIN = Command(
    "write report.html and summary.json of a run again from its evidence alone, also of a run that died",
    _arguments,
    _run,
)
