"""A machine that comes back from repair (--fleet-returns): its run before, and what of that is kept in the new one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pytest_gpufleet.model import events
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.resume import RUN_FACTS, differences
from pytest_gpufleet.verdict.across_runs.back_in_service import FIRMWARE, parts_of, required
from pytest_gpufleet.verdict.across_runs.run_comparison import held_to_limits

# What of a run decides what its verdict means: a repaired machine has to meet as much as before.
ASKED = ("rehearsal", "basis", "network", "without", "used", "order_sha256")


def event(folder: Path, replaced: tuple[str, ...], before: Record, now: Record) -> events.Returns:
    """What evidence has of it. Refused for many nodes, another machine, less asked than there, or an unknown part."""
    for why in _objections(replaced, before, now):
        raise Refused(f"--fleet-returns {folder}: {why}")
    checks = required(before, replaced, shipped())
    return events.Returns(run=RunFolder(folder).name, replaced=replaced, required=checks, kept=tuple(_kept(before)))


def _objections(replaced: tuple[str, ...], before: Record, now: Record) -> Iterator[str]:
    if before.of_cluster:
        yield "that is a run on many nodes: give the one of this node, below nodes/ in that folder"
    serial, own = (run.nodes[0].serial if run.nodes else None for run in (before.run, now.run))
    name, own_name = before.run.host, now.run.host
    if serial != own if serial and own and "board" not in replaced else name != own_name:
        yield f"that run is of another machine ({name}, serial {serial}): this one is {own_name}, serial {own}"
    if before.run.began > now.run.began:
        yield f"that run began at {before.run.utc}, after this one: set the clock"
    asked = ({"": {RUN_FACTS[fact]: getattr(run, fact) for fact in ASKED}} for run in (before.run, now.run))
    if otherwise := list(differences(*asked)):
        yield f"ask the same of the machine as before: {'; '.join(otherwise)}"
    there = {part.name: part.called for part in parts_of(now)}
    for part in {*replaced} - {*there, FIRMWARE}:
        listed = ", ".join(f"{name} ({called})" for name, called in there.items())
        yield f"--fleet-replaced {part}: this machine has no such part; it has {listed or 'none with a serial number'}"


def _kept(before: Record) -> Iterator[events.Kept]:
    """As little of its events as the new run needs: what the machine was, what failed, and what was measured."""
    yield before.run
    yield events.TopologyFound(nodes=[before.topology])
    yield events.MachineRead(nodes=[before.machine])
    yield from (events.CheckStarted(check=check) for check in before.started if check not in before.checks)
    for finding in held_to_limits(before.findings):
        measurement = replace(finding.measurement, samples={}, details={})
        yield events.Judged(finding=replace(finding, measurement=measurement))
    for check, found in before.fingerprints.items():
        yield events.FingerprintsTaken(check=check, fingerprints=found)
    yield from (events.FaultFound(fault=fault.changed(story="")) for fault in before.faults)
    failed = (check for check in before.checks.values() if check.outcome == "failed")
    yield from (events.CheckFinished(check=replace(check, doc="", log="")) for check in failed)
    if before.verdict:
        yield events.Verdict(verdict=before.verdict, reasons=(), exit_status=before.exit_status)
