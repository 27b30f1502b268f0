"""Rails: the GPUs of the same index on all nodes, and the network adapters next to them.

Within a rail nodes meet in pairs, in rounds that a seed mixes, and GPUs of a pair send to each other both ways at the
same time: what each of them gets is the rate of its adapter, so the figure is the wire's, whatever NCCL's algorithms
make of larger groups. A rail of one node is worth what it reaches with the best of its partners, which a slow partner
cannot pull down. With one partner only the figure is that of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from pytest_gpufleet.model import place
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.place import Place, Where
from pytest_gpufleet.probes.nodes import network
from pytest_gpufleet.probes.nodes.node_groups import ranks_by_node
from pytest_gpufleet.probes.pairing import Pair, some_rounds
from pytest_gpufleet.probes.search.per_rank_times import swaps
from pytest_gpufleet.probes.timing.all_ranks import RUN_SECONDS
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

RailsAtOnce = Literal["one", "all"]
Samples = tuple[float, ...]
ROUNDS = 3  # so that each node has two partners, also of an odd number of nodes, of which one rests in each round
PARTNERS = 2  # that make the figure one of the node alone


@dataclass(frozen=True)
class Rails:
    """What rails reach: the `measurement` by rails of nodes, and GB/s of each pair of nodes, by rail."""

    measurement: Measurement
    pairs: dict[int, dict[Pair, float]]


def rails_of(world: World) -> list[list[int]]:
    """The ranks of each rail, one of every node, in the order of the nodes. Rails that a node has not are none."""
    nodes = ranks_by_node(world).values()
    return [[ranks[rail] for ranks in nodes] for rail in range(min(map(len, nodes)))]


def rail_bandwidth(world: World, at_once: RailsAtOnce, nbytes: int, seed: int) -> Rails:
    """GB/s of the rails of all nodes, of messages of `nbytes`: of one rail after the other, or of all at once."""
    rails, nodes = rails_of(world), [*ranks_by_node(world)]
    rounds = some_rounds(range(len(nodes)), seed, ROUNDS)
    numbers = range(len(rails))
    turns = [[rail] for rail in numbers] if at_once == "one" else [[*numbers]]
    samples: dict[int, dict[Pair, Samples]] = {}
    under: dict[str, Condition] = {}
    for turn in turns:
        answers = world.each([rails[rail] for rail in turn], rail_pairs, rounds, nbytes)
        for rail, by_rank in zip(turn, answers, strict=True):
            samples[rail] = slowest([taken for taken, _ in by_rank])
            under = by_rank[0][1]
    told = {"seed": seed, "rounds": len(rounds)}
    conditions = {"at_once": at_once, "bytes": nbytes, **under}
    by_place = {where: best for rail in numbers for where, best in _best(rail, nodes, samples[rail]).items()}
    values = {where: median(best) for where, best in by_place.items()}
    return Rails(
        Measurement("rail_bandwidth", values, conditions, by_place, told),
        {rail: {(nodes[a], nodes[b]): median(each) for (a, b), each in samples[rail].items()} for rail in numbers},
    )


def slowest(by_rank: Sequence[dict[Pair, Samples]]) -> dict[Pair, Samples]:
    """The samples of each pair, of the two ranks those of the slower one."""
    found: dict[Pair, Samples] = {}
    for taken in by_rank:
        for pair, samples in taken.items():
            found[pair] = min(samples, found.get(pair, samples), key=median)
    return found


def _best(rail: int, nodes: Sequence[int], pairs: dict[Pair, Samples]) -> dict[Where, Samples]:
    """What the rail of each node reaches with the best of its partners; with a lone one, what the two reach."""
    found: dict[Where, Samples] = {}
    for index, node in enumerate(nodes):
        own = {pair: samples for pair, samples in pairs.items() if index in pair}
        best = max(own, key=lambda pair: median(own[pair]))
        if len(own) >= PARTNERS:
            found[Place(node, "rail", rail)] = own[best]
        else:
            found[place.Pair(*(Place(nodes[end], "rail", rail) for end in best))] = own[best]
    return found


# ---------------------------------------------------------------- on ranks


def rail_pairs(
    rank: Rank, rounds: Sequence[Sequence[Pair]], nbytes: int
) -> tuple[dict[Pair, Samples], dict[str, Condition]]:
    """GB/s of this rank's pairs in some rounds, by indices of the group, and the conditions."""
    taken = swaps(rank, rounds, nbytes, RUN_SECONDS)
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # the next check may need all memory
    rates = {pair: tuple(nbytes / each / 1e9 for each in samples) for pair, samples in taken.items()}
    return rates, network.conditions(rank)
