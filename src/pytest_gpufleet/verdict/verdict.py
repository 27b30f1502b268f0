"""What the evidence of a run amounts to."""

from dataclasses import replace
from datetime import datetime

from pytest_gpufleet.machine import kernel_log
from pytest_gpufleet.machine.pcie import PCI_DEVICES
from pytest_gpufleet.model.conditions import c_number
from pytest_gpufleet.model.events import NO_NETWORK, Check, VerdictWord
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import Said, say, some
from pytest_gpufleet.model.place import NVLS_SINCE, Missing, called
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import titled
from pytest_gpufleet.verdict import accusations, basis
from pytest_gpufleet.verdict.gaps import DEADLINE, UNFINISHED, gaps, newer, reasons
from pytest_gpufleet.verdict.judgement import scattered, shares_its_way

MOST_NAMES = 6  # of hosts in a reason
OF_COUNT = ("node_missing", "node_too_many")
DIED = "the run did not come to its end"
REHEARSED = "CPU ranks stood in for GPUs: this says nothing about any GPU"
# 0 and 1 as pytest means them; pytest does not use 10.
EXIT_STATUS = {"ACCEPTED": 0, "REJECTED": 1, "INCOMPLETE": 10}
INTERRUPTED = "the run was interrupted"
ENDED_BY = {name: f"the run was ended by {name}" for name in ("SIGTERM", "SIGHUP")}
RESUMABLE = (INTERRUPTED, *ENDED_BY.values(), DEADLINE)
# Exit statuses with which pytest says that a session did not come to its end.
CUT_SHORT = {
    2: INTERRUPTED,
    3: "pytest itself failed",
    4: "pytest was called in a wrong way, so nothing was tested",
    5: "no test was selected",
}


def conclude(record: Record) -> tuple[VerdictWord, list[str]]:
    """The verdict and the reasons for it, most important first, and what stands beside it."""
    word, failed, others = concluded(record)
    texts = [*(failure(check, record) for check in failed), *others]
    if word == "REHEARSAL":
        texts = [REHEARSED, *texts]
    if word == "ACCEPTED":
        where = f" on {len(record.hosts)} nodes" if record.of_cluster else ""
        of = f"of level {record.run.level}{' that its repair requires' if record.before else ''}"
        whole = f"all {len(record.required)} checks {of} ran and met their limits{where}"
        texts = [whole, *filter(None, [basis.described(record)])]
    return word, texts + (remarks(record) if word in ("ACCEPTED", "INCOMPLETE") else [])


def concluded(record: Record) -> tuple[VerdictWord, list[Check], list[str]]:
    """The verdict, the checks that are a reason for it because they failed, and its other reasons.

    REHEARSAL without GPUs; else REJECTED if any check failed or the health of a GPU got worse; else INCOMPLETE if
    anything is missing that the level requires; else ACCEPTED. What a process of somebody else explains could not be
    tested, which is INCOMPLETE. Of a run on many nodes this is of what was done between them: all is judged by
    fleet_verdict.settled."""
    failed = [check for check in record.checks.values() if check.outcome == "failed"]
    missing = [gap for gap in gaps(record) if gap.counts]
    cut_short = reasons((gap for gap in missing if gap.kind in UNFINISHED), record)
    if record.run.rehearsal:
        return "REHEARSAL", failed, cut_short
    # A check may have swallowed what it found; it is recorded all the same.
    seen, disturbed = {check.id for check in failed}, accusations.disturbed(record)
    swallowed = {finding.check for finding in record.findings if finding.state == "missed"} - seen - disturbed
    unseen = []
    for fault in (fault for fault in record.faults if fault.check not in seen | swallowed | disturbed):
        if not is_stated(record, fault):
            when = f"while {fault.check} ran" if fault.watched and fault.check else fault.check
            unseen.append(": ".join(filter(None, (when, fault.described(record.topology.identity)))))
    if seen - disturbed or swallowed or unseen:
        return "REJECTED", failed, [*unseen, *(f"{check} missed a limit" for check in sorted(swallowed)), *cut_short]
    return ("INCOMPLETE", [], reasons(missing, record)) if missing else ("ACCEPTED", [], [])


def remarks(record: Record) -> list[str]:
    """What a verdict does not cover, or did not see happen: GPUs that were left out, checks of earlier runs."""
    tested, present = len(record.topology.gpus), record.run.gpus_present
    lines = []
    if present > tested:
        lines.append(say("{tested} of the machine's {present} GPUs were tested", tested=tested, present=present))
    devices = PCI_DEVICES.of({} if record.of_cluster else record.machine.host)
    bound = 0 if isinstance(devices, Missing) else sum(each.kind == "gpu" for each in devices.values())
    if bound > present > 0:  # as the kernel lists them, whatever the driver says
        text = (
            "{bound} GPUs are bound to the NVIDIA driver, which shows {present}: the others are hidden from here, or "
            "did not start (RmInitAdapter in the kernel log)"
        )
        lines.append(say(text, bound=bound, present=present))
    able = all((gpu.compute_capability or (0, 0)) >= NVLS_SINCE for gpu in record.topology.gpus)
    off = c_number(record.run.environment.get("NCCL_NVLS_ENABLE") or "2") == 0
    if off and able and record.topology.fabric == "nvswitch":
        lines.append(say("NCCL_NVLS_ENABLE=0: reductions in the NVSwitches (NVLS) were switched off and not tested"))
    if record.run.without:
        lines.append(say("not judged by request (--fleet-without): {parts}", parts=", ".join(record.run.without)))
    if record.before and record.returns:
        of = {"run": record.returns.run, "when": _when(record.before.run.utc), "count": len(record.before.to_run_again)}
        text = (
            "back in service after {run} of {when} (checks that failed there: {count}; replaced: {parts}): required "
            "were these checks, what it left open, level quick, and what the replaced parts touch"
        )
        lines.append(say(text, parts=", ".join(record.returns.replaced) or say("nothing"), **of))
    if record.run.used:
        lines.append(say("judged as used hardware, as --fleet-used says"))
    if record.run.network == NO_NETWORK:
        lines.append(say("nothing was asked of the network, as --fleet-network none says"))
    elif record.run.network and record.of_cluster:
        text = "the network between nodes is judged by {rate} Gbit/s for each GPU (--fleet-network)"
        lines.append(say(text, rate=record.run.network))
    # That a GPU was exchanged shows in its board's part number. It is no fault: two H200 with numbers as unlike as
    # 692-2G520-0282-001 and 965-2G520-0041-000 were equally fast in everything. Who bought them may want to know. Of
    # many nodes their own reports tell it.
    gpus = () if record.of_cluster else record.topology.gpus
    boards = {gpu.index: board for gpu in gpus if (board := gpu.get("board_part_number"))}
    usual = max(boards.values(), key=list(boards.values()).count, default="")
    if others := [f"GPU {index} has {board}" for index, board in boards.items() if board != usual]:
        lines.append(f"not all boards have one part number: {usual}, but {', '.join(others)}")
    lines += [*_shared_ways(record), *basis.remarks_on(record)]
    lines += kernel_log.remarks(record.noticed)
    if since := newer(record):
        text = "{count} checks did not exist in {version} and do not count"
        text = text if len(since) != 1 else "{count} check did not exist in {version} and does not count"
        lines.append(say(text, count=len(since), version=record.run.plugin))
    outcomes = {record.suite.known_as(check.id): check.outcome for check in record.checks.values()}
    for earlier in record.run.resumed:
        carried = sum(check.run == earlier.run for check in record.checks.values())
        of = {"carried": carried, "checks": len(record.checks), "run": earlier.run, "when": _when(earlier.utc)}
        lines.append(say("{carried} of {checks} checks carried over from {run} of {when}", **of))
        for check in earlier.failed:
            of = {"run": earlier.run, "now": say(outcomes.get(record.suite.known_as(check), "not run"))}
            lines.append(say("{check}: failed in {run}, {now} in this run", check=titled(check), **of))
    return lines


def _when(utc: str) -> str:
    return datetime.fromisoformat(utc).strftime("%Y-%m-%d %H:%M UTC")


def _shared_ways(record: Record) -> list[str]:
    """Figures that count and whose samples differ by more than those of one GPU's own work may."""
    widest: dict[str, tuple[float, str]] = {}
    for finding in record.findings:
        for at, spread in scattered(finding).items() if shares_its_way(finding.measurement, record.topology) else ():
            title = say(finding.measurement.definition.title)
            widest[title] = max(widest.get(title, (0.0, "")), (spread, called(at, record.hosts)))
    text = "{metric}: samples differ by up to {spread} at {place}, as happens when others share the host or the network"
    return [say(text, metric=title, spread=f"{spread:.0%}", place=at) for title, (spread, at) in widest.items()]


def settled(record: Record, broken: str) -> Record:
    """The record with the verdict, its reasons and the exit status that follow from all else in it. A rehearsal ends
    with 1 if a check failed, else with 10 if it is broken or spoiled, else with 0."""
    record = replace(record, broken=broken)
    verdict, why = conclude(record)
    failed = any(check.outcome == "failed" for check in record.checks.values())
    rehearsed = "REJECTED" if failed else "INCOMPLETE" if broken or record.spoiled else "ACCEPTED"
    status = EXIT_STATUS[rehearsed if verdict == "REHEARSAL" else verdict]
    return replace(record, verdict=verdict, reasons=why, exit_status=status)


def failure(check: Check, record: Record, with_case: bool = True) -> str:
    """A check that failed, as a reason; of a run on many nodes, at which of them."""
    name = check.id if with_case else check.id.partition("[")[0]
    text = f"{say(check.title)} ({name})" if check.title else name
    numbers = {number for fault in record.faults if fault.check == check.id for number in fault.nodes}
    hosts = [host for number, host in record.hosts.items() if number in numbers] if record.of_cluster else []
    if not hosts:
        return text
    nodes, named = "1 node ({hosts})" if len(hosts) == 1 else "{count} nodes ({hosts})", some(hosts, MOST_NAMES)
    return f"{text}{say(': ')}{say(Said(nodes, count=len(hosts), hosts=named))}"


def not_as_many(record: Record) -> str:
    """That there are fewer or more nodes than were asked for; "" if there are as many."""
    wanted, there = record.run.nodes_wanted, len(record.hosts)
    if not wanted or wanted == there:
        return ""
    counted = f"{there} {'node is' if there == 1 else 'nodes are'} there, {wanted} were asked for"
    return next((fault.what for fault in record.faults if fault.name in OF_COUNT), counted)


def is_stated(record: Record, fault: Fault) -> bool:
    """Whether this fault is what the verdict over all nodes says of the nodes that are lost or missing."""
    if fault.name in OF_COUNT:
        return bool(not_as_many(record))
    return fault.name == "node_lost" and bool(fault.nodes) and fault.nodes <= record.lost.keys()
