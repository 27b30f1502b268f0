"""`gpufleet report`: the report of a run, made again from its evidence."""

from __future__ import annotations

import argparse
import hashlib
from functools import partial
from pathlib import Path

from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import Command, check_output, tell, write
from pytest_gpufleet.commands.recorded import Done, check_one, checked, for_each
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.language import LANGUAGES, Language
from pytest_gpufleet.report.banner import stamp
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.verdict import ended


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=RunFolder.of, nargs="+", metavar="DIR", help="the folders of runs")
    parser.add_argument("--json", action="store_true", help="no lines, but one JSON object")
    parser.add_argument("--language", choices=LANGUAGES, help="of the report (default: that of the run)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the report there, and nothing else, of one folder"
    )


def _run(given: argparse.Namespace) -> int:
    check_output(given.output)
    check_one(given.folders, given.output)
    return for_each(given.folders, partial(_again, given.output, given.language), given.json)


def _again(output: Path | None, language: Language | None, folder: RunFolder) -> Done:
    from pytest_gpufleet.report.page.report_page import page

    with folder.of_anybody():
        found = checked(folder)
        record, digest = ended(found.record), found.digest
        runs = folder.own_runs(record)
        reports = folder.reports(runs.values(), (output or folder.report).parent)
        html = page(record, digest, runs, reports, language)
    if output is None and (signed := signatures.names(folder)):
        raise Refused(f"{folder} is signed by {', '.join(map(ascii, signed))}: write this report to -o FILE")
    document = summary.text(record, digest, hashlib.sha256(html.encode()).hexdigest())
    files = {output: html} if output else {folder.report: html, folder.summary: document}
    for path, text in files.items():
        write(path, text)
    told = {"verdict": record.verdict, "files": [str(path) for path in files]}
    return Done(0, told, partial(tell, f"{output or folder.report}: {stamp(record).word}"))


REPORT_AGAIN = Command(
    "write report.html and summary.json of a run again from its evidence alone, also of a run that died",
    _arguments,
    _run,
)
