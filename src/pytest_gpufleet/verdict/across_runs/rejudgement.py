"""Recorded figures held against other limits, without the machine they come from."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, by_check
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.limit import Grade
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.accusations import searched
from pytest_gpufleet.verdict.given_limits import as_given, instead
from pytest_gpufleet.verdict.judgement import LimitMissed, judge, network_of, unsteady
from pytest_gpufleet.verdict.node_verdicts import faults_of, finished, outcome_of_all
from pytest_gpufleet.verdict.profile import Profile, of_every_gpu, shipped
from pytest_gpufleet.verdict.verdict import DIED, settled

# Checks of earlier versions that took for a fault of the machine what was none, and what that was.
WITHDRAWN = {"test_3_exactness.py::test_tensors_with_gaps_are_exact_or_refused": "torch 2.11 does not refuse them all"}


def judge_again(
    record: Record, profile: Profile | None, basis: Grade | None = None, own: Mapping[int, Record] | None = None
) -> Record:
    """The record as it would be if `profile` had been the limits of the run, and `basis` what it asked of them; None:
    what it did ask.

    Every figure is judged again, peers and steadiness included, and so is every check that failed for missed limits
    alone. A check that failed for any other reason stays failed, unless it was withdrawn, and figures of a rehearsal
    stay not judged. What a check compared itself, like the number of GPUs, is not judged again.

    `own`: of a run on many nodes the records of their own runs, by their numbers, judged again before.
    """
    anew = partial(
        judge, profile=profile, topology=record.topology, rehearsal=record.run.rehearsal, network=network_of(record),
        measured=[each.measurement for each in record.findings],
    )  # fmt: skip
    findings = [new for finding in record.findings for new in _findings(finding, anew, record.topology)]
    now = by_check(each for each in findings if each.state == "missed")
    checks = {
        name: _check(check, now.get(name, []), searched(record, name), record.topology)
        for name, check in record.checks.items()
    }
    by = f"the limits of profile {profile.name}" if profile else "no limits"
    note = f"the figures of {record.run.host}, {record.run.utc}, judged again with {by}"
    header = msgspec.structs.replace(
        record.run,
        profile=profile.name if profile else None,
        profile_sha256=sha256(profile.path) if profile else None,
        basis=basis or record.run.basis,
    )
    left = [fault for fault in record.faults if levels.check_name(fault.check) not in WITHDRAWN]
    faults = [fault for fault in left if fault.check in now or fault not in searched(record, fault.check)]
    given = as_given(profile, [gpu.name for gpu in record.topology.gpus]) if profile else None
    limits = instead(None if profile in (*shipped(), of_every_gpu()) else given, record.profile)
    again = replace(
        record, run=header, judged_again=note, profile=limits, findings=findings, checks=checks, faults=faults
    )
    again = settled(_with_nodes(again, own or {}), DIED if record.verdict is None else record.broken)
    return replace(again, reasons=[note, *again.reasons])


def _with_nodes(record: Record, own: Mapping[int, Record]) -> Record:
    """The record of a run on many nodes as it would be if these had been the records of its nodes' own runs. What is
    left of other nodes, and between nodes, stays as it is."""
    known, there = record.suite.known_as, defaultdict[str, dict[int, Check]](dict)
    for number, each in own.items():
        for name, check in each.checks.items():
            there[known(name)][number] = check
    ended = {}
    for number, each in own.items():
        reasons = [reason for reason in each.reasons if reason != each.judged_again]
        before = record.finished[number]
        ended[number] = finished(number, before.run, replace(each, reasons=reasons), before.sha256)
    left = [
        fault
        for fault in record.faults
        if known(fault.check) not in there or fault.name == "node_lost" or fault.nodes - own.keys()
    ]
    now = [
        fault.changed(check=name)
        for name in record.checks
        for number, check in there[known(name)].items()
        for fault in faults_of(number, own[number], check.id)
    ]
    return replace(
        record,
        finished={**record.finished, **ended},
        checks={name: _on_nodes(check, there[known(name)], record) for name, check in record.checks.items()},
        faults=[*left, *now],
    )


def _on_nodes(check: Check, found: Mapping[int, Check], record: Record) -> Check:
    """A check by what it came to on each of these nodes; one that failed at another node has failed."""
    at = {number for fault in record.faults if fault.check == check.id for number in fault.nodes}
    if not found or (check.outcome == "failed" and at - found.keys()):
        return check
    outcome = outcome_of_all(each.outcome for each in found.values())
    messages = {record.hosts[number]: each.message for number, each in found.items() if each.outcome == outcome}
    message = "\n\n".join(f"{host}: {text}" for host, text in messages.items() if text)
    return replace(check, outcome=outcome, message=message, failed_by="other" if outcome == "failed" else "")


def _findings(finding: Finding, anew: Callable[..., Finding], topology: GpuTopology) -> list[Finding]:
    if finding.measurement.metric == "spread":  # it follows from another figure
        return []
    if finding.again:  # only the one after it counts
        return [finding]
    new = anew(finding.measurement, check=finding.check, required=finding.required)
    return [new, *filter(None, [unsteady(new, topology)])]


def _check(check: Check, now: list[Finding], causes: list[Fault], topology: GpuTopology) -> Check:
    match check.outcome, check.failed_by, bool(now):
        case ("passed", _, True) | ("failed", "limits", True):
            before = f"\n\nWhen it ran:\n{check.message}" if check.message else ""
            message = str(LimitMissed(now, topology, causes))  # which were found when it ran, and still hold
            return replace(check, outcome="failed", failed_by="limits", message=message + before)
        case ("failed", "limits", False):
            return replace(check, outcome="passed", message="", failed_by="")
        case ("failed", _, False) if why := WITHDRAWN.get(levels.check_name(check.id)):
            return replace(check, outcome="skipped", message=f"withdrawn: {why}", failed_by="")
    return check
