"""What the runs of many hosts amount to."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.events import VerdictWord
from pytest_gpufleet.model.fault import CODES, Action, Fault
from pytest_gpufleet.model.finding import Grade
from pytest_gpufleet.model.language import Listed, Said, some
from pytest_gpufleet.model.place import GpuTopology, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import basis, verdict as own_verdict
from pytest_gpufleet.verdict.accusations import NEIGHBOUR, all_faults, disturbed, explaining
from pytest_gpufleet.verdict.fleet import equality, host_runs
from pytest_gpufleet.verdict.fleet.fleet_peers import FleetPeers, SlowPlaces, slow_places
from pytest_gpufleet.verdict.fleet.host_runs import Gap, GapKind, HostRun, NodeRuns, Unusable, rejected
from pytest_gpufleet.verdict.gaps import not_answered, reasons as stated
from pytest_gpufleet.verdict.verdict import DIED, EXIT_STATUS, MOST_NAMES, not_as_many

# Of a figure between nodes that missed, its place is as well a healthy node beside a bad one. Whom such figures name
# together is a fault of its own (node_slow, rail_slow).
NAME_NOBODY = ("limit_missed", "slower_than_peers", NEIGHBOUR)
ONCE = "{hosts} worse than the fleet's peers by one measurement alone: run {checks} there again, and give both runs"
UNCOMPARED = "{hosts} not compared with others in all measurements: too few hosts have the same"
REHEARSED = "CPU ranks stood in for GPUs on all hosts: this says nothing about any GPU"
HELD_BACK = ", and held back by what is no fault of a GPU and has to be mended first"
# What a reason says of so many hosts.
WORDS: dict[GapKind, str] = {
    "lost": "lost", "missing": "expected and without a run that counts", "unexpected": "there, but not expected",
    "unusable": "with a folder that cannot be used", "rehearsal": "with a rehearsal on CPU ranks",
    "left out": "left out of the checks between nodes", "unfinished": "whose own run has no verdict",
    "not here": "whose evidence could not be brought here", "incomplete": "INCOMPLETE",
    "one name": "whose name two machines have", "one GPU": "whose GPU is on another host too",
    "run otherwise": "whose runs differ",
}  # fmt: skip
WITH_WHY = ("lost", "left out", "run otherwise")  # the same of many
ALONE: NodeRuns = host_runs.NOTHING


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: Annotated[int, Meta(ge=100, le=999, description="What kind of fault: a number that never means another.")]
    name: Annotated[str, Meta(description="The same in one word.")]
    action: Annotated[Action, Meta(description="What happens to the node next.")]
    message: str
    gpus: Annotated[tuple[str, ...], Meta(description="UUIDs of the GPUs to blame, if any is.")] = ()


class FailedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    reasons: Annotated[tuple[Reason, ...], Meta(min_length=1, description="What to mend first comes first.")]


@dataclass(frozen=True)
class Fleet:
    """What is wrong with hosts beside what their own runs say, and what all amounts to."""

    hosts: tuple[HostRun, ...]  # by their numbers, which are the nodes of all places here
    expected: tuple[str, ...] | None
    unusable: tuple[Unusable, ...]
    gaps: tuple[Gap, ...]  # why the fleet is not complete
    notes: tuple[str, ...]  # which change nothing
    differences: tuple[equality.Difference, ...]
    slow: tuple[SlowPlaces, ...]  # worse than their peers on all hosts, by two measurements
    odd: tuple[SlowPlaces, ...]  # by one alone
    faults: tuple[Fault, ...]
    grades: dict[Grade, int]  # by how many figures the verdict stands on limits of which grade
    verdict: VerdictWord
    reasons: tuple[str, ...]
    exit_status: int
    failed: tuple[FailedNode, ...] = ()  # whom any of this rejects


def judge_fleet(
    runs: Iterable[HostRun], unusable: Sequence[Unusable] = (), expected: Collection[str] | None = None,
    over: Sequence[Record] = (),
) -> Fleet:  # fmt: skip
    """REJECTED if any host is, was lost, is unlike most others, or has a place that is worse than its peers on all
    hosts, or if what was done between hosts is; else INCOMPLETE if a host is missing, was not expected, was left out or
    is incomplete, or if it is not clear whose runs they are, or if they were made in different ways, or if what was
    done between them is; else ACCEPTED. REHEARSAL if all runs are rehearsals. `expected`: the names of the hosts, None
    if nobody says. `runs`: with records as `kept` leaves them; `over`: those of runs on many nodes that they are of."""
    hosts, notes, gaps = host_runs.counted(runs)
    there, own = {run.host for run in hosts}, [run.record for run in hosts]
    gaps += [gap for record in over for gap in host_runs.of_nodes(record, there) if gap not in gaps]
    over = [own_verdict.settled(host_runs.between(record), record.broken) for record in over]
    real = [run for run in hosts if not run.record.run.rehearsal]
    gaps = [*host_runs.muster(hosts, unusable, expected), *gaps]
    if not real:  # one among others is a gap
        real, gaps = list(hosts), [gap for gap in gaps if gap.kind != "rehearsal"]
    records = {run.host: run.record for run in real}
    gaps += [Gap("run otherwise", each.hosts, each.text) for each in equality.compared(records, equality.of_run)]
    runs_of = dict(enumerate(hosts))
    differences, peers = (*equality.unlike(records), *equality.other_bits(records)), slow_places(runs_of)
    unlike = equality.faults(differences, {run.host: node for node, run in runs_of.items()})
    notes += [Said("not judged: {difference}", difference=each.text) for each in equality.other_boards(records)]
    notes += [*equality.not_compared(records), *_notes(hosts, real, peers)]
    if expected is None and not (over and all(record.run.nodes_wanted for record in over)):
        notes.append("the expected hosts were not given: a missing one goes unseen")
    untested = [each for each in peers.slow if hosts[each.node].shared(one.place for one in each.places)]
    tested = [each for each in peers.slow if each not in untested]
    refused = [run.host for run in hosts if run.record.verdict == "REJECTED"]
    refused += [record.hosts[node] for record in over for node, end in record.finished.items() if rejected(end)]
    against: list[str] = [Said("{hosts} REJECTED", hosts=_hosts([*dict.fromkeys(refused)]))] if refused else []
    against += _by_kind([gap for gap in gaps if gap.kind == "lost"])
    for record in over:
        against += [*filter(None, [not_as_many(record)])] + (record.reasons if record.verdict == "REJECTED" else [])
    failed = bool(against) or any(check.outcome == "failed" for each in (*own, *over) for check in each.checks.values())
    for held_back, why in ((False, ""), (True, Said(HELD_BACK))):
        against += _slower(hosts, [each for each in tested if hosts[each.node].held_back == held_back], why)
    against += [Said("hosts differ in {difference}", difference=each.text) for each in differences]
    open_points = _slower(hosts, untested, Said(", beside another process: that could not be tested"))
    open_points += [text for each in over for text in stated(not_answered(each, own), each)]
    verdict, reasons, status = _verdict(hosts, over, against, gaps, open_points, failed)
    return Fleet(
        hosts, None if expected is None else tuple(expected), tuple(unusable), tuple(gaps), tuple(notes), differences,
        peers.slow, peers.alone, (*(each.fault for each in peers.slow), *unlike), basis.by_grade(*own, *over),
        verdict, (*reasons, *notes), status, failed_nodes(hosts, [*(each.fault for each in tested), *unlike], over),
    )  # fmt: skip


def _notes(hosts: Sequence[HostRun], runs: Sequence[HostRun], peers: FleetPeers) -> list[str]:
    """What a signer has to know: whose limits hosts met, what was not tested or compared, and what to run again."""
    by_file = grouped((run.record.profile.file, run.host) for run in runs if run.record.profile)
    text = "{hosts} judged by limits that were given ({file}): what only these let pass, the hosts' reports list"
    notes: list[str] = [Said(text, hosts=_hosts(names), file=file) for file, names in by_file.items()]
    partly = [run.host for run in runs if run.record.run.gpus_present > len(run.record.topology.gpus)]
    alone = [hosts[node].host for node in dict.fromkeys(each.node for each in peers.alone)]
    checks = some([*dict.fromkeys(each.check for each in peers.alone)], MOST_NAMES)
    texts = {"{hosts} tested in part: there are more GPUs": partly, UNCOMPARED: peers.without_peers, ONCE: alone}
    return notes + [Said(text, hosts=_hosts(names), checks=checks) for text, names in texts.items() if names]


def _slower(hosts: Sequence[HostRun], slow: Sequence[SlowPlaces], why: str) -> list[str]:
    if not slow:
        return []
    worst = max(slow, key=lambda each: each.worst.worse)
    names = _hosts([hosts[node].host for node in dict.fromkeys(each.node for each in slow)])
    where = {"metric": Said(worst.figure.metric.title), "host": hosts[worst.node].host}
    text = "{hosts} worse than the fleet's peers{why}; the worst: {metric} on {host}, {fraction}"
    return [Said(text, hosts=names, why=why, **where, fraction=f"{worst.worst.worse:.1%}")]


def _verdict(
    hosts: Sequence[HostRun], over: Sequence[Record], against: list[str], gaps: Sequence[Gap], untested: list[str],
    failed: bool,
) -> tuple[VerdictWord, list[str], int]:  # fmt: skip
    """`failed`: what fails a rehearsal, too."""
    records = [*(run.record for run in hosts), *over]
    open_points = _by_kind([gap for gap in gaps if gap.kind != "lost"])
    if records and all(record.run.rehearsal for record in records):
        broken = any(record.exit_status for record in records)
        status = "REJECTED" if failed else "INCOMPLETE" if gaps or broken else "ACCEPTED"
        found = [reason for record in over for reason in record.reasons[1:]]  # the first is that it is a rehearsal
        return "REHEARSAL", [REHEARSED, *against, *found, *open_points], EXIT_STATUS[status]
    open_points += [*untested, *([] if hosts else ["there is no run that counts"])]
    open_points += [reason for record in over if record.verdict == "INCOMPLETE" for reason in record.reasons]
    if against or open_points:
        word: VerdictWord = "REJECTED" if against else "INCOMPLETE"
        return word, [*against, *open_points], EXIT_STATUS[word]
    text = "{hosts} ACCEPTED, and none differs from the others"
    accepted: list[str] = [Said(text, hosts=_hosts([run.host for run in hosts]))]
    accepted += [reason for record in over for reason in record.reasons]
    return "ACCEPTED", accepted, EXIT_STATUS["ACCEPTED"]


def judged(record: Record, broken: str, runs: NodeRuns = ALONE) -> tuple[Record, Fleet | None]:
    """With the verdict that follows from all else in it; of many nodes that of the fleet, with their own `runs`."""
    record = own_verdict.settled(record, broken)
    if not record.of_cluster:
        return record, None
    fleet = judge_fleet(runs.values(), over=[record])
    return replace(record, verdict=fleet.verdict, reasons=[*fleet.reasons], exit_status=fleet.exit_status), fleet


def ended(record: Record, runs: NodeRuns = ALONE) -> tuple[Record, Fleet | None]:
    """As `judged`, of a run that died; any other has its own verdict."""
    if record.verdict is None:
        return judged(record, DIED, runs)
    return record, judge_fleet(runs.values(), over=[record]) if record.of_cluster else None


def _by_kind(gaps: Sequence[Gap]) -> list[str]:
    reasons: list[str] = []
    for kind, words in WORDS.items():
        if of_kind := [gap for gap in gaps if gap.kind == kind]:
            who = _hosts(list(dict.fromkeys(host for gap in of_kind for host in gap.hosts)), verb=False)
            why = Listed(dict.fromkeys(gap.what for gap in of_kind), "; ")
            text = "{hosts} {are}: {why}" if kind in WITH_WHY else "{hosts} {are}"
            reasons.append(Said(text, hosts=who, are=Said(words), why=why))
    return reasons


def _hosts(names: Sequence[str], verb: bool = True) -> str:
    """ "2 hosts (node-1, node-2) are" """
    one = "1 host ({hosts}) is" if verb else "1 host ({hosts})"
    more = "{count} hosts ({hosts}) are" if verb else "{count} hosts ({hosts})"
    return Said(one if len(names) == 1 else more, count=len(names), hosts=some(names, MOST_NAMES))


def failed_nodes(hosts: Sequence[HostRun], faults: Iterable[Fault], over: Iterable[Record]) -> tuple[FailedNode, ...]:
    """The hosts that their own runs reject, then those missing, lost, or named between nodes or beside others: nobody
    who is only INCOMPLETE, and neither end of a slow pair. `faults`: of the fleet, whose places count `hosts`."""
    found: dict[str, list[Reason]] = defaultdict(list)
    for run in hosts:
        found[run.host] += _of_own_run(run.record)
    for record in over:
        for host in record.run.nodes_missing:
            found[host].append(_reason("node_missing", "it did not come"))
        for number, lost in record.lost.items():
            found[record.hosts[number]].append(_reason("node_lost", lost.why))
        for number, end in record.finished.items():
            if rejected(end) and not found[record.hosts[number]]:  # its evidence could not be brought here
                found[record.hosts[number]].append(_reason("check_failed", next(iter(end.reasons), "REJECTED")))
        every = [fault for fault in all_faults(record) if fault.name != "node_lost"]
        for fault in every:
            left_out = fault.name in NAME_NOBODY or fault.kind.action == "MONITOR" or explaining(fault, every)
            nodes = [{part.node for part in subject.parts if part.is_on_node} for subject in fault.subjects]
            named = {node for of_subject in nodes if len(of_subject) == 1 for node in of_subject}
            # What lies on several nodes names none of them, nor does what is said of all.
            for number in () if left_out or len(named) == len(record.hosts) > 1 else sorted(named):
                found[record.hosts[number]].append(_of_fault(fault, record.topology))
    for fault in faults:
        for number in fault.nodes:
            found[hosts[number].host].append(_of_fault(fault, hosts[number].record.topology.on_node(number)))
    return tuple(FailedNode(host, tuple(dict.fromkeys(reasons))) for host, reasons in found.items() if reasons)


def _of_own_run(record: Record) -> Iterator[Reason]:
    if not rejected(record):
        return
    beside = disturbed(record)
    faults = [each for each in all_faults(record) if each.check not in beside and each.name != NEIGHBOUR]
    yield from (_of_fault(each, record.topology) for each in faults if each.kind.action != "MONITOR")
    by_code = {each.check for each in faults}
    for check in record.checks.values():
        if check.outcome == "failed" and check.id not in by_code | beside:
            yield _reason("check_failed", f"{check.title or check.id}: {check.message}".partition("\n")[0])


def _of_fault(fault: Fault, topology: GpuTopology) -> Reason:
    uuids = {gpu.place: gpu.uuid for gpu in topology.gpus}
    gpus = dict.fromkeys(uuids[part] for subject in fault.subjects for part in subject.parts if part in uuids)
    return _reason(fault.name, fault.described(topology.identity), tuple(gpus))


def _reason(name: str, message: str, gpus: tuple[str, ...] = ()) -> Reason:
    kind = CODES[name]
    return Reason(kind.number, name, kind.action, str(message), gpus)
