"""Going on where a run that died or was interrupted has stopped.

What an earlier run found against the machine, or against itself, is never lost on the way: the faults that were seen
to happen, and wrong data, go into the new evidence and reject the machine again, what kept it from being complete keeps
the new one from it, and checks that failed are named beside a new verdict.

A run on many nodes takes over the checks between nodes, if all nodes took part in them, and the own runs of nodes that
came to their end, as they are. All other nodes run their own checks again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from pytest_gpufleet.model import events
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import HostFound, read_events
from pytest_gpufleet.model.fault import CODES
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.model.place import SOFTWARE
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite, shipped
from pytest_gpufleet.run import integrity
from pytest_gpufleet.run.folder import EVIDENCE, RunFolder
from pytest_gpufleet.verdict.across_runs.back_in_service import FIRMWARE, LINKS, parts, parts_of, required
from pytest_gpufleet.verdict.gaps import DEADLINE, without_telemetry
from pytest_gpufleet.verdict.verdict import CUT_SHORT

# What computed wrongly once is not sound because it did not the next time.
WRONG_DATA = [name for name, code in CODES.items() if code.category == "data"]
# What must be the same for figures of two runs to stand in one report.
RUN_FACTS = {
    "level": "level", "burn_in_seconds": "the length of the burn-in in seconds",
    "basis": "what --fleet-basis asks for", "network": "what --fleet-network says",
    "without": "what --fleet-without leaves out", "used": "whether the hardware is used (--fleet-used)",
    "gpus": "what --gpus asks for", "nodes_wanted": "what --nodes asks for",
    "gpus_present": "the number of GPUs in the machine", "rehearsal": "whether it is a rehearsal",
    "ranks": "the number of ranks", "profile": "the profile", "profile_sha256": "the content of the profile",
    "order": "the order", "order_sha256": "the content of the order", "plugin": "pytest-gpufleet",
    "code": "the state of pytest-gpufleet", "python": "Python", "pytest": "pytest",
}  # fmt: skip
# By the fact of the host where it stands. A reboot changes none of these.
HOST_FACTS = {"name": "host name", "kernel": "kernel", "system": "system", "processors": "number of processors"}
DMI = {
    "serial": "serial number of the machine", "board_serial": "serial number of the mainboard",
    "chassis_serial": "serial number of the chassis", "vendor": "maker", "product": "product", "board": "mainboard",
    "bios_version": "version of the BIOS", "bios_date": "date of the BIOS",
}  # fmt: skip
UNREADABLE = (RUN_FACTS["profile_sha256"], RUN_FACTS["order_sha256"], RUN_FACTS["code"])
MOST_LINES = 12
Things = dict[str, dict[str, object]]

# Events that a new run takes over as they are. All others it has itself, or they belong to a check that runs again.
TAKEN_OVER = (
    events.HostFactRead, events.FingerprintsTaken, events.Session, events.Spoiled, events.SuiteSeen, events.FaultFound,
    events.Noticed, events.Losses, events.TransportRead,
)  # fmt: skip


def load(folder: RunFolder) -> Record:
    """The record of the run in `folder`. Refused if it is not as that run left it, or came to its end."""
    try:
        record = integrity.check(folder, nodes=False).record
    except (OSError, Refused) as error:
        raise Refused(f"--fleet-resume: {error}") from None
    to_its_end = record.exit_status not in CUT_SHORT and record.broken != DEADLINE
    if record.verdict in ("ACCEPTED", "REJECTED") and to_its_end:
        nothing = f"that run came to its end ({record.verdict}): there is nothing to resume; start a new run"
        raise Refused(f"--fleet-resume {folder}: {nothing}")
    return record


def whole_nodes(folder: RunFolder, then: Record) -> dict[int, tuple[str, RunFolder]]:
    """The names and folders of nodes' own runs that came to an end with an answer. Refused if evidence was changed."""
    whole = {}
    for number, end in then.finished.items():
        answered = end.verdict in ("ACCEPTED", "REJECTED") or (end.verdict == "REHEARSAL" and end.exit_status in (0, 1))
        if answered and end.sha256 and end.exit_status not in CUT_SHORT and number not in then.lost:
            own = folder.of_node(then.node(number))
            try:
                if own.digest() != end.sha256:
                    raise Refused(f"--fleet-resume {own}: {EVIDENCE} is not what the run over all nodes tells of")
            except OSError as error:
                raise Refused(f"--fleet-resume {own}: {EVIDENCE} cannot be read ({error.strerror})") from None
            whole[number] = end.run, own
    return whole


def check_same(folder: RunFolder, then: Record, now: Record) -> None:
    """Refused that names what differs between the run to resume and this one, also what only one of them could read."""
    if lines := list(differences(_things(then), _things(now))):
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        text = "\n".join(f"  {line}" for line in lines[:MOST_LINES] + more)
        raise Refused(f"--fleet-resume {folder}: this is not the same machine and setup:\n{text}")


def _things(record: Record) -> Things:
    """What must be the same, by the thing that has it: "" is the run as a whole."""
    run, topology = record.run, record.topology
    things: Things = {"": {what: getattr(run, name) for name, what in RUN_FACTS.items()}}
    things[""] |= {what: getattr(topology, name) for name, what in SOFTWARE.items()}
    things[""] |= {f"variable {name}": value for name, value in run.environment.items()}
    things[""]["what --fleet-returns names"] = record.returns.run if record.returns else ""
    if record.of_cluster:
        things[""]["nodes"] = ", ".join(record.hosts.values())
    for node, host in record.hosts.items():
        whose, found = f"{host} " if record.of_cluster else "", record.machines.get(node, HostFound())
        gpus = record.topologies[node].gpus if node in record.topologies else ()
        for part in parts(gpus, found):
            if part.at:
                known = ((fact.replace("_", " "), value) for fact, value in part.facts.items() if fact not in LINKS)
                things[f"{whose}{part.called}"] = dict(known)
        if not found.host:  # a node that was never heard
            continue
        dmi, memory = found.get("dmi") or {}, found.get("memory_bytes")
        things[f"{whose}machine"] = {
            **{what: found.get(name) for name, what in HOST_FACTS.items()},
            **{what: dmi.get(name) for name, what in DMI.items()},
            "model of the processors": (found.get("processor") or {}).get("model"),
            "memory in GiB": memory and round(memory / GiB),
        }
        for address, device in (found.get("pci_devices") or {}).items():
            things[f"{whose}PCI device {address}"] = {"kind": device.get("kind")}
    return things


def differences(before: Things, now: Things) -> Iterator[str]:
    """A line for each difference of the run as a whole, and for the first one of each thing in it."""
    for thing in {**before, **now}:
        if thing not in before or thing not in now:
            yield f"{thing} {'was not there' if thing in now else 'is not there any more'}"
            continue
        old, new = before[thing], now[thing]
        differing = [what for what in {**old, **new} if old.get(what) != new.get(what)]
        for what in differing[: 1 if thing else None]:
            hidden = what in UNREADABLE or what.startswith("variable ")  # whose values may be long
            change = "is another" if hidden else f"was {_text(old.get(what))}, is {_text(new.get(what))}"
            yield f"{thing}{thing and ': '}{what} {change}"


def _text(value: object) -> str:
    match value:
        case None | "":
            return "unknown" if value is None else "nothing"
        case bool():
            return "yes" if value else "no"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def history(folder: RunFolder, then: Record) -> tuple[events.Earlier, ...]:
    """The runs that a new one goes on with, the first one first, and the checks that failed there."""
    return *then.run.resumed, events.Earlier(folder.name, then.run.utc, then.failed)


def _passed(then: Record) -> set[str]:
    """The checks that need not run again: they passed, left nothing unjudged, and show no state of the moment."""
    if then.lost or then.left_out:
        return set()
    rehearsal = then.run.rehearsal
    unjudged = {finding.check for finding in then.findings if finding.state == "not judged" and not rehearsal}
    again = {name for name, check in shipped().checks.items() if check.proves_sound or check.at_the_end}
    return {
        check.id
        for check in then.checks.values()
        if check.outcome == "passed"
        and check.id not in unjudged
        and check_name(check.id) not in again
        and (then.suite.between_nodes(check.id) or not then.of_cluster)
    }


def carried(folder: RunFolder, then: Record) -> list[events.Event]:
    """Events that the new run takes over: of checks that need not run again, and of the run, with what spoiled it."""
    passed, name = _passed(then), folder.name
    taken: list[events.Event] = []
    for _, event in read_events(folder.evidence):
        match event:
            case events.Judged(finding=finding):
                taken += [event] * (finding.check in passed)
            case events.CheckFinished(check=check):
                ended = replace(check, run=check.run or name)
                taken += [msgspec.structs.replace(event, check=ended)] * (check.id in passed)
            case events.SuiteSeen(manifest=Suite()):  # that of the new run, which is of the same version
                pass
            case events.Losses(check=check_id) if check_id not in passed:  # it runs again
                pass
            case events.FaultFound(fault=fault) if not fault.watched and fault.name not in WRONG_DATA:
                pass  # the check runs again
            case events.Noticed(fault=fault) if not fault.watched and fault.check not in passed:
                pass  # the kernel log still has it, or the check runs again
            case events.Event() if isinstance(event, TAKEN_OVER):
                taken.append(msgspec.structs.replace(event, in_run=event.in_run or name))
    # Telemetry itself is made again, but not that of the checks that do not run again.
    for gpu, missing in without_telemetry(then) if passed else ():
        taken.append(events.Spoiled(in_run=name, why=f"{gpu}: {missing}"))
    return taken


def returned(folder: Path, replaced: tuple[str, ...], before: Record, now: Record) -> events.Returns:
    """What evidence has of --fleet-returns. Refused for many nodes, another machine, less asked, or an unknown part."""
    for why in _objections(replaced, before, now):
        raise Refused(f"--fleet-returns {folder}: {why}")
    checks, there = required(before, replaced, shipped()), RunFolder(folder)
    kept = (event for _, event in read_events(there.evidence) if isinstance(event, events.Kept))
    return events.Returns(run=there.name, replaced=replaced, required=checks, kept=tuple(kept))


def _objections(replaced: tuple[str, ...], before: Record, now: Record) -> Iterator[str]:
    if before.of_cluster:
        yield "that is a run on many nodes: give the one of this node, below nodes/ in that folder"
    serial, own = (run.nodes[0].serial if run.nodes else None for run in (before.run, now.run))
    name, own_name = before.run.host, now.run.host
    if serial != own if serial and own and "board" not in replaced else name != own_name:
        then, this = (f"{host}, serial {number or 'unknown'}" for host, number in ((name, serial), (own_name, own)))
        yield f"that run is of another machine ({then}): this one is {this}"
    if before.run.utc.seconds > now.run.utc.seconds:
        yield f"that run began at {before.run.utc}, after this one: set the clock"
    # What decides what a verdict means: a repaired machine has to meet as much as before.
    decisive = ("rehearsal", "basis", "network", "without", "used", "order_sha256")
    asked = ({"": {RUN_FACTS[fact]: getattr(run, fact) for fact in decisive}} for run in (before.run, now.run))
    if otherwise := list(differences(*asked)):
        yield f"ask the same of the machine as before: {'; '.join(otherwise)}"
    there = {part.name: part.called for part in parts_of(now)}
    for part in {*replaced} - {*there, FIRMWARE}:
        listed = ", ".join(f"{name} ({called})" for name, called in there.items())
        yield f"--fleet-replaced {part}: this machine has no such part; it has {listed or 'none with a serial number'}"
