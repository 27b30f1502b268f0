"""Nodes of a rack whose NVLinks connect them are one NVLink domain, and share memory over it."""

from __future__ import annotations

import pytest

from pytest_gpufleet import LiveMachine, expect_none, not_applicable, not_judged
from pytest_gpufleet.machine.nvlink_domain import IMEX, Tray, domain_faults
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.model.place import GpuTopology, Missing
from pytest_gpufleet.verdict import orders

pytestmark = [
    pytest.mark.chapter("NVLink domains", "Is every rack one NVLink domain, of the size that was ordered?"),
    pytest.mark.level("quick"),
    pytest.mark.needs(nodes=2),
]


def test_nvlink_domains_are_whole(machine: LiveMachine, fleet_order: Order | None) -> None:
    """NVLink domain of each rack has all nodes ordered, with one IMEX node list

    A domain is a ClusterUUID and a CliqueId of `nvidia-smi -q` together: racks share clique numbers. A node outside
    the domain of its rack reaches the others over the network, at a fraction of the rate, or not at all. Look at the
    partitions of the NVLink switches, then reseat the tray. `domain.nodes` in an order (18 in an NVL72) says how many
    nodes there are; without it domains may be of any size.
    """
    nodes = [node.machine for node in machine.nodes if node.machine]
    imex = {node.node: IMEX.of(node.host) for node in nodes if any(gpu.of_rack for gpu in node.gpus)}
    trays = {
        node.node: Tray(GpuTopology(node.gpus).domain, getattr(imex[node.node], "nodes", ()))
        for node in nodes
        if node.node in imex
    }
    if not trays:
        not_applicable("no GPU of these nodes has NVLinks to other nodes")
    expect_none(domain_faults(trays, orders.nodes_of_domain(fleet_order)))
    if unread := [f"node {node}: {why}" for node, why in imex.items() if isinstance(why, Missing)]:
        not_judged("\n".join(unread))
