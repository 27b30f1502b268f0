"""Recorded measurements re-evaluated against other limits, without their machine."""

from dataclasses import replace

import msgspec

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, Grade
from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.place import GpuTopology, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.accusations import searched
from pytest_gpufleet.verdict.basis import as_given, instead
from pytest_gpufleet.verdict.fleet.fleet_verdict import ALONE, judged
from pytest_gpufleet.verdict.fleet.host_runs import NodeRuns, between
from pytest_gpufleet.verdict.judgement import LimitMissed, judged_by, unsteady
from pytest_gpufleet.verdict.profile import Profile, of_every_gpu, shipped
from pytest_gpufleet.verdict.verdict import DIED

# Checks of earlier versions that took for a fault of the machine what was none, and what that was.
WITHDRAWN = {"test_3_exactness.py::test_tensors_with_gaps_are_exact_or_refused": "torch 2.11 does not refuse them all"}


def judge_again(record: Record, profile: Profile | None, basis: Grade | None = None, own: NodeRuns = ALONE) -> Record:
    """The record as it would be if `profile` had been the limits of the run, and `basis` what it asked of them (None:
    what it did ask). `own`: of a run on many nodes their own runs, judged again before.

    Every figure is judged again, peers and steadiness included, and so is every check that failed for missed limits
    alone. A check that failed for any other reason stays failed, unless it was withdrawn, and figures of a rehearsal
    stay not judged. What a check compared itself, like the number of GPUs, is not judged again."""
    anew = judged_by(record, profile)
    findings: list[Finding] = []
    for finding in (each for each in record.findings if each.measurement.metric != "spread"):  # which follows
        if finding.again:  # only the one after it counts
            findings.append(finding)
        else:
            new = anew(finding.measurement, check=finding.check, required=finding.required)
            findings += [new, *filter(None, [unsteady(new, record.topology)])]
    now = grouped((each.check, each) for each in findings if each.state == "missed")
    topology, checks = record.topology, {}
    for name, check in record.checks.items():
        checks[name] = _check(check, now.get(name, []), searched(record, name), topology)
    by = Said("the limits of profile {name}", name=profile.name) if profile else Said("no limits")
    text = "the measurements of {host}, {utc}, judged again with {by}"
    note = Said(text, host=record.run.host, utc=record.run.utc, by=by)
    limits, digest = (profile.name, sha256(profile.path)) if profile else (None, None)
    header = msgspec.structs.replace(record.run, profile=limits, profile_sha256=digest, basis=basis or record.run.basis)
    left = [fault for fault in record.faults if levels.check_name(fault.check) not in WITHDRAWN]
    # What a search found out about limits that are met now. What a check found by itself stays.
    kept = {*now, *(name for name, check in record.checks.items() if check.failed_by == "other")}
    faults = [fault for fault in left if fault.check in kept or fault.kind.category != "performance"]
    given = as_given(profile, [gpu.name for gpu in topology.gpus]) if profile else None
    told = instead(None if profile in (*shipped(), of_every_gpu()) else given, record.profile)
    again = replace(record, run=header, judged_again=note, profile=told, findings=findings, checks=checks)
    again = replace(again, faults=faults)
    finished = dict(record.finished)
    for number, now_of in own.items():
        node = now_of.record
        reasons = tuple(reason for reason in node.reasons if reason != node.judged_again)
        came_to = {"verdict": node.verdict, "reasons": reasons, "exit_status": node.exit_status}
        finished[number] = msgspec.structs.replace(finished[number], **came_to)
    again = between(replace(again, finished=finished))
    again, _ = judged(again, DIED if record.verdict is None else record.broken, own)
    return replace(again, reasons=[note, *again.reasons])


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
