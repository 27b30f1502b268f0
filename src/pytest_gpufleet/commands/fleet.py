"""`gpufleet fleet`: the runs of many hosts as one fleet."""

import argparse
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.hosts_file import NAME, read_hosts
from pytest_gpufleet.model.language import LANGUAGES, in_language
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.settings import share
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet, Reason, judge_fleet
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, Unusable, expected_as, read_own
from pytest_gpufleet.verdict.judgement import read

# ---------------------------------------------------------------- what schedulers take

State = tuple[str, tuple[Reason, ...]]  # a node by the name that the site has for it, and why it failed, if it did
MOST_CODES = 5


def _states(fleet: Fleet, most: str) -> list[State]:
    """The nodes that failed, then those that are ACCEPTED and nothing is open about. Refused if more than `most`
    failed: then the cause may be one that they share, and a scheduler that drains them all has no nodes left."""
    if fleet.verdict == "REHEARSAL":
        raise Refused("a rehearsal says nothing about any GPU: there is nothing to hand on")
    failed = {each.host: each.reasons for each in fleet.failed}
    everybody = {*failed, *(run.host for run in fleet.hosts)}
    allowed = int(most) if most.isdigit() else max(1, len(everybody) * int(most[:-1]) // 100)
    if len(failed) > allowed:
        raise Refused(
            f"{len(failed)} of {len(everybody)} nodes failed, and --drain-at-most {most} lets one run drain {allowed}: "
            "nothing is printed. Look for a cause that they share (the report names it), such as a limit or a switch; "
            f"if all are to be drained, say --drain-at-most {len(failed)}"
        )
    open_points = {host for gap in fleet.gaps for host in gap.hosts}
    good = {run.host: () for run in fleet.hosts if run.record.verdict == "ACCEPTED" and run.host not in open_points}
    states = [(expected_as(host, fleet.expected or ()) or host, why) for host, why in ({**good, **failed}).items()]
    for name, _ in states:  # what is printed is run in a shell
        if not NAME.fullmatch(name):
            raise Refused(f"{name!r} is no name of a host: nothing is printed")
    return states


def _messages(reasons: tuple[Reason, ...]) -> str:
    text = "; ".join(f"{each.code} {each.name}: {each.message}" for each in reasons)
    return text[:1024] or "gpufleet: ACCEPTED"  # characters in the status of a node


def _slurm(states: list[State]) -> Iterator[str]:
    """Commands of scontrol. Nodes that are good are not resumed: who drained them knows what else it was for."""
    for name, reasons in states:
        if reasons:
            codes = list(dict.fromkeys(f"{each.code} {each.name}" for each in reasons))  # "404 links_slow"
            text = ", ".join(codes[:MOST_CODES]) + f" and {len(codes) - MOST_CODES} more" * (len(codes) > MOST_CODES)
            reason = shlex.quote(f"Reason=gpufleet REJECTED: {text}")
            yield f"scontrol update NodeName={name} State=DRAIN {reason}"


def _node_conditions(states: list[State]) -> Iterator[str]:
    """Commands of kubectl. A strategic merge patch replaces the condition of this type and leaves the others
    (patchMergeKey of NodeStatus.conditions in the API of Kubernetes)."""
    for name, reasons in states:
        camel = "".join(word.capitalize() for word in reasons[0].name.split("_")) if reasons else "Accepted"
        condition = {
            "type": "GpufleetRejected", "status": str(bool(reasons)), "reason": camel,
            "message": _messages(reasons),
            "lastHeartbeatTime": _now(), "lastTransitionTime": _now(),
        }  # fmt: skip
        patch = shlex.quote(json.dumps({"status": {"conditions": [condition]}}))
        yield f"kubectl patch node {name} --subresource=status --type=strategic --patch={patch}"


def _health_events(states: list[State]) -> Iterator[str]:
    """One message HealthEvents of NVSentinel as JSON, an event a node: by data-models/protobufs/health_event.proto at
    github.com/NVIDIA/NVSentinel, filled as its nvcre-certification-monitor does."""
    events = []
    for name, reasons in states:
        gpus = dict.fromkeys(gpu for each in reasons for gpu in each.gpus)
        events.append({
            "version": 1, "agent": "gpufleet", "componentClass": "Node", "checkName": "GpufleetRejected",
            "nodeName": name, "isFatal": bool(reasons), "isHealthy": not reasons, "message": _messages(reasons),
            # No action of its own accord: a person reads the report first.
            "recommendedAction": "CONTACT_SUPPORT" if reasons else "NONE",
            # Codes of XIDs are numbers of three digits too.
            "errorCode": list(dict.fromkeys(f"gpufleet/{each.code}" for each in reasons)),
            "entitiesImpacted": [
                {"entityType": "v1/Node", "entityValue": name},
                *({"entityType": "GPU_UUID", "entityValue": gpu} for gpu in gpus),
            ],
            "generatedTimestamp": _now(), "processingStrategy": "EXECUTE_REMEDIATION",
        })  # fmt: skip
    yield json.dumps({"version": 1, "events": events}, indent=1)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


FORMS: dict[str, Callable[[list[State]], Iterator[str]]] = {
    "slurm": _slurm, "node-condition": _node_conditions, "healthevent": _health_events,
}  # fmt: skip


def _read(folders: Iterable[RunFolder]) -> tuple[list[HostRun], list[Unusable], list[Record]]:
    """Runs of hosts, unusable folders, and runs over nodes. No more than one whole record is in memory at a time."""
    runs, unusable, over, common = list[HostRun](), list[Unusable](), list[Record](), Common()

    def take(folder: RunFolder, stated: str = "", host: str = "") -> None:
        """`stated`, `host`: SHA-256 and name, as a run over it has them; processes of one machine have no other."""
        whose = ""
        try:
            with folder.of_anybody():
                run = verify.checked(folder, nodes=False)
                record, digest = run.record, run.digest
                if stated and stated != digest:
                    raise Refused(f"{folder}: its evidence is not that that the run over all nodes names")
                if not record.of_cluster:
                    runs.append(HostRun(str(folder), digest, read_own(folder.evidence, common, host)))
                    return
                for number, end in record.finished.items():
                    if end.sha256:
                        take(folder.of_node(record.node(number)), end.sha256, record.hosts[number])
                over.append(record)
        except Refused as refused:
            with suppress(OSError, ValueError, Refused):  # else it does not say whose it is
                whose = read(folder.evidence).run.host
            unusable.append(Unusable(str(folder), whose, str(refused).removeprefix(f"{folder}: ")))

    for folder in folders:
        take(folder)
    return runs, unusable, over


@command.subcommand(
    "merge the runs of many hosts, made by any launcher, into the report of one fleet",
    command.folders(help="the folders of the hosts' runs"),
    command.file("--expect",
                 help="the hosts ordered: a name on each line, ranges as in node-[001,003-007], comments after #"),
    command.as_json(help="no summary, but one JSON object"),
    command.argument("--as", choices=FORMS, dest="form", help="print what drains the nodes that failed: commands of "
                     "scontrol, patches of a node's condition for kubectl, or a message HealthEvents of NVSentinel"),
    command.argument("--drain-at-most", type=share, metavar="N|SHARE", default="10%",
                     help="how many nodes --as lets one run drain, or which share of them, 1 at least (default: 10%%)"),
    command.output(help="write the report of the fleet as HTML"),
    command.argument("--language", choices=LANGUAGES, default="en", help="of that report (default: en)"),
    details="The fleet is REJECTED if a host is, if hosts are not alike, or if two measurements show one that is "
    "worse; INCOMPLETE if a host is missing, was not expected or is incomplete.",
    statuses="Else as of a run: 0 ACCEPTED or a clean REHEARSAL, 1 REJECTED, 10 INCOMPLETE.",
)  # fmt: skip
def fleet(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report import hosts
    from pytest_gpufleet.report.terminal.summary_lines import fleet_lines

    command.check_output(given.output, [given.expect], new=True)
    if given.json and given.form:
        raise Refused("--json and --as each say what is printed: give one of them")
    expected = tuple(read_hosts(given.expect)) if given.expect else None
    # Files beside the folders, which `reports/*` names too, are none of a run.
    folders = {folder.path.resolve(): folder for folder in given.folders if not folder.path.is_file()}
    runs, unusable, over = _read(folders.values())
    fleet = judge_fleet(runs, unusable, expected, over)
    if given.output:
        reports = RunFolder(Path()).reports(fleet.hosts, given.output.parent)
        with in_language(given.language):
            command.write(given.output, hosts.page(fleet, reports))
    if not given.form and not given.json:
        command.print_lines(fleet_lines(fleet), given.output)
        return fleet.exit_status
    lines = (
        FORMS[given.form](_states(fleet, given.drain_at_most)) if given.form else [json.dumps(hosts.document(fleet))]
    )
    text = "".join(f"{line}\n" for line in lines)
    with command.printing():
        print(text, end="")
    return fleet.exit_status
