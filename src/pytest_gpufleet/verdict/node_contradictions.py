"""What the evidence of a run on many nodes says against itself, and against that of its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.verdict import ended

# What a node's own run was asked for as the run over all of them was.
SAME = (
    "level",
    "burn_in_seconds",
    "basis",
    "rehearsal",
    "profile",
    "profile_sha256",
    "order",
    "order_sha256",
    "plugin",
)


def of_itself(record: Record) -> Iterator[str]:
    """What evidence of a run on many nodes says against itself; of any other, that it tells of nodes."""
    if not record.of_cluster:
        if record.lost or record.left_out or record.finished or len(record.hosts) > 1:
            yield "it ran on its own machine, and tells of nodes that had runs of their own"
        return
    for node in record.run.nodes:
        topology = record.topologies.get(node.index)
        if topology and node.gpus != tuple(gpu.uuid for gpu in topology.gpus):
            yield f"the GPUs of {node.host} are not those of its topology"
    for check in sorted({finding.check for finding in record.findings}):
        if check_name(check) in record.suite.checks and not record.suite.between_nodes(check):
            yield f"{check} has figures of one machine, which are in the evidence of its node"
    for fault in record.faults:
        if strangers := fault.nodes - record.hosts.keys():
            yield f"{fault.check or 'the run'} has a fault at node {min(strangers)}, which is not there"


def with_node(record: Record, number: int, own: Record) -> Iterator[str]:
    """What a run says of one of its nodes that the record of that node's own run does not."""
    end = record.finished[number]
    if own.of_cluster:
        yield "it is no run of one machine"
        return
    for name in SAME:
        if getattr(own.run, name) != getattr(record.run, name):
            yield f"its {name} is {getattr(own.run, name)}, and that of the run {getattr(record.run, name)}"
    if record.node(number).gpus != tuple(gpu.uuid for gpu in own.topology.gpus):
        yield "its GPUs are not those that the run found there"
    told = end.verdict, end.reasons, end.basis, end.exit_status
    if told != (own.verdict, tuple(own.reasons), basis.lowest(own), own.exit_status):
        yield f"it amounts to {ended(own).verdict}, and the run says {end.verdict}"
    if number in record.lost:  # what it has done from then on was no part of the run
        return
    outcomes = {own.suite.known_as(check.id): check.outcome for check in own.checks.values()}
    for check in record.checks.values():
        there = outcomes.get(record.suite.known_as(check.id), "passed")
        if check.outcome == "passed" and there not in ("passed", "not applicable"):
            yield f"{check.id}: {there} there, and passed in the run"
