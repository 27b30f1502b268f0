"""Records of runs on many nodes that are not here: each node a recorded machine (fleets.py), with figures between
them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from pytest_gpufleet.model.events import Check, NodeFinished, NodeFound, NodeLeftOut, NodeLost
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, Limit
from pytest_gpufleet.model.metric import GiB, Measurement, MiB
from pytest_gpufleet.model.place import WORLD, Pair, Place, joined
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.fleet.fleet_verdict import judged

GROUPS = "acceptance/test_nodes_groups.py::test_pairs_of_nodes"
RAILS = "acceptance/test_nodes_rails.py::test_each_rail"
CURVES = "acceptance/test_nodes_collectives.py::test_bus_bandwidth"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PAIR, RAIL = 440.0, 48.0  # GB/s of healthy ones


@dataclass(frozen=True)
class Between:
    """What is slow between nodes: these nodes with everybody, these rails, and the links of these pairs."""

    nodes: tuple[int, ...] = ()
    rails: tuple[tuple[int, int], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)


def of_nodes(hosts, between=None):
    """The record of a run on these hosts, and the nodes' own runs. A lost node has no run."""
    between = between or Between()
    runs = {node: run for node, run in enumerate(hosts) if node not in between.lost}
    first = hosts[0].record
    found = [
        NodeFound(node, run.host, run.serial, tuple(gpu.uuid for gpu in run.record.topology.gpus))
        for node, run in enumerate(hosts)
    ]
    names = {node.index: node.host for node in found}
    topologies = {node: run.record.topology for node, run in enumerate(hosts)}
    header = msgspec.structs.replace(
        first.run, nodes=tuple(found), nodes_wanted=len(found), transport="ray 2.60.0", secured="token",
        interfaces=("eth0",) * len(found), gpus="4", command=f"pytest acceptance/ --nodes {len(found)} --gpus 4",
    )  # fmt: skip
    record = Record(
        run=header,
        topology=joined(topologies, names),
        topologies=topologies,
        machines={node: run.record.machine for node, run in enumerate(hosts)},
        manifest=first.manifest,
        lost={node: NodeLost(node=node, why=why) for node, why in between.lost.items()},
        left_out={node: NodeLeftOut(node=node, why=why) for node, why in between.left_out.items()},
        finished={
            node: NodeFinished(
                node=node, run=run.folder, verdict=run.record.verdict, reasons=tuple(run.record.reasons),
                basis="physical", exit_status=run.record.exit_status, sha256=run.sha256,
            )
            for node, run in runs.items()
        },
    )  # fmt: skip
    _add_between(record, [node for node in runs if node not in between.left_out], between)
    record.started = list(record.checks)
    return judged(record, "", runs)[0], runs


def _add_between(record, nodes, between):
    near = [(nodes[at - step], node) for step in (1, 2) for at, node in enumerate(nodes)]
    values = {}
    for pair in combinations(nodes, 2) if len(nodes) <= 16 else sorted({(min(pair), max(pair)) for pair in near}):
        slow = {*pair} & {*between.nodes} or pair in between.links
        reached = PAIR * (0.5 if slow else 1) + 0.1 * ((pair[0] + pair[1]) % 9)
        values[Pair(*(Place(node, "node") for node in pair))] = reached
    rails = {Place(node, "rail", rail): RAIL * (0.5 if (node, rail) in between.rails else 1) - 0.01 * (node % 7)
             for node in nodes for rail in range(len(record.topologies[nodes[0]].gpus))}  # fmt: skip
    _check(record, GROUPS, [_judged(GROUPS, "node_group_busbw", values, 400.0, nodes=2, bytes=8 * GiB)], [
        *(Fault("node_slow", (Place(node, "node"),), "with 4 others it reaches 219 to 221 GB/s", check=GROUPS)
          for node in between.nodes),
        *(Fault("node_link_slow", (Pair(*(Place(node, "node") for node in pair)),), "with each other", check=GROUPS)
          for pair in between.links),
    ])  # fmt: skip
    _check(record, RAILS, [_judged(RAILS, "rail_bandwidth", rails, 45.0, bytes=64 * MiB, at_once="all")], [
        Fault("rail_slow", (Place(node, "rail", rail),), "with 3 others it reaches 24 GB/s", check=RAILS)
        for node, rail in between.rails
    ])  # fmt: skip
    counts = [1 << power for power in range(len(nodes).bit_length()) if 1 << power <= len(nodes)]
    _check(record, CURVES, [
        _judged(CURVES, "busbw", {WORLD: 480.0 * (1 - 0.03 * step) * (1 - 2.0 ** (-0.5 * power))}, None,
                collective=collective, bytes=MiB << power, nodes=count, ranks=4 * count, dtype="float32")
        for collective in COLLECTIVES for step, count in enumerate({*counts, len(nodes)}) for power in (0, 5, 10, 13)
    ], [])  # fmt: skip


def _judged(check, metric, values, least, **conditions):
    measurement = Measurement(metric, values, conditions)
    if least is None:
        return Finding(check, measurement, "for information")
    limit = Limit(metric, "min", least, "GB/s", "published", "a paper", {}, "h200.toml")
    missed = tuple(place for place, value in values.items() if value < least)
    return Finding(check, measurement, "missed" if missed else "met", limit, missed)


def _check(record, name, findings, faults):
    failed = any(finding.state == "missed" for finding in findings)
    record.findings += findings
    record.faults += faults
    title = name.partition("::test_")[2].replace("_", " ").capitalize()
    record.checks[name] = Check(name, "failed" if failed else "passed", 3.0, title, "What it checks.",
                                failed_by="limits" if failed else "")  # fmt: skip
