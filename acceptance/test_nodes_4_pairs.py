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
    """Bus bandwidth of pairs of nodes

    All GPUs of two nodes reduce together, while other pairs do so too: every pair up to 16 nodes, four partners a node
    beyond. If pairs are slow, the first line names the cause. A node that is slow with every partner: check adapters,
    cables, switch ports (`ibstat`, `mlxlink`), GPUDirect RDMA and software. Two nodes, or two groups of nodes, that are
    slow with each other: check the switches between them; if that is so by design, set a tolerance of
    `node_group_busbw` in your profile.
    """
    nbytes = largest(nccl_group)
    pairs: list[Measurement] = []

    def measured() -> list[Measurement]:
        pairs[:] = between_nodes.pairs_of_nodes(nccl_group, nbytes, SEED)
        return pairs

    judge(measured, required=False, on_miss=lambda: who_slows_nodes(nccl_group, pairs, nbytes))


@pytest.mark.needs(nodes=9)
@pytest.mark.figures("node_group_busbw", peers="which are the groups of as many nodes")
def test_groups_of_nodes(nccl_group: World, judge: Judge) -> None:
    """Bus bandwidth of groups of nodes

    Groups of about sqrt(N) nodes reduce at the same time. This finds a switch that carries one pair and not several, or
    routes that meet on one cable. If a group is slow, the suite halves it until it knows which part is slow. Check the
    switches and cables that those nodes share, routing and congestion control.
    """
    nbytes = largest(nccl_group)
    judge(
        lambda: between_nodes.groups_of_nodes(nccl_group, nbytes),
        required=False,
        on_miss=lambda: who_slows_nodes(nccl_group, [], nbytes),
    )


def largest(nccl_group: World) -> int:
    return between_nodes.affordable(nccl_group, fitting(nccl_group, "all_reduce", SIZES))[-1]
