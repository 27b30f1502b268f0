"""What a run says against places, by any check, and what of it explains the rest."""

import re
from collections.abc import Iterable
from itertools import product

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.place import WORLD, Place, Where, grouped
from pytest_gpufleet.model.record import Record

NEIGHBOUR = "foreign_process"
NO_MEMORY = re.compile("out.?of.?memory", re.IGNORECASE)  # of torch, CUDA and NCCL


def accusations(record: Record) -> list[Fault]:
    """The faults of the machine that were recorded, and as such every figure that missed."""
    return [
        *(fault for fault in record.faults if fault.kind.category != "run"),
        *(fault for finding in record.findings if finding.state == "missed" for fault in of_finding(finding)),
    ]


def all_faults(record: Record) -> list[Fault]:
    """What has to be mended first, and all that is said against places."""
    return list(dict.fromkeys((*causes(record), *accusations(record))))


def of_finding(finding: Finding) -> list[Fault]:
    """A missed finding as faults, one a place; of all together if it names none."""
    title, why, slower = finding.measurement.definition.title, finding.why(), finding.slower_than_peers or {}
    found = []
    for where in dict.fromkeys((*finding.missed, *slower)) or (WORLD,):
        code = "limit_missed" if where in finding.missed or where not in slower else "slower_than_peers"
        found.append(Fault(code, (where,), f"{title}: {why.get(where, finding.reason)}", check=finding.check))
    return found


def searched(record: Record, check_id: str) -> list[Fault]:
    """What was found out about the cause of limits that a check missed."""
    return [fault for fault in record.faults if fault.check == check_id and fault.kind.category == "performance"]


def causes(record: Record) -> list[Fault]:
    """What has to be mended before what it explains says anything: settings, and who else used the GPUs of this run,
    whether or not a check looked. What slows rails down explains nothing on one machine, which uses none."""
    rails = {fault for fault in record.faults if any(part.kind == "rail" for at in fault.subjects for part in at.parts)}
    found = [fault for fault in record.faults if is_cause(fault) and (record.of_cluster or fault not in rails)]
    seen = {subject for fault in found if fault.name == NEIGHBOUR for subject in fault.subjects}
    there = [(gpu.place, ", ".join(gpu.processes)) for gpu in record.topology.gpus if gpu.processes]
    return [*(Fault(NEIGHBOUR, (where,), processes) for where, processes in there if where not in seen), *found]


def disturbed(record: Record) -> set[str]:
    """Checks that found nothing but somebody else's process, and what it may have caused: no fault of the machine."""
    neighbours = [cause for cause in causes(record) if cause.name == NEIGHBOUR]
    missed = (fault for finding in record.findings if finding.state == "missed" for fault in of_finding(finding))
    by_check = grouped((fault.check, fault) for fault in (*record.faults, *missed)) if neighbours else {}
    return {
        check
        for check, found in by_check.items()
        if all(fault.name == NEIGHBOUR or explaining(fault, neighbours) for fault in found)
    }


def is_cause(fault: Fault) -> bool:
    """Whether it speaks against no part of the machine, but against what is done with it."""
    return bool(fault.kind.explains) and fault.kind.action == "CONFIG"


def explaining(fault: Fault, causes: Iterable[Fault]) -> list[Fault]:
    """The causes of which a fault may be an effect: those that explain its category, and are at the same place."""
    full = fault.name == "rank_raised" and NO_MEMORY.search(fault.what)
    crashed = fault.name == "xid_of_process"  # whose process it was, the driver does not always say
    category, found = "occupied memory" if full or crashed else fault.kind.category, []
    for cause in causes:
        if category in cause.kind.explains:  # what has no subject may be anywhere
            ours, theirs = ([part for at in each.subjects or (WORLD,) for part in at.parts] for each in (fault, cause))
            found += [cause] * any(a == b or _holds(a, b) or _holds(b, a) for a, b in product(ours, theirs))
    return found


def _holds(outer: Place, inner: Place) -> bool:
    return outer.kind == "world" or (outer.kind == "node" and outer.node == inner.node)


def at(subjects: Iterable[Where]) -> list[Place]:
    """The devices of these places, each once."""
    parts = (part for subject in subjects for part in subject.parts)
    return list(dict.fromkeys(part for part in parts if part.kind not in ("world", "node")))
