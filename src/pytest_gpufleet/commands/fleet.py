"""`gpufleet fleet`: the runs of many hosts as one fleet."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from pytest_gpufleet.commands import hosts_file
from pytest_gpufleet.commands.command import Command, print_lines, printing, tell
from pytest_gpufleet.commands.recorded import unaltered
from pytest_gpufleet.commands.writing import check_is_new, check_output, write
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, Unusable, kept


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=RunFolder.of, nargs="+", metavar="DIR", help="the folders of the hosts' runs")
    parser.add_argument(
        "--expect", type=Path, metavar="FILE",
        help="the hosts that there have to be: a name on each line, ranges as in node-[001,003-007], remarks behind #",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="no summary, but one JSON object")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report of the fleet as HTML")


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.terminal.fleet_lines import fleet_lines

    check_output(given.output, [given.expect])
    check_is_new(given.output)
    expected = hosts_file.read(given.expect) if given.expect else None
    runs, unusable = _runs(given.folders)
    fleet = judge_fleet(runs, unusable, expected)
    if given.output:
        from pytest_gpufleet.report.page.fleet_page import page

        write(given.output, page(fleet, _reports(fleet.hosts, given.output)))
    with printing():
        if given.json:
            from pytest_gpufleet.report import fleet_json

            print(json.dumps(fleet_json.document(fleet)))
        else:
            print_lines(fleet_lines(fleet))
            if given.output:
                tell(f"report: {given.output}")
    return fleet.exit_status


def _runs(folders: Sequence[RunFolder]) -> tuple[list[HostRun], list[Unusable]]:
    """What can be used of these folders, one after the other: no more than one whole record is in memory at a time.
    Files beside the folders, which `reports/*` names too, are none of a run."""
    runs, unusable, suites = [], [], list[Suite]()
    for folder in _once(folder for folder in folders if not folder.path.is_file()):
        try:
            with folder.of_anybody():
                record, digest = unaltered(folder)
                runs.append(HostRun(str(folder), digest, kept(record, suites)))
        except Refused as refused:
            unusable.append(Unusable(str(folder), _host_of(folder), str(refused).removeprefix(f"{folder}: ")))
    return runs, unusable


def _once(folders: Iterable[RunFolder]) -> Iterable[RunFolder]:
    return {folder.path.resolve(): folder for folder in folders}.values()


def _host_of(folder: RunFolder) -> str:
    """Whose run this says it is; "" if it does not say."""
    try:
        record: Record = read(folder.evidence)
    except (OSError, ValueError):
        return ""
    return record.run.host


def _reports(hosts: Sequence[HostRun], output: Path) -> dict[str, str]:
    """The addresses of the hosts' own reports, by their folders, as seen from the page."""
    reports = {run.folder: RunFolder.of(run.folder).report for run in hosts}
    there = {folder: os.path.relpath(report, output.parent) for folder, report in reports.items() if report.is_file()}
    return {folder: quote(path) for folder, path in there.items()}


FLEET = Command(
    "merge the runs of many hosts, made by any launcher, into the report of one fleet",
    _arguments,
    _run,
    "The fleet is REJECTED if a host is, if hosts are not alike, or if a GPU is worse than its peers on all hosts; "
    "INCOMPLETE if a host is missing, was not expected or is incomplete.",
    "Else as of a run: 0 ACCEPTED or a clean REHEARSAL, 1 REJECTED, 10 INCOMPLETE.",
)
