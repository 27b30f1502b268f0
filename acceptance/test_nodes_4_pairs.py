"""Pairs and groups of nodes exchange data as fast as others of the same kind."""

from __future__ import annotations

import pytest

from pytest_gpufleet import GiB, Judge, KiB, Measurement, MiB, Size, World
from pytest_gpufleet.probes import between_nodes
from pytest_gpufleet.probes.collectives.speed import fitting
from pytest_gpufleet.probes.search.nodes import who_slows_nodes

pytestmark = [
    pytest.mark.chapter("Between nodes: pairs", "Which nodes, or what between them, would slow the others?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
]

# Pairs of nodes are published at 8 GiB. Where that takes too long, the largest that does not.
SIZES = [Size(nbytes, rehearsal=nbytes // (256 * KiB)) for nbytes in (64 * MiB, 1 * GiB, 8 * GiB)]
SEED = 16  # by which nodes meet: the same nodes meet in every run


@pytest.mark.figures("node_group_busbw", peers="which are the pairs of nodes with such GPUs")
def test_pairs_of_nodes(nccl_group: World, judge: Judge) -> None:
    """Bus bandwidth of pairs of nodes: every pair up to 16 nodes, four partners for each node beyond

    All GPUs of two nodes reduce together, while other pairs do so too. If pairs are slow, the suite looks for the cause
    and the first line says what it found. A node is slow with every partner: look at its network adapters, their cables
    and switch ports (`ibstat`, `mlxlink`), at GPUDirect RDMA, and at what differs in its software. Only two nodes are
    slow with each other: look at the switches and cables between them. Two groups of nodes are slow with each other:
    look at the switch between them. If pairs across racks are slower by design, say so with a tolerance of
    `node_group_busbw` in a profile of your own. Two nodes alone cannot tell which of them it is.
    """
    nbytes = largest(nccl_group)
    pairs = between_nodes.pairs_of_nodes(nccl_group, nbytes, SEED)

    def again() -> list[Measurement]:
        pairs[:] = between_nodes.pairs_of_nodes(nccl_group, nbytes, SEED)
        return pairs

    judge(*pairs, required=False, again=again, on_miss=lambda: who_slows_nodes(nccl_group, pairs, nbytes))


@pytest.mark.needs(nodes=9)
@pytest.mark.figures("node_group_busbw", peers="which are the groups of as many nodes")
def test_groups_of_nodes(nccl_group: World, judge: Judge) -> None:
    """Bus bandwidth of groups of about sqrt(N) nodes, all at the same time

    Finds what no pair shows: a switch that carries one pair and not several, or routes that meet on one cable. If a
    group is slower than the others, the suite halves it until it knows which part is slow, or between which halves
    something is. Look at the switches and cables that those nodes share, at routing and at congestion control.
    """
    nbytes = largest(nccl_group)
    judge(
        *between_nodes.groups_of_nodes(nccl_group, nbytes),
        required=False,
        again=lambda: between_nodes.groups_of_nodes(nccl_group, nbytes),
        on_miss=lambda: who_slows_nodes(nccl_group, [], nbytes),
    )


def largest(nccl_group: World) -> int:
    return between_nodes.affordable(nccl_group, fitting(nccl_group, "all_reduce", SIZES))[-1]
