"""All nodes are alike, and none is slower than the others. What the nodes' own runs recorded is compared."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_gpufleet import LiveMachine, expect_none, not_applicable, not_judged
from pytest_gpufleet.verdict.fleet import equality, fleet_peers, host_runs

pytestmark = [
    pytest.mark.chapter("Nodes alike", "Are all nodes alike, and equally fast?"),
    pytest.mark.level("quick"),
    pytest.mark.needs(nodes=2),
]


@pytest.fixture
def own_runs(machine: LiveMachine) -> Mapping[int, host_runs.HostRun]:
    """What each node came to by itself, also one that was lost or left out since."""
    return {node.number: node.run for node in machine.nodes if node.run}


def test_nodes_are_alike(own_runs: Mapping[int, host_runs.HostRun]) -> None:
    """All nodes have the same hardware, firmware, software, environment and limits

    A node with another driver, firmware, NCCL or network plugin hangs or slows down all others, and passes every check
    by itself. Change the named node to what most have: its image, its BIOS and firmware, its limits (`ulimit -a`), the
    variables of its environment. Nodes with other software or firmware take no part in the checks between nodes.
    Without a majority no node can be blamed, and none is left out.
    """
    expect_none(fleet_peers.nodes_differ(own_runs, equality.unlike))


def test_no_node_is_slower_than_the_others(own_runs: Mapping[int, host_runs.HostRun]) -> None:
    """No GPU, link or host is slower than its peers on all nodes

    A node that is slow everywhere has no peer at home that shows it, and may still meet its limits; jobs on many nodes
    run at its pace. Look at what its GPUs have in common: clocks, power limit, cooling, BIOS settings, memory modules
    (`dmidecode -t memory`), and what else runs there.
    """
    expect_none(each.fault for each in fleet_peers.slow_places(own_runs).slow)


@pytest.mark.level("standard")
def test_nodes_compute_the_same_bits(own_runs: Mapping[int, host_runs.HostRun]) -> None:
    """GPUs of one model with the same libraries compute the same bits on all nodes

    Each node's own run has hashed what its GPUs compute of fixed data. A node on which all GPUs agree on wrong bits
    passes every check by itself, and spoils what is trained on all. Compare its CUDA libraries and its environment with
    the others' (`pip list`, LD_PRELOAD); if they are the same, its GPUs, or what they share, are bad. Of two nodes
    neither can be named: add a third. Nodes with other GPUs or versions are not compared.
    """
    if not fleet_peers.fingerprints_in_common(own_runs):
        not_applicable("no two nodes have fingerprints of the same GPU model and libraries")
    expect_none(fleet_peers.nodes_differ(own_runs, equality.other_bits))


def test_clocks_agree(machine: LiveMachine) -> None:
    """Clock skew between nodes is small

    With clock skew the logs of a failure cannot be put in order, and certificates and leases of file systems fail. Look
    at `chronyc tracking` or `timedatectl` of the node that is named, and whether it reaches its time server. Network
    delays make clocks seem up to some milliseconds apart; 50 ms are allowed.
    """
    ahead = {node.number: node.clock_ahead for node in machine.nodes if node.clock_ahead is not None}
    if len(ahead) < 2:
        not_judged("clocks of fewer than two nodes are known")
    expect_none(fleet_peers.clocks_apart(ahead))
