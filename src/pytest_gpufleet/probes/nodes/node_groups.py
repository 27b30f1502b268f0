"""Pairs and groups of nodes: what all GPUs of some nodes reach together, while other groups measure theirs.

Pairs meet in rounds, mixed by a seed: every node is in one pair at a time, and all pairs of a round are measured at the
same time. Up to 16 nodes every pair comes to it; beyond, each node has four partners, whatever the number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_gpufleet.model.measurement import Measurement, Reading
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.place import Pair, Place, Where
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.probes.nodes import network
from pytest_gpufleet.probes.pairing import some_rounds
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

Group = tuple[int, ...]  # of numbers of nodes
COLLECTIVE = "all_reduce"  # by which pairs of nodes are published
EVERY_PAIR = 16  # nodes up to which all pairs are measured: 15 rounds
ROUNDS = 4  # beyond


def ranks_by_node(world: World) -> dict[int, list[int]]:
    """The ranks of each node of a world, by its number, ascending."""
    found: dict[int, list[int]] = {node: [] for node in sorted({place.node for place in world.places})}
    for index, place in enumerate(world.places):
        found[place.node].append(index)
    return found


def ranks_of(world: World, groups: Iterable[Group]) -> list[list[int]]:
    """The ranks of each of these groups of nodes."""
    by_node = ranks_by_node(world)
    return [sorted(rank for node in group for rank in by_node[node]) for group in groups]


def place_of(group: Group, index: int = 0) -> Where:
    """Of the figures of a pair of nodes, or of group number `index`."""
    if len(group) == 2:
        return Pair(*(Place(node, "node") for node in group))
    return Place(0, "group", index)


def pairs_of_nodes(world: World, nbytes: int, seed: int) -> list[Measurement]:
    """Bus bandwidth of every pair of nodes, or of four rounds of them: all GPUs of both in one all_reduce of `nbytes`.
    Nodes with other numbers of GPUs have a measurement of their own."""
    nodes = [*ranks_by_node(world)]
    rounds = some_rounds(nodes, seed, len(nodes) if len(nodes) <= EVERY_PAIR else ROUNDS)
    return _measured(world, rounds, nbytes, {"seed": seed, "rounds": len(rounds)})


def groups_of_nodes(world: World, nbytes: int) -> list[Measurement]:
    """Bus bandwidth of groups of about sqrt(N) nodes in the order of their numbers; `details` say which."""
    rounds = squares([*ranks_by_node(world)])
    groups = [group for each in rounds for group in each]
    hosts = world.hosts
    names = {f"group{index}": ", ".join(hosts[node] for node in group) for index, group in enumerate(groups)}
    return _measured(world, rounds, nbytes, names)


def squares(nodes: Sequence[int]) -> list[list[Group]]:
    """Groups of about sqrt(N) nodes, all of the same size so that they can be compared. What is left over makes one
    with nodes of the group before it, in a round of its own."""
    size = math.ceil(math.sqrt(len(nodes)))
    whole = len(nodes) // size * size
    groups = [tuple(nodes[begin : begin + size]) for begin in range(0, whole, size)]
    return [groups, [tuple(nodes[-size:])]] if whole < len(nodes) else [groups]


def _measured(
    world: World, rounds: Sequence[Sequence[Group]], nbytes: int, details: Mapping[str, Condition]
) -> list[Measurement]:
    by_rank: list[list[Reading]] = [[] for _ in range(world.size)]
    index = 0
    for groups in rounds:
        ranks = ranks_of(world, groups)
        for group, members, readings in zip(groups, ranks, world.each(ranks, group_bandwidth, nbytes), strict=True):
            for rank, reading in zip(members, readings, strict=True):
                under = {**reading.conditions, "nodes": len(group)}
                told = {**reading.details, **details}
                by_rank[rank].append(replace(reading, place=place_of(group, index), conditions=under, details=told))
            index += 1
    return together(world, by_rank)


# ---------------------------------------------------------------- on ranks


def group_bandwidth(rank: Rank, nbytes: int) -> Reading:
    """`bus_bandwidth` of an all_reduce, as a figure of a group of nodes."""
    reading = bus_bandwidth(rank, COLLECTIVE, nbytes)
    return replace(
        reading,
        metric="node_group_busbw",
        conditions={**reading.conditions, **network.conditions(rank)},
        gpu_state=None,
    )
