"""`gpufleet drill`: a rejected run without a fault, to try what follows one: drain, tickets, alerts."""

from __future__ import annotations

import argparse
import hashlib
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

from pytest_gpufleet import __version__
from pytest_gpufleet.commands.command import Command, print_lines, printing, tell
from pytest_gpufleet.commands.writing import write
from pytest_gpufleet.hardware import local_node
from pytest_gpufleet.hardware.node import NoGpus
from pytest_gpufleet.model import codec, place
from pytest_gpufleet.model.codes import CODES
from pytest_gpufleet.model.events import SCHEMA
from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.run.folder import JUNIT, RunFolder
from pytest_gpufleet.run.ground import NodeStanding, OwnMachine
from pytest_gpufleet.verdict.profiles import profile
from pytest_gpufleet.verdict.verdict import EXIT_STATUS, settled

FAULTS = {name: code for name, code in CODES.items() if code.action != "MONITOR"}  # which reject a machine


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fault", type=_code, required=True, metavar="CODE", help="number or name of a fault, like 201 or gpu_lost"
    )
    parser.add_argument("--gpu", type=int, metavar="N", help="the GPU to blame (default: the whole machine)")
    parser.add_argument(
        "--fleet-dir", type=Path, default=Path("reports"), metavar="DIR", help="where its folder is made"
    )
    parser.add_argument("--fleet-prometheus", type=Path, metavar="FILE", help="write it for Prometheus, as a run does")


def _code(text: str) -> str:
    name = next((name for name, code in CODES.items() if text in (name, str(code.number))), None)
    if name is None:
        near = get_close_matches(text, FAULTS, 1)
        hint = f"did you mean {near[0]}?" if near else "`gpufleet drill --help` lists all of them"
        raise argparse.ArgumentTypeError(f"{text!r} is no fault; {hint}")
    if name not in FAULTS:
        raise argparse.ArgumentTypeError(f"{text} rejects no machine, so nothing would follow: choose another")
    return name


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.page.standalone import page
    from pytest_gpufleet.report.terminal.summary_lines import summary_lines

    here = _standing()
    fault = _made_up(given.fault, given.gpu, here)
    now = datetime.now(timezone.utc)
    folder = RunFolder.make(given.fleet_dir, f"drill-{here.host}-{now:%Y%m%dT%H%M%SZ}")
    record, digest = _recorded(folder, here, fault, now)
    write(folder.summary, summary.text(record, digest))
    write(folder.report, page(record, digest))
    write(folder / JUNIT, _junit(record, fault))
    if given.fleet_prometheus:
        from pytest_gpufleet.report import prometheus

        prometheus.write(given.fleet_prometheus, record)
    print_lines(summary_lines(record))
    with printing():
        tell(f"report: {folder.report}")
    return EXIT_STATUS["REJECTED"]


def _standing() -> NodeStanding:
    with ExitStack() as stack:
        try:
            machine = OwnMachine(stack.enter_context(local_node.opened()))
        except NoGpus as reason:
            machine = OwnMachine.without_gpus(str(reason))
        (standing,) = machine.standing
    return standing


def _made_up(code: str, gpu: int | None, here: NodeStanding) -> Fault:
    if gpu is not None and gpu not in [each.index for each in here.topology.gpus]:
        raise Refused(f"there is no GPU {gpu} here: {here.topology.absent or f'{len(here.topology.gpus)} GPUs are'}")
    subject = place.THIS_NODE if gpu is None else place.gpu(gpu)
    return Fault(code, (subject,), "made up for a drill, nothing is wrong")


def _recorded(folder: RunFolder, here: NodeStanding, fault: Fault, now: datetime) -> tuple[Record, str]:
    """The record of the drill, and the SHA-256 of its evidence."""
    evidence = Evidence(folder.evidence)
    facts = {name: None if isinstance(value, Unavailable) else value for name, value in here.facts.items()}
    evidence.add("run", **_header(here, fault, now))
    evidence.add("topology", nodes=[codec.plain(here.topology)])
    evidence.add("machine", nodes=[{"taken": here.taken, "host": codec.plain(facts)}])
    evidence.add("suite", manifest=shipped().to_json())
    evidence.add("fault", fault=fault.to_json())
    ended = settled(evidence.record, "")
    evidence.add(
        "verdict", verdict=ended.verdict, reasons=ended.reasons, broken="", exit_status=ended.exit_status
    )  # fmt: skip
    evidence.seal()
    return evidence.record, evidence.sha256


def _header(here: NodeStanding, fault: Fault, now: datetime) -> Mapping[str, Any]:
    gpus = here.topology.gpus
    limits = profile.choose(None, {gpu.name for gpu in gpus})
    at = f" --gpu {fault.subjects[0].parts[0].index}" if fault.subjects != (place.THIS_NODE,) else ""
    return {
        "schema": SCHEMA,
        "drill": fault.code,
        "host": here.host,
        "nodes": codec.plain([here.found]),
        "utc": now.isoformat(timespec="seconds"),
        "command": f"gpufleet drill --fault {fault.code}{at}",
        "level": "quick",
        "gpus": str(len(gpus)),
        "gpus_present": len(gpus),
        "rehearsal": False,
        "ranks": len(gpus),
        "profile": limits.name if limits else None,
        "profile_sha256": hashlib.sha256(limits.path.read_bytes()).hexdigest() if limits else None,
        "python": platform.python_version(),
        "plugin": __version__,
    }


def _junit(record: Record, fault: Fault) -> str:
    """As pytest writes it for a check that failed."""
    told = f"{fault.kind.number} {fault.code} {fault.told()}"
    suite = Xml.Element("testsuite", name="gpufleet drill", tests="1", failures="1", errors="0", skipped="0")
    suite.set("timestamp", record.run.utc)
    suite.set("hostname", record.run.host)
    case = Xml.SubElement(suite, "testcase", classname="drill", name=fault.code, time="0")
    properties = Xml.SubElement(case, "properties")
    for name, value in (("drill", fault.code), ("fault", told)):
        Xml.SubElement(properties, "property", name=name, value=value)
    Xml.SubElement(case, "failure", message=f"DRILL: {told}").text = record.reasons[0]
    whole = Xml.Element("testsuites")
    whole.append(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(whole, encoding="unicode") + "\n"


DRILL = Command(
    "make a run that is rejected for a made-up fault, to try what follows one: drain, tickets, alerts",
    _arguments,
    _run,
    "Nothing is tested. It is marked as a drill wherever it is told, accepts nothing, and no other command takes it "
    "for a run.",
    "1 as of a run that is REJECTED, and nothing else that tells of success. CODE is one of "
    f"{', '.join(f'{code.number} {name}' for name, code in FAULTS.items())}.",
)
