"""Twenty planted faults on a thousand made-up nodes: each is named, and nobody else.

Nodes are those of tests/fleets.py (of 4 GPUs), pairs and rails those of tests/probes/test_node_culprit.py, measured and
searched as the suite does it. No rank is started: rounds are counted, and their time is what they would take if each
took SECONDS, which is assumed.
"""

import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pytest_gpufleet.machine.rdma import wired_otherwise
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.probes.links.copies import some_rounds
from pytest_gpufleet.probes.search.nodes import Culprits, of_rails
from pytest_gpufleet.run.node_runs import usual
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.fleet.host_runs import HostRun

sys.path.insert(1, str(Path(__file__).parents[1]))
from tests.fleets import host_run, rejected, slower
from tests.probes.test_node_culprit import Fabric

RAILS, SECONDS = 8, 4.0  # assumed of a round: groups are made, and sizes measured, beside what the pairs take
LEAF, HALF_A_RACK = range(40, 72), range(120, 136)
ALONE: dict[str, dict[int, HostRun]] = {
    "a node is slow everywhere": {7: host_run("gf0007", change=slower(0.1))},
    "a GPU is slow": {12: host_run("gf0012", change=slower(0.12, 2)), 13: host_run("gf0013", change=slower(0.2, 0))},
    "another driver": {20: host_run("gf0020", machine=lambda topology: replace(topology, driver="570.86.15"))},
    "its own run rejects a node": {31: rejected("gf0031")},
}
SLOW = {3: 0.5, 80: 0.6, 81: 0.6, 90: 0.3}  # 80 and 81 are two at once
SLOW_RAILS = {(5, 1): 0.5, (9, 6): 0.7}  # by node and rail


def alone(nodes: int) -> set[tuple[str, str]]:
    """What the runs of these nodes amount to beside each other, by node."""
    planted = {node: run for each in ALONE.values() for node, run in each.items()}
    names = {node: f"gf{node:04}" for node in range(nodes)}
    fleet = judge_fleet([planted.get(node) or host_run(name) for node, name in names.items() if node != 33], (), [
        *names.values()
    ])  # fmt: skip
    slow = {(fleet.hosts[each.node].host, "slow") for each in fleet.slow}
    other = {(host, "unlike") for each in fleet.differences for host in each.hosts}
    refused = {(run.host, "rejected") for run in fleet.hosts if run.record.verdict == "REJECTED"}
    return {*slow, *other, *refused, *((host, gap.kind) for gap in fleet.gaps for host in gap.hosts)}


def hung(nodes: int, stopped: Collection[int]) -> set[int]:
    """Whose own run falls behind the others after 10 min."""
    took = {node: [30.0 + node % 5, 30.0 + node % 7] for node in range(nodes)} | {node: [31.0] for node in stopped}
    steps = {node: usual(len(own), [*took.values()]) for node, own in took.items()}
    return {node for node, step in steps.items() if 700.0 - sum(took[node]) - step > 600.0}


def pairs(nodes: int, seed: int) -> tuple[Culprits, tuple[tuple[int, int], ...], Fabric]:
    """Who is found, which links are slow, of which the first is cut, and what it took."""
    away = {*LEAF, *HALF_A_RACK, *SLOW}
    met = [each for pairs in some_rounds(range(nodes), seed, 4) for each in pairs if away.isdisjoint(each)]
    links = (met[0], met[len(met) // 2], met[-1])
    rest = [node for node in range(nodes) if node not in (*LEAF, *HALF_A_RACK)]
    figures = dict(zip(links, (0.0, 0.5, 0.7), strict=True))
    fabric = Fabric(nodes, SLOW, figures, [LEAF, HALF_A_RACK, rest], 0.4, seed=seed)
    return fabric.searched(), links, fabric


def rails(nodes: int, seed: int) -> list[Fault]:
    fabrics = [Fabric(nodes, {node: by for (node, at), by in SLOW_RAILS.items() if at == rail}, seed=seed + rail)
               for rail in range(RAILS)]  # fmt: skip
    found = {rail: fabric.searched() for rail, fabric in enumerate(fabrics)}
    return of_rails(found, {node: f"gf{node:04}" for node in range(nodes)})


def cables(nodes: int) -> set[tuple[int, str]]:
    """Two cables of one node are swapped."""
    ports = {node: {f"mlx5_{rail}": f"switch {rail}" for rail in range(RAILS)} for node in range(nodes)}
    ports[50] |= {"mlx5_2": "switch 3", "mlx5_3": "switch 2"}
    faults = wired_otherwise("cable_swapped", ports)
    return {(each.subjects[0].parts[0].node, each.name) for each in faults}


def show(nodes: int, seed: int = 1) -> None:
    began = time.process_time()
    print(f"own runs: {sorted(alone(nodes))}; hung: {sorted(hung(nodes, (44, 60)))}")
    found, links, fabric = pairs(nodes, seed)
    islands = {(min(each, key=len)[0], len(min(each, key=len))) for each in found.between}
    print(f"nodes {found.nodes}, links {found.links}, islands by their first node and size {sorted(islands)}")
    print(f"planted: nodes {tuple(SLOW)}, links {links}, {LEAF}, {HALF_A_RACK}")
    seconds = SECONDS * (4 + fabric.calls)
    print(f"4 rounds of pairs and {fabric.calls} of the search: {seconds:.0f} s if each takes {SECONDS:g} s")
    print(f"rails {[str(fault.subjects[0]) for fault in rails(nodes, seed)]}, cables {cables(nodes)}")
    print(f"{time.process_time() - began:.1f} s of CPU")


if __name__ == "__main__":
    show(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
