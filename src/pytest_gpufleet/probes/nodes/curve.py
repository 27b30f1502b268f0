"""How figures change with the number of nodes: 1, 2, 4 ... up to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.nodes import network
from pytest_gpufleet.probes.nodes.node_groups import COLLECTIVE, ranks_by_node, ranks_of
from pytest_gpufleet.probes.timing.all_ranks import agree
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

# Of one operation, which is done nine times for a figure. On sockets, at 4 GB/s, two nodes need 4 s for 8 GiB.
LONGEST_SECONDS = 1.5
TRIAL = 64 * MiB


def doubling(world: World) -> list[World]:
    """The first 1, 2, 4 ... nodes of a world, and all of them."""
    nodes = tuple(ranks_by_node(world))
    counts = [1 << power for power in range(len(nodes).bit_length()) if 1 << power < len(nodes)]
    return list(map(world.subset, ranks_of(world, [nodes[:count] for count in (*counts, len(nodes))])))


def affordable(world: World, sizes: Sequence[int]) -> list[int]:
    """Those of these sizes, in bytes, with which nodes are measured. Where nodes have fast ports (InfiniBand, RoCE,
    EFA), all of them: limits are published for such networks, and a broken one must not escape them. Elsewhere the
    smallest, and those that all ranks reduce in a time that a check has."""
    most = world.run(_affordable, max(sizes))[0]
    return [size for size in sizes if size <= max(most, min(sizes))]


def _affordable(rank: Rank, most: int) -> int:
    if most <= TRIAL or "network" in network.conditions(rank):
        return most
    reading = bus_bandwidth(rank, COLLECTIVE, TRIAL)
    rate = reading.value * 1e9 / COLLECTIVES[COLLECTIVE].factor(rank.size)  # bytes a second
    return agree(rank, int(rate * LONGEST_SECONDS))


def collective_curve(rank: Rank, name: str, sizes: Sequence[int]) -> list[Reading]:
    """`bus_bandwidth` of a collective by size; across nodes also under the conditions of their network."""
    under = network.conditions(rank) if rank.size > rank.local_size else {}
    readings = [bus_bandwidth(rank, name, nbytes) for nbytes in sizes]
    return [replace(reading, conditions={**reading.conditions, **under}) for reading in readings]
