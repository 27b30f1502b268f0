"""`gpufleet judge` and `gpufleet report`: a run held against other limits, and its report made again."""

import argparse
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.finding import GRADES, Grade
from pytest_gpufleet.model.language import LANGUAGES
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.banner import stamp
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import NODES, RunFolder
from pytest_gpufleet.run.settings import naming
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.fleet.fleet_verdict import ended
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, kept


def _judge(given: argparse.Namespace, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    from pytest_gpufleet.report.terminal import summary_lines

    with folder.of_anybody():
        record = judged(folder, given.fleet_profile, given.fleet_basis)
        runs, digest = folder.own_runs(record), folder.digest()
        if given.output:
            from pytest_gpufleet.report.page import page

            reports = folder.reports(runs.values(), given.output.parent)
            command.write(given.output, page(record, digest, runs, reports))
        document = codec.plain(summary.summary(record, digest, runs=runs))
        lines = summary_lines.summary_lines(record)
    if not given.json:
        with command.printing():
            command.print_lines(lines)
            if given.output:
                command.print_line(f"report: {given.output}")
    assert record.exit_status is not None
    return record.exit_status, {"summary": document}


def judged(folder: RunFolder, given: Path | None, basis: Grade | None) -> Record:
    """A run by the limits of a file or the shipped ones; of many nodes each first. Refused if evidence differs."""
    record = verify.checked(folder, nodes=False).record
    own: dict[int, HostRun] = {}
    for number, end in record.finished.items():
        if end.sha256:
            of_node = folder.of_node(record.node(number))
            again = kept(judged(of_node, given, basis), Common(), record.hosts[number])
            own[number] = HostRun(f"{NODES}/{of_node.name}", end.sha256, again)
            if of_node.digest() != end.sha256:
                raise Refused(f"{of_node}: its evidence is not that that the run over all nodes names")
    with naming("--fleet-profile"):
        limits = profile.choose(given, {gpu.name for gpu in record.topology.gpus})
    return judge_again(record, limits, basis, own)


def _make_again(given: argparse.Namespace, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    from pytest_gpufleet.report.page import page
    from pytest_gpufleet.report.terminal.summary_lines import text_report

    output, files = given.output, {}
    with folder.of_anybody():
        found = verify.checked(folder)
        runs = folder.own_runs(found.record)
        record = ended(found.record, runs)
        result: dict[str, Any] = {"verdict": record.verdict}
        if given.text:
            result["text"] = "".join(text_report(record, str(folder)))
            files = {output: result["text"]} if output else {}
        else:
            reports = folder.reports(runs.values(), (output or folder.report).parent)
            html = page(record, found.digest, runs, reports, given.language)
            files = {output or folder.report: html}
            if output is None:
                page_sum = hashlib.sha256(html.encode()).hexdigest()
                files[folder.summary] = summary.text(record, found.digest, page_sum, runs)
            result["files"] = [str(path) for path in files]
    if folder.report in files and (signed := verify.signed_by(folder)):
        raise Refused(f"{folder} is signed by {', '.join(map(ascii, signed))}: write this report to -o FILE")
    for path, text in files.items():
        command.write(path, text)
    if not given.json:
        with command.printing():
            if files:
                command.print_line(f"{next(iter(files))}: {stamp(record).word}")
            else:
                print(result["text"], end="")
    return 0, result


JUDGE = command.Command(
    "re-evaluate a recorded run against other limits, without the machine",
    partial(command.for_each, _judge),
    (
        command.folders("the folders of runs"),
        command.file("--fleet-profile", metavar="PATH",
                     help="limits from this TOML file (default: the shipped ones for this GPU model)"),
        command.argument("--fleet-basis", choices=GRADES, metavar="GRADE", help="lowest accepted grade of limits: "
                         f"{', '.join(GRADES)} (default: what the run asked for)"),
        command.as_json(),
        command.output("write a report of this judgement as HTML, of one folder"),
    ),
    "What a check compared itself, like the number of GPUs, is not judged again.",
    "Else as of a run: 0 ACCEPTED or a clean REHEARSAL, 1 REJECTED, 10 INCOMPLETE; of several runs the worst.",
)  # fmt: skip

REPORT_AGAIN = command.Command(
    "write report.html and summary.json of a run again from its evidence alone, also of a run that died",
    partial(command.for_each, _make_again),
    (
        command.folders("the folders of runs"),
        command.as_json("no lines, but one JSON object"),
        command.argument("--text", action="store_true", help="as text, as in report.txt: print it and write no file"),
        command.argument("--language", choices=LANGUAGES, help="of the report (default: that of the run)"),
        command.output("write the report there, and nothing else, of one folder"),
    ),
)
