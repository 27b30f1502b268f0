"""The nodes of a fleet that failed, and why, for programs that drain nodes: these match codes, and no text."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.fault import CODES, Action, Fault
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.place import Place, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.accusations import NEIGHBOUR, all_faults, disturbed, explaining
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, rejected

# Of a figure between nodes that missed, its place is as well a healthy node beside a bad one. Whom such figures name
# together is a fault of its own (node_slow, rail_slow).
NAME_NOBODY = ("limit_missed", "slower_than_peers", NEIGHBOUR)


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: Annotated[int, Meta(ge=100, le=999, description="What kind of fault: a number that never means another.")]
    name: Annotated[str, Meta(description="The same in one word.")]
    action: Annotated[Action, Meta(description="What happens to the node next.")]
    message: str
    gpus: Annotated[tuple[str, ...], Meta(description="UUIDs of the GPUs to blame, if any is.")] = ()


class FailedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    reasons: Annotated[tuple[Reason, ...], Meta(min_length=1, description="What to mend first comes first.")]


def failed_nodes(
    hosts: Sequence[HostRun], faults: Iterable[Fault], over_nodes: Iterable[Record]
) -> tuple[FailedNode, ...]:
    """The hosts that their own runs reject, then those that were missing, lost or named between nodes or beside the
    others. Nobody is who is only INCOMPLETE, and neither end of a slow pair. `faults`: of the fleet, whose places
    count `hosts`."""
    found: dict[str, list[Reason]] = defaultdict(list)
    for run in hosts:
        found[run.host] += _of_own_run(run.record)
    for record in over_nodes:
        for host in record.run.nodes_missing:
            found[host].append(_reason("node_missing", "it did not come"))
        for number, lost in record.lost.items():
            found[record.hosts[number]].append(_reason("node_lost", lost.why))
        for number, end in record.finished.items():
            if rejected(end) and not found[record.hosts[number]]:  # its evidence could not be brought here
                found[record.hosts[number]].append(_reason("check_failed", next(iter(end.reasons), "REJECTED")))
        for number, fault in _between(record):
            found[record.hosts[number]].append(_of_fault(fault, record.topology))
    for fault in faults:
        for number in fault.nodes:
            found[hosts[number].host].append(_of_fault(fault, hosts[number].record.topology.on_node(number)))
    return tuple(FailedNode(host, tuple(dict.fromkeys(reasons))) for host, reasons in found.items() if reasons)


def _of_own_run(record: Record) -> Iterator[Reason]:
    if record.verdict != "REJECTED" and not (record.run.rehearsal and record.exit_status == 1):
        return
    beside = disturbed(record)
    faults = [each for each in all_faults(record) if each.check not in beside and each.name != NEIGHBOUR]
    yield from (_of_fault(each, record.topology) for each in faults if each.kind.action != "MONITOR")
    by_code = {each.check for each in faults}
    for check in record.checks.values():
        if check.outcome == "failed" and check.id not in by_code | beside:
            yield _reason("check_failed", f"{check.title or check.id}: {check.message}".partition("\n")[0])


def _between(record: Record) -> Iterator[tuple[int, Fault]]:
    """Whom faults name that were found between nodes. What lies on several nodes names none of them, nor does what is
    said of all."""
    every = [fault for fault in all_faults(record) if fault.name != "node_lost"]
    for fault in every:
        left_out = fault.name in NAME_NOBODY or fault.kind.action == "MONITOR" or explaining(fault, every)
        named = {parts[0].node for parts in map(_parts, fault.subjects) if len({part.node for part in parts}) == 1}
        if not left_out and not len(named) == len(record.hosts) > 1:
            yield from ((number, fault) for number in sorted(named))


def _parts(subject: Where) -> tuple[Place, ...]:
    return tuple(part for part in subject.parts if part.is_on_node)


def _of_fault(fault: Fault, topology: GpuTopology) -> Reason:
    uuids = {gpu.place: gpu.uuid for gpu in topology.gpus}
    parts = dict.fromkeys(part for subject in fault.subjects for part in subject.parts)
    gpus = tuple(uuids[part] for part in parts if part in uuids)
    return _reason(fault.name, fault.described(topology.identity), gpus)


def _reason(name: str, message: str, gpus: tuple[str, ...] = ()) -> Reason:
    kind = CODES[name]
    return Reason(kind.number, name, kind.action, str(message), gpus)
