"""What is wrong with nodes of one run that only shows beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import SOFTWARE
from pytest_gpufleet.model.place import Place, on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.fleet import equality
from pytest_gpufleet.verdict.fleet.fleet_peers import slow_places
from pytest_gpufleet.verdict.fleet.host_runs import HostRun
from pytest_gpufleet.verdict.fleet.same_bits import in_common, other_bits

# Logs of several nodes can be put in order, certificates hold and leases of file systems last. It is where the rule
# NodeClockSkewDetected of node_exporter begins.
CLOCKS_APART_SECONDS = 0.05

# What nodes have to have in common before they work together: in all else they are only unlike.
TO_WORK_TOGETHER = (*SOFTWARE.values(), "network plugin of NCCL", "VBIOS", "GSP firmware")

NodeRuns = Mapping[int, HostRun]


def nodes_unlike_others(runs: NodeRuns) -> list[Fault]:
    """In what nodes differ from most of them: driver, firmware, kernel, libraries, environment, limits."""
    hosts = list(runs.values())
    return [_numbered(fault, runs) for fault in equality.faults(equality.unlike(hosts), hosts)]


def nodes_compute_otherwise(runs: NodeRuns) -> list[Fault]:
    """Nodes whose GPUs agree on other bits than those of the same model on most nodes; of two, nobody can say which."""
    found = equality.faults(other_bits(_records(runs)), list(runs.values()))
    return [_numbered(fault, runs) for fault in found]


def fingerprints_in_common(runs: NodeRuns) -> bool:
    """Whether any two nodes have fingerprints of the same GPUs and libraries."""
    return in_common(_records(runs))


def _records(runs: NodeRuns) -> dict[str, Record]:
    return {run.host: run.record for run in runs.values()}


def minority(runs: NodeRuns) -> dict[int, str]:
    """The nodes with other software or firmware than most, and which: together with them a failure would say nothing of
    the network. None where nobody can say who differs."""
    numbers = {run.host: node for node, run in runs.items()}
    found: dict[int, str] = {}
    for each in equality.unlike(list(runs.values())):
        if each.usual is not None and each.fact in TO_WORK_TOGETHER:
            for value, hosts in each.others.items():
                for host in hosts:
                    found.setdefault(numbers[host], f"{each.fact} is {value} there, of most nodes {each.usual}")
    return found


def slower_than_other_nodes(runs: NodeRuns) -> list[Fault]:
    """The places that are worse than their peers on all nodes, by more than healthy ones differ."""
    slow, _ = slow_places(list(runs.values()))
    return [_numbered(each.fault, runs) for each in slow]


def clocks_apart(ahead: Mapping[int, float]) -> list[Fault]:
    """Nodes whose clock is off from that of most by more than CLOCKS_APART_SECONDS; of two, both. `ahead`: by how many
    seconds the clock of each node is ahead of any one clock."""
    usual = median(ahead.values()) if ahead else 0.0
    allowed = CLOCKS_APART_SECONDS if len(ahead) > 2 else CLOCKS_APART_SECONDS / 2  # each is half of it from the middle
    off = {node: seconds - usual for node, seconds in ahead.items() if abs(seconds - usual) > allowed}
    return [
        Fault(
            "clock_off",
            (Place(node, "node"),),
            f"its clock is {abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} those of the others",
        )
        for node, seconds in off.items()
    ]


def _numbered(fault: Fault, runs: NodeRuns) -> Fault:
    """With the numbers that the nodes have in the run, where it has their position among `runs`."""
    numbers = list(runs)
    return replace(fault, subjects=tuple(on_node(each, numbers[each.parts[0].node]) for each in fault.subjects))
