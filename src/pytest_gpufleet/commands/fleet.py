"""`gpufleet fleet`: the runs of many hosts as one fleet."""

import argparse
import json
from pathlib import Path

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.hosts_file import read_hosts
from pytest_gpufleet.model.language import LANGUAGES, in_language
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, Unusable, between, kept
from pytest_gpufleet.verdict.reading import read


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.terminal.summary_lines import fleet_lines

    command.check_output(given.output, [given.expect], new=True)
    expected = tuple(read_hosts(given.expect)) if given.expect else None
    found = _Found()
    once = {folder.path.resolve(): folder for folder in given.folders if not folder.path.is_file()}
    for folder in once.values():
        found.take(folder)
    fleet = judge_fleet(found.runs, found.unusable, expected, found.over_nodes)
    if given.output:
        from pytest_gpufleet.report.hosts import page

        reports = RunFolder(Path()).reports(fleet.hosts, given.output.parent)
        with in_language(given.language):
            command.write(given.output, page(fleet, reports))
    with command.printing():
        if given.json:
            from pytest_gpufleet.report import hosts

            print(json.dumps(hosts.document(fleet)))
        else:
            command.print_lines(fleet_lines(fleet))
            if given.output:
                command.print_line(f"report: {given.output}")
    return fleet.exit_status


class _Found:
    """What can be used of folders, one after the other: no more than one whole record is in memory at a time. Files
    beside the folders, which `reports/*` names too, are none of a run."""

    def __init__(self) -> None:
        self.runs: list[HostRun] = []
        self.unusable: list[Unusable] = []
        self.over_nodes: list[Record] = []
        self._suites: list[Suite] = []

    def take(self, folder: RunFolder, stated: str = "", host: str = "") -> None:
        """The run of a host, or those of all nodes of one on many, which says what SHA-256 the evidence of each must
        have, and its name: nodes that are processes of one machine have no other."""
        try:
            with folder.of_anybody():
                run = verify.checked(folder, nodes=False)
                record, digest = run.record, run.digest
                if stated and stated != digest:
                    raise Refused(f"{folder}: its evidence is not that that the run over all nodes names")
                if record.of_cluster:
                    self._take_nodes(folder, record)
                else:
                    self.runs.append(HostRun(str(folder), digest, kept(record, self._suites, host)))
        except Refused as refused:
            self.unusable.append(Unusable(str(folder), _host_of(folder), str(refused).removeprefix(f"{folder}: ")))

    def _take_nodes(self, folder: RunFolder, record: Record) -> None:
        before = len(self.runs)
        for number, end in record.finished.items():
            if end.sha256:
                self.take(folder.of_node(record.node(number)), end.sha256, record.hosts[number])
        self.over_nodes.append(between(record, dict(enumerate(self.runs[before:]))))


def _host_of(folder: RunFolder) -> str:
    """Whose run this says it is; "" if it does not say."""
    try:
        record: Record = read(folder.evidence)
    except (OSError, ValueError, Refused):
        return ""
    return record.run.host


FLEET = command.Command(
    "merge the runs of many hosts, made by any launcher, into the report of one fleet",
    _run,
    (
        command.folders("the folders of the hosts' runs"),
        command.file(
            "--expect",
            help="the hosts that there have to be: a name on each line, ranges as in "
            "node-[001,003-007], remarks behind #",
        ),
        command.as_json(),
        command.output("write the report of the fleet as HTML"),
        command.argument("--language", choices=LANGUAGES, default="en", help="of that report (default: en)"),
    ),
    "The fleet is REJECTED if a host is, if hosts are not alike, or if two measurements show one that is worse; "
    "INCOMPLETE if a host is missing, was not expected or is incomplete.",
    "Else as of a run: 0 ACCEPTED or a clean REHEARSAL, 1 REJECTED, 10 INCOMPLETE.",
)
