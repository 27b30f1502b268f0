"""How the nodes of a run on many stand: each by its own run, as a host of a fleet, and by the checks between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.language import Said, Say, english
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import gpu_grid, wording
from pytest_gpufleet.report.accused import Accused, accused_nodes, times_named
from pytest_gpufleet.report.fleet_hosts import BetweenHosts, HostRow, host_rows
from pytest_gpufleet.report.groups import Group, group_title, groups
from pytest_gpufleet.verdict.accusations import told
from pytest_gpufleet.verdict.fleet.fleet_peers import NodeRuns
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet, judge_fleet
from pytest_gpufleet.verdict.fleet.host_runs import Gap, GapKind
from pytest_gpufleet.verdict.node_verdicts import one_host_told, unaccepted

MOST_SAID = 6  # of a node, by checks between them
FIGURES = ("limit_missed", "slower_than_peers")
NAMED = "named by checks"
SECURED = {
    "token": "which nobody reads or sends without the cluster's token",
    "loopback": "which never leave this machine",
    "insecure": "INSECURE: whoever reaches the cluster can run programs on its nodes",
}


def as_fleet(record: Record, runs: NodeRuns) -> Fleet:
    """The nodes of a run as the hosts of a fleet. `runs`: their own, as `host_runs.kept` leaves them, under the names
    that their nodes have in the record; of a node that was lost, what it had told by then."""
    absent = [node for node in record.hosts if node not in runs and node not in record.lost]
    gaps = [
        *(_gap(record, "lost", node, Said("lost: {why}", why=event.why)) for node, event in record.lost.items()),
        *(_gap(record, "left out", node, Said("no part in checks between nodes: {why}", why=event.why))
          for node, event in record.left_out.items()),
        *(_gap(record, "missing", node, Said("it has no run of its own")) for node in absent),
    ]  # fmt: skip
    sums = {node: end.sha256 for node, end in record.finished.items()}
    return judge_fleet([replace(run, sha256=sums.get(node, "")) for node, run in runs.items()], over_all=gaps)


def rows(record: Record, fleet: Fleet) -> list[HostRow]:
    """A row for each node. `fleet`: as `as_fleet` makes it of this record."""
    return host_rows(fleet, _between(record, groups_between(groups(record), fleet)))


def groups_between(every: Sequence[Group], fleet: Fleet) -> list[Group]:
    """Of the groups of checks of a run those that no node has run by itself."""
    alone = {group_title(check) for run in fleet.hosts for check in run.record.checks}
    return [group for group in every if group.title not in alone]


def nodes_in_words(record: Record, say: Say = english) -> list[str]:
    """What a run on many nodes stands on: how many there are and which of them are one host, what they reach each
    other by, and how what they tell each other is kept from strangers. Nothing of a run on its own machine."""
    run = record.run
    if not record.of_cluster:
        return []
    there = len(run.nodes) or 1
    nodes = say("{count} nodes" if there != 1 else "1 node", count=there)
    if run.nodes_wanted:
        nodes = say("{nodes} of {wanted} asked for", nodes=nodes, wanted=run.nodes_wanted)
    gone = [say("{count} lost", count=len(record.lost))] if record.lost else []
    gone += [say("{count} left out", count=len(record.left_out))] if record.left_out else []
    networks = Counter(filter(None, map(_network, record.machines.values()))).most_common(1)
    interfaces = ", ".join(dict.fromkeys(filter(None, run.interfaces)))
    safe = say(SECURED.get(run.secured or "", "nobody recorded how they are secured"))
    return [
        say(", ").join([nodes, *gone]),
        *one_host_told(record, say),
        *(say("network of a node: {network}", network=network) for network, _ in networks),
        *([say("ranks meet over {interfaces}", interfaces=interfaces)] if interfaces else []),
        say("messages: {transport}, {safe}", transport=run.transport, safe=safe),
    ]


def _network(machine: HostFound) -> str:
    """ "8 x ConnectX-7 400 Gb/sec" """
    ports = machine.get("network_ports")
    known = [port for port in ports if isinstance(port, dict)] if isinstance(ports, list) else []
    kinds = Counter(" ".join(str(port[key]) for key in ("adapter", "rate") if port.get(key)) for port in known)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()) if kind)


def to_look_at(record: Record) -> dict[int, str]:
    """The nodes that somebody has to look at, by their numbers, and why in a word: those that reject the run, then
    those that checks name most often."""
    numbers = {host: node for node, host in record.hosts.items()}
    found: dict[int, str] = {
        numbers[host]: each.state for each in unaccepted(record) if each.rejects for host in each.hosts
    }
    for where, _ in times_named(accused_nodes(record).values()).most_common():
        found.setdefault(where.node, "left out" if where.node in record.left_out else NAMED)
    return found


def _gap(record: Record, kind: GapKind, node: int, what: str) -> Gap:
    found = {each.index: each.serial for each in record.run.nodes}
    if serial := found.get(node):
        what = Said("{what}; serial of the machine: {serial}", what=what, serial=serial)
    return Gap(kind, (record.hosts[node],), what)


def _between(record: Record, between: Sequence[Group]) -> dict[str, BetweenHosts]:
    named, said = accused_nodes(record), _said(record, between)
    return {
        host: BetweenHosts(
            {group.title: _state(record, node, group, named) for group in between}, tuple(said[node][:MOST_SAID])
        )
        for node, host in record.hosts.items()
    }


def _state(record: Record, node: int, group: Group, named: Mapping[str, Accused]) -> str:
    """Of a node, by checks between nodes. Where nobody is named who could be, it may be any."""
    state = gpu_grid.cell(Place(node, "node"), group, named, record.hosts).state
    if state == "failed":
        return state
    if node in record.lost or node in record.left_out or not group.checks:
        return "not run"
    nobody = any(check in named and not (named[check].named or named[check].is_explained) for check in group.checks)
    return "unclear" if nobody and state in ("ok", "") else state


def _said(record: Record, between: Sequence[Group]) -> dict[int, list[str]]:
    """What checks between nodes, and what was seen while they ran, say of each node."""
    ours = {check for group in between for check in group.checks}
    name = partial(wording.place, hosts=record.hosts)
    found: dict[int, list[str]] = defaultdict(list)
    explained: set[tuple[int, str]] = set()  # by a check that also says what makes its figures miss
    for fault in sorted(told(record), key=lambda fault: fault.code in FIGURES):
        if fault.code != "node_lost" and (fault.check in ours or fault.watched):
            for node in dict.fromkeys(part.node for at in fault.subjects for part in at.parts if part.is_on_node):
                if fault.code not in FIGURES:
                    explained.add((node, fault.check))
                elif (node, fault.check) in explained:
                    continue
                found[node].append(Said("{kind}: {what}", kind=Said(fault.kind.message), what=fault.told(name)))
    return found
