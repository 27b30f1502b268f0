"""What becomes of the nodes of a run on many, and what that does to its verdict. Each node has a run and evidence of
its own, by which its machine is judged; the run over all of them tells what these came to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_gpufleet.model.events import NodeFinished, Outcome
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import Said, say, some
from pytest_gpufleet.model.place import Place, on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import accusations

MOST_NAMES = 6
State = Literal["lost", "rejected", "left out", "unfinished", "incomplete", "rehearsed", "not here", "one GPU"]
# What a reason says of the nodes in a state, the gravest first.
STATES: dict[State, str] = {
    "lost": "lost",
    "rejected": "REJECTED by what its own run found",
    "left out": "left out of the checks between nodes",
    "unfinished": "without a verdict of its own run",
    "incomplete": "INCOMPLETE",
    "rehearsed": "with a rehearsal on CPU ranks, which says nothing about any GPU",
    "not here": "without its evidence: it could not be brought here",
    "one GPU": "with a GPU that another node has too",
}
GRAVEST: tuple[Outcome, ...] = ("failed", "skipped", "passed", "not applicable")
REJECTING: tuple[State, ...] = ("lost", "rejected")


@dataclass(frozen=True)
class Nodes:
    """Nodes of a run of which the same is to be told, by their names."""

    state: State
    hosts: tuple[str, ...]
    why: str = ""

    @property
    def rejects(self) -> bool:
        return self.state in REJECTING

    @property
    def what(self) -> Said:
        """ "lost: it was not heard for 30 s" """
        state = Said(STATES[self.state])
        return Said("{state}: {why}", state=state, why=self.why) if self.why else state

    @property
    def text(self) -> Said:
        """ "1 node (node-7) lost: it was not heard for 30 s" """
        return Said("{nodes} {what}", nodes=several(self.hosts), what=self.what)


def several(names: Sequence[str]) -> Said:
    """ "2 nodes (node-1, node-2)" """
    text = "1 node ({hosts})" if len(names) == 1 else "{count} nodes ({hosts})"
    return Said(text, count=len(names), hosts=some(names, MOST_NAMES))


def unaccepted(record: Record) -> list[Nodes]:
    """The nodes that keep a run from being accepted, the gravest first; none of a run on its own machine."""
    if not record.of_cluster:
        return []
    found = grouped((what, host) for number, host in record.hosts.items() if (what := _state(record, number)))
    order = list(STATES)
    nodes = [Nodes(state, tuple(hosts), why) for (state, why), hosts in found.items()]
    return sorted(nodes, key=lambda each: order.index(each.state))


def _state(record: Record, number: int) -> tuple[State, str] | None:
    """What keeps a node from being accepted, and why; None if nothing does."""
    end = record.finished.get(number)
    if number in record.lost:
        return "lost", record.lost[number].why
    if end and (end.verdict == "REJECTED" or (end.verdict == "REHEARSAL" and end.exit_status == 1)):
        return "rejected", _first(end)
    if number in record.left_out:
        return "left out", record.left_out[number].why
    if end is None or end.verdict is None:
        return "unfinished", _first(end) if end else ""
    if end.verdict == "INCOMPLETE" or (end.verdict == "REHEARSAL" and end.exit_status):
        return "incomplete", _first(end)
    if end.verdict == "REHEARSAL" and not record.run.rehearsal:
        return "rehearsed", ""
    if not end.sha256:
        return "not here", ""
    return ("one GPU", "") if _shares_a_gpu(record, number) else None


def _first(end: NodeFinished) -> str:
    """Its first reason; that of a rehearsal is that it is one."""
    reasons = end.reasons[1:] if end.verdict == "REHEARSAL" else end.reasons
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}" if reasons else ""


def _shares_a_gpu(record: Record, number: int) -> bool:
    of_others = {gpu for node in record.run.nodes if node.index != number for gpu in node.gpus}
    return any(node.index == number and of_others & {*node.gpus} for node in record.run.nodes)


def of_one_host(record: Record) -> list[tuple[int, ...]]:
    """Nodes that are one host, by their numbers: one kernel runs them, in containers or beside each other. Nobody knows
    of nodes that do not tell which kernel that is, and those of a rehearsal on one machine are meant to be there."""
    machines = {} if record.run.rehearsal else record.machines
    by_kernel = grouped((kernel, number) for number, machine in machines.items() if (kernel := machine.get("boot_id")))
    return [tuple(numbers) for numbers in by_kernel.values() if len(numbers) > 1]


def one_host_told(record: Record) -> list[str]:
    """ "2 nodes are one host (vm (1), vm (2)): ..." """
    text = "{count} nodes are one host ({hosts}): its memory, PCIe, drives and network adapters are there once"
    return [
        say(text, count=len(numbers), hosts=some([record.hosts[number] for number in numbers], MOST_NAMES))
        for numbers in of_one_host(record)
    ]


def not_as_many(record: Record) -> str:
    """That there are fewer or more nodes than were asked for; "" if there are as many."""
    wanted, there = record.run.nodes_wanted, len(record.hosts)
    if not wanted or wanted == there:
        return ""
    return f"{there} {'node is' if there == 1 else 'nodes are'} there, {wanted} were asked for"


def is_stated(record: Record, fault: Fault) -> bool:
    """Whether the reasons that name nodes say the same as this fault."""
    if fault.name in ("node_missing", "node_too_many"):
        return bool(not_as_many(record))
    return fault.name == "node_lost" and bool(fault.nodes) and fault.nodes <= record.lost.keys()


def hosts_blamed(record: Record, check_id: str) -> tuple[str, ...]:
    """The names of the nodes that the faults of a check are at; none in a run on its own machine."""
    if not record.of_cluster:
        return ()
    numbers = {number for fault in record.faults if fault.check == check_id for number in fault.nodes}
    return tuple(host for number, host in record.hosts.items() if number in numbers)


def finished(number: int, run: str, record: Record, sha256: str) -> NodeFinished:
    """What evidence says of a node's own run that has ended. `sha256`: of its evidence as it was brought here, "" if it
    could not be."""
    return NodeFinished(
        node=number, run=run, verdict=record.verdict, reasons=tuple(record.reasons), basis=basis.lowest(record),
        exit_status=record.exit_status, sha256=sha256,
    )  # fmt: skip


def faults_of(number: int, record: Record, check_id: str) -> list[Fault]:
    """What a check found on a node, by the record of that node's own run: faults and figures that missed, at their
    places among all nodes. What has no place there is at the node."""
    return [
        fault.changed(
            subjects=tuple(on_node(subject, number) for subject in fault.subjects) or (Place(number, "node"),)
        )
        for fault in accusations(record)
        if fault.check == check_id
    ]


def findings_of(number: int, record: Record, check_id: str) -> list[Finding]:
    """What a check measured on a node, by the record of that node's own run, at its places among all nodes. Samples and
    details are in the node's own evidence alone."""
    return [_at(finding, number) for finding in record.findings if finding.check == check_id]


def _at(finding: Finding, number: int) -> Finding:
    measured, slower = finding.measurement, finding.slower_than_peers
    values = {on_node(place, number): value for place, value in measured.values.items()}
    states = {on_node(place, number): state for place, state in measured.gpu_states.items()}
    samples = {on_node(place, number): each for place, each in measured.samples.items()}
    return replace(
        finding,
        measurement=replace(measured, values=values, samples=samples, gpu_states=states),
        missed=tuple(on_node(place, number) for place in finding.missed),
        slower_than_peers=slower and {on_node(place, number): by for place, by in slower.items()},
    )


def outcome_of_all(outcomes: Iterable[Outcome]) -> Outcome:
    """What a check of one machine came to on all nodes that ran it: the gravest of what it did on each. What none has
    does not apply."""
    return min(outcomes, key=GRAVEST.index, default="not applicable")
