"""What is made of recorded runs: the report again, a judgement by other limits, comparison, export, profile, order."""

import argparse
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.finding import GRADES, Grade
from pytest_gpufleet.model.language import LANGUAGES, in_language
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.redaction import clean
from pytest_gpufleet.report.banner import stamp
from pytest_gpufleet.report.tables import on_screen
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import NODES, SUMMARY, RunFolder
from pytest_gpufleet.run.settings import naming
from pytest_gpufleet.verdict import orders, profile
from pytest_gpufleet.verdict.across_runs import calibration
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.fleet.fleet_verdict import ended
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, kept


@command.subcommand(
    "re-evaluate a recorded run against other limits, without the machine",
    command.folders(help="the folders of runs"),
    command.file("--fleet-profile", metavar="PATH", help="limits from a TOML file (default: the shipped ones)"),
    command.argument("--fleet-basis", choices=GRADES, metavar="GRADE", help="lowest accepted grade of limits: "
                     f"{', '.join(GRADES)} (default: what the run asked for)"),
    command.as_json(help="no summary, but one JSON object"),
    command.output(help="write a report of this judgement as HTML, of one folder"),
    details="What a check compared itself, like the number of GPUs, is not judged again.",
    statuses="Else as of a run: 0 ACCEPTED or a clean REHEARSAL, 1 REJECTED, 10 INCOMPLETE; of several runs the worst.",
)  # fmt: skip
@command.for_each
def judge(given: argparse.Namespace, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    from pytest_gpufleet.report.terminal import summary_lines

    with folder.of_anybody():
        record, runs = judged(folder, given.fleet_profile, given.fleet_basis)
        (_, fleet), digest = ended(record, runs), folder.digest()
        if given.output:
            from pytest_gpufleet.report.page import page

            command.write(given.output, page(record, digest, fleet, folder.reports(runs.values(), given.output.parent)))
        document = codec.plain(summary.summary(record, digest, fleet=fleet))
        lines = summary_lines.summary_lines(record)
    if not given.json:
        command.print_lines(lines, given.output)
    assert record.exit_status is not None
    return record.exit_status, {"summary": document}


def judged(folder: RunFolder, given: Path | None, basis: Grade | None) -> tuple[Record, dict[int, HostRun]]:
    """A run by the limits of a file or the shipped ones; of many nodes each first. Refused if evidence differs."""
    record = verify.checked(folder, nodes=False).record
    own: dict[int, HostRun] = {}
    for number, end in record.finished.items():
        if end.sha256:
            of_node = folder.of_node(record.node(number))
            again, _ = judged(of_node, given, basis)
            again = kept(again, Common(), record.hosts[number])
            own[number] = HostRun(f"{NODES}/{of_node.name}", end.sha256, again)
            if of_node.digest() != end.sha256:
                raise Refused(f"{of_node}: its evidence is not that that the run over all nodes names")
    with naming("--fleet-profile"):
        limits = profile.choose(given, {gpu.name for gpu in record.topology.gpus})
    return judge_again(record, limits, basis, own), own


@command.subcommand(
    "write report.html and summary.json of a run again from its evidence alone, also of a run that died",
    command.folders(help="the folders of runs"),
    command.as_json(help="no lines, but one JSON object"),
    command.argument("--text", action="store_true", help="as text, as in report.txt: print it and write no file"),
    command.argument("--language", choices=LANGUAGES, help="of the report (default: that of the run)"),
    command.output(help="write the report there, and nothing else, of one folder"),
)  # fmt: skip
@command.for_each
def report(given: argparse.Namespace, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    from pytest_gpufleet.report.page import page
    from pytest_gpufleet.report.terminal.summary_lines import text_report

    output: Path = given.output or folder.report
    with folder.of_anybody():
        found = verify.checked(folder)
        record, fleet = found.ended, found.fleet
        reports = folder.reports(fleet.hosts, output.parent) if fleet else {}
        if given.text:
            text = text_report(record, str(folder))
        else:
            text = page(record, found.digest, fleet, reports, given.language)
        files = {output: text} if given.output or not given.text else {}
        if output == folder.report and files:
            if signed := verify.signed_by(folder):
                raise Refused(f"{folder} is signed by {', '.join(map(ascii, signed))}: write this report to -o FILE")
            page_sum = hashlib.sha256(text.encode()).hexdigest()
            files[folder / SUMMARY] = summary.text(record, found.digest, page_sum, fleet)
    for path, content in files.items():
        command.write(path, content)
    if not given.json:
        with command.printing():
            if files:
                command.print_line(f"{output}: {stamp(record).word}")
            else:
                print(text, end="")
    return 0, {"verdict": record.verdict, **({"text": text} if given.text else {"files": [*map(str, files)]})}


@command.subcommand(
    "compare runs: one node over time, or many nodes of one GPU model, and name the outliers",
    command.folder("first", help="the folder of a run"),
    command.folder("others", nargs="+", metavar="OTHER_DIR", help="the folders of those to compare it with"),
    command.argument("--same-machine", action="store_true",
                     help="compare each GPU of the last run, by its UUID, with its own earlier runs, and name what "
                     "got worse"),
    command.as_json(help="no tables, but one JSON object"),
    command.output(help="write the comparison as HTML"),
    command.argument("--language", choices=LANGUAGES, default="en", help="of that page (default: en)"),
    details="An outlier is worse than the same place in most of the runs by more than healthy machines differ; of two "
    "runs, the second is held against the first.",
    statuses="1 also if there is an outlier, if something got worse, or if there is nothing to compare.",
)  # fmt: skip
def compare(given: argparse.Namespace) -> int:
    from rich.text import Text

    from pytest_gpufleet.report import several_runs
    from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift

    command.check_output(given.output)
    runs = {name: run.record for name, run in verify.all_checked([given.first, *given.others]).items()}
    found = drift(runs) if given.same_machine else compare(runs)
    if given.output:
        with in_language(given.language):
            command.write(given.output, several_runs.page(found))
    console = command.new_console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # columns in a file
    with command.printing():
        if given.json:
            print(json.dumps(several_runs.document(found)))
        else:
            console.print(*map(on_screen, several_runs.tables(found, several_runs.MOST_COLUMNS)), sep="\n")
            for note in found.notes:
                console.print(Text(f"Note: {clean(note)}", style="yellow"))
            console.print(Text(clean(several_runs.headline(found)), style="bold red" if found.bad else "bold green"))
            if given.output:
                command.print_line(f"report: {given.output}")
    return int(found.bad)


@command.subcommand(
    "write measurements, curves and telemetry of a run for TensorBoard, SwanLab or as CSV",
    command.FOLDER,
    command.argument("--to", choices=("tensorboard", "swanlab", "csv"), required=True, help="what it is for"),
    command.output(help="a new folder, or an empty one, to write to", required=True, metavar="FOLDER"),
    details="It works offline, from the evidence alone.",
)  # fmt: skip
def export(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report import exports

    to, output = given.to, given.output
    if find_spec(to) is None:  # also the name of the extra that installs it; csv is there
        raise Refused(f"--to {to} needs {to}, which is not installed: pip install 'pytest-gpufleet[{to}]'")
    with given.folder.of_anybody():
        run = verify.checked(given.folder)
        about, points = exports.about(run.record, run.digest), exports.points(run.record)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise Refused(f"{output} is not empty and is left as it is: name another folder")
        exports.WRITERS[to](about, points, output)
    except OSError as error:
        raise Refused(f"{output} cannot be written to: {error.strerror}") from None
    command.print_line(f"{output}: {len({point.tag for point in points})} series, {len(points)} points")
    return 0


@command.subcommand(
    "write a profile with limits from runs on known-good machines",
    command.folders(help="the folders of known-good runs"),
    command.output(help="the profile to write, a TOML file", required=True),
    command.argument("--replace-shipped", action="store_true",
                     help="also write limits where weaker shipped ones hold (default: only where none holds)"),
    details="A limit is the mean of these machines, with how much they and their GPUs differ. It refuses runs that "
    "were not clean, and runs that differ in GPU model, in software, or by more than 10 % in a measurement.",
)  # fmt: skip
def calibrate(given: argparse.Namespace) -> int:
    command.check_output(given.output, new=True)
    found = verify.all_checked(given.folders)
    runs = {name: run.record for name, run in found.items()}
    sums = {name: run.digest for name, run in found.items()}
    text, lines = calibration.calibrate(runs, sums, replace_shipped=given.replace_shipped)
    command.write(given.output, text)
    written = profile.load(given.output)
    models = ", ".join(written.match)
    for line in (f"{given.output}: {len(written.limits)} limits for {models}; use it with --fleet-profile", *lines):
        command.print_line(line)
    return 0


@command.subcommand(
    "write an order file from a known-good machine, for --fleet-order",
    command.folder("folder", help="the folder of a run on a machine that is right"),
    command.output(help="the order to write, a TOML file", required=True),
    details="It is read from the evidence of a run; an existing file is left as it is.",
)  # fmt: skip
def order(given: argparse.Namespace) -> int:
    command.check_output(given.output, new=True)
    with given.folder.of_anybody():
        record = verify.checked(given.folder).record
        if record.of_cluster:
            raise Refused(f"{given.folder} is of several nodes: give the folder of one of them, in its nodes/")
        if not record.topology.gpus:
            raise Refused(f"{given.folder} has no GPUs: an order comes from a run on a whole machine")
        command.write(given.output, orders.order_text(record, given.folder.name))
    orders.load(given.output)  # what it refuses is a defect of ours
    what = f"what {record.run.host} has; compare it with what was bought"
    command.print_line(f"{given.output}: {what}, and use it with --fleet-order")
    if record.verdict != "ACCEPTED":
        came_to = record.verdict or "did not come to its end"
        command.print_line(f"that run: {came_to}; what is wrong with the machine may stand in its order")
    return 0
