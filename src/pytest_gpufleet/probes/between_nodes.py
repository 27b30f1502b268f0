"""What nodes reach together: rails, pairs and groups of nodes, and how it changes with their number.

A rail is the GPUs of the same index on all nodes, and the network adapters next to them. Within it nodes meet in pairs,
in rounds that a seed mixes, and send to each other both ways at the same time: what each gets is the rate of its
adapter, whatever NCCL's algorithms make of larger groups."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple

import torch

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.rdma import BANDWIDTH, LATENCY, NBYTES, Perftest, Written
from pytest_gpufleet.model.conditions import Condition, Conditions
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import Measurement, MiB, Reading
from pytest_gpufleet.model.place import Pair, Place, Where, grouped
from pytest_gpufleet.probes.collectives.speed import MNNVL, bus_bandwidth, network_conditions
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.links.copies import IndexPair, Samples, some_rounds
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.probes.search.collective import swaps
from pytest_gpufleet.probes.timing import RUN_SECONDS, agree, everyones
from pytest_gpufleet.world.world import Rank, World


def nvlink_domains(world: World) -> list[list[int]]:
    """The nodes of each NVLink domain, and each that is in none by itself; nothing where no two are in one."""
    of_node = {place.node: gpu.domain for place, gpu in zip(world.places, world.gpus, strict=False)}
    domains = [*grouped((domain or node, node) for node, domain in sorted(of_node.items())).values()]
    return domains if any(len(nodes) > 1 for nodes in domains) else []


def without_nvlink(world: World) -> AbstractContextManager[None]:
    """In this block nodes of an NVLink domain reach each other over the network too: ranks are started afresh."""
    return world.restarted([{MNNVL: "0"}] * world.size) if nvlink_domains(world) else nullcontext()


# Pairs and groups of nodes: what all GPUs of some nodes reach together, while other groups measure theirs. Up to 16
# nodes every pair meets; beyond, each node has four partners, whatever the number of nodes. Where there are NVLink
# domains it has four in its own, and about as many outside.

Group = tuple[int, ...]  # of numbers of nodes
COLLECTIVE = "all_reduce"  # by which pairs of nodes are published
EVERY_PAIR = 16  # nodes up to which all pairs are measured: 15 rounds
ROUNDS = 4  # beyond


def ranks_by_node(world: World) -> dict[int, list[int]]:
    """The ranks of each node of a world, by its number, ascending."""
    return dict(sorted(grouped((place.node, index) for index, place in enumerate(world.places)).items()))


def ranks_of(world: World, groups: Iterable[Group]) -> list[list[int]]:
    by_node = ranks_by_node(world)
    return [sorted(rank for node in group for rank in by_node[node]) for group in groups]


def pairs_of_nodes(world: World, nbytes: int, seed: int) -> list[Measurement]:
    """Bus bandwidth of every pair of nodes, or of four rounds of them: all GPUs of both in one all_reduce."""
    rounds = meetings([*ranks_by_node(world)], nvlink_domains(world), seed)
    return _measured(world, rounds, nbytes, {"seed": seed, "rounds": len(rounds)})


def meetings(nodes: Sequence[int], domains: Sequence[Sequence[int]], seed: int) -> list[list[IndexPair]]:
    """The pairs of each round. All domains have theirs at the same time, then pairs across them."""
    if len(nodes) <= EVERY_PAIR or not domains:
        return some_rounds(nodes, seed, len(nodes) if len(nodes) <= EVERY_PAIR else ROUNDS)
    home = {node: number for number, members in enumerate(domains) for node in members}
    inside = itertools.zip_longest(*(meetings(members, (), seed) for members in domains), fillvalue=())
    across = some_rounds(nodes, seed, 2 * ROUNDS if len(domains) > 1 else 0)  # of two racks half of the pairs are
    return [
        *([pair for pairs in each for pair in pairs] for each in inside),
        *([(a, b) for a, b in pairs if home[a] != home[b]] for pairs in across),
    ]


def mixed(nodes: Sequence[int], domains: Iterable[Sequence[int]]) -> list[int]:
    """One node of each NVLink domain after the other, so that all parts of this order have as many of each."""
    position = {node: index for members in domains for index, node in enumerate(members)}
    return sorted(nodes, key=lambda node: (position.get(node, 0), node))


def groups_of_nodes(world: World, nbytes: int) -> list[Measurement]:
    """Bus bandwidth of groups of about sqrt(N) nodes by number, or mixed of all NVLink domains; `details` say which."""
    rounds = squares(mixed([*ranks_by_node(world)], nvlink_domains(world)))
    hosts, groups = world.hosts, enumerate(itertools.chain(*rounds))
    names = {f"group{index}": ", ".join(hosts[node] for node in group) for index, group in groups}
    return _measured(world, rounds, nbytes, names)


def squares(nodes: Sequence[int]) -> list[list[Group]]:
    """Groups of about sqrt(N) nodes, all of one size. What is left makes one with others, in a round of its own."""
    size = math.ceil(math.sqrt(len(nodes)))
    whole = len(nodes) // size * size
    groups = [tuple(nodes[begin : begin + size]) for begin in range(0, whole, size)]
    return [groups, [tuple(nodes[-size:])]] if whole < len(nodes) else [groups]


def _measured(world: World, rounds: Sequence[Sequence[Group]], nbytes: int, details: Conditions) -> list[Measurement]:
    by_rank: list[list[Reading]] = [[] for _ in range(world.size)]
    index = 0
    for groups in rounds:
        ranks = ranks_of(world, groups)
        for group, members, readings in zip(groups, ranks, world.each(ranks, group_bandwidth, nbytes), strict=True):
            pair = len(group) == 2
            where = Pair(*(Place(node, "node") for node in group)) if pair else Place(0, "group", index)
            for rank, reading in zip(members, readings, strict=True):
                under, about = {**reading.conditions, "nodes": len(group)}, {**reading.details, **details}
                by_rank[rank].append(replace(reading, place=where, conditions=under, details=about))
            index += 1
    return together(world, by_rank)


def group_bandwidth(rank: Rank, nbytes: int) -> Reading:
    """`bus_bandwidth` of an all_reduce, as a figure of a group of nodes."""
    return replace(bus_bandwidth(rank, COLLECTIVE, nbytes), metric="node_group_busbw", gpu_state=None)


RailsAtOnce = Literal["one", "all"]
RAIL_ROUNDS = 3  # so that each node has two partners, also of an odd number of nodes, of which one rests in each round
PARTNERS = 2  # that make the figure one of the node alone


class Rails(NamedTuple):
    """What rails reach: the `measurement` by rails of nodes, and GB/s of each pair of nodes, by rail."""

    measurement: Measurement
    pairs: dict[int, dict[IndexPair, float]]


def rails_of(world: World) -> list[list[int]]:
    """The ranks of each rail, one of every node, in the order of the nodes. Rails that a node has not are none."""
    nodes = ranks_by_node(world).values()
    return [[ranks[rail] for ranks in nodes] for rail in range(min(map(len, nodes)))]


def rail_bandwidth(world: World, at_once: RailsAtOnce, nbytes: int, seed: int) -> Rails:
    """GB/s of the rails of all nodes, of messages of `nbytes`: of one rail after the other, or of all at once."""
    rails, nodes = rails_of(world), [*ranks_by_node(world)]
    rounds = some_rounds(range(len(nodes)), seed, RAIL_ROUNDS)
    groups = [rails] if at_once == "all" else [[rail] for rail in rails]
    answers = [by_rank for group in groups for by_rank in world.each(group, rail_pairs, rounds, nbytes)]
    pairs = {
        rail: {(nodes[a], nodes[b]): samples for (a, b), samples in slowest([taken for taken, _ in by_rank]).items()}
        for rail, by_rank in enumerate(answers)
    }
    conditions = {"at_once": at_once, "bytes": nbytes, **answers[-1][0][1]}
    return _rails("rail_bandwidth", nodes, pairs, conditions, {"seed": seed, "rounds": len(rounds)})


def _rails(
    metric: str, nodes: Iterable[int], pairs: Mapping[int, Mapping[IndexPair, Samples]],
    conditions: Conditions, details: Conditions,
) -> Rails:  # fmt: skip
    """The rail of a node is worth what it reaches with its best partner; with a lone one, what the two reach."""
    samples: dict[Where, Samples] = {}
    for rail, node in itertools.product(pairs, nodes):
        own = {pair: taken for pair, taken in pairs[rail].items() if node in pair}
        best, taken = max(own.items(), key=lambda item: median(item[1]))
        both = Pair(*(Place(end, "rail", rail) for end in best))
        samples[Place(node, "rail", rail) if len(own) >= PARTNERS else both] = taken
    measured = Measurement(metric, {at: median(taken) for at, taken in samples.items()}, conditions, samples, details)
    return Rails(measured, {rail: {pair: median(each[pair]) for pair in each} for rail, each in pairs.items()})


@dataclass
class RdmaRails:
    """What nodes write to each other by RDMA, one rail after the other. `write` has ports write (network.written);
    `hosts`: the names of the nodes, `ports` those of their ports, by rail. `failed`: who could not, by why."""

    write: Callable[[Perftest, Sequence[IndexPair], Sequence[str]], Mapping[IndexPair, Sequence[Written]]]
    hosts: Mapping[int, str]
    ports: Mapping[int, str]
    seed: int
    failed: dict[str, Fault] = field(default_factory=dict)

    def bandwidth(self, port_rate: int) -> Rails:
        """GB/s, of both directions the slower one."""
        self.failed = {}
        pairs: dict[int, dict[IndexPair, Samples]] = {rail: {} for rail in self.ports}
        for rail, meeting in self._meetings():
            pairs[rail] |= {pair: (rate,) for pair, rate in zip(meeting, self.reached(rail, meeting), strict=True)}
        names = {str(Place(node, "rail", rail)): port for node in self.hosts for rail, port in self.ports.items()}
        return _rails("rdma_bandwidth", self.hosts, pairs, {"bytes": NBYTES, "port_rate": port_rate}, names)

    def _meetings(self) -> Iterable[tuple[int, list[IndexPair]]]:
        return itertools.product(self.ports, some_rounds([*self.hosts], self.seed, RAIL_ROUNDS))

    def reached(self, rail: int, pairs: Sequence[Group]) -> list[float]:
        ways = [(a, b) for a, b in pairs], [(b, a) for a, b in pairs]
        both = [self._written(BANDWIDTH, rail, each) for each in ways]
        return [min(figures) / 8 for figures in zip(*both, strict=True)]

    def latency(self) -> Measurement:
        """Microseconds of one way, with the best of some partners."""
        values: dict[Where, float] = {}
        for rail, meeting in self._meetings():
            for pair, figure in zip(meeting, self._written(LATENCY, rail, meeting), strict=True):
                for place in (Place(node, "rail", rail) for node in pair if figure):
                    values[place] = min(figure, values.get(place, figure))
        return Measurement("rdma_latency", values, {"bytes": 2})

    def _written(self, test: Perftest, rail: int, ways: Sequence[IndexPair]) -> list[float]:
        """0 of those that could not, or of a node that is lost."""
        found = self.write(test, ways, [self.ports[rail]])
        for (a, b), (each,) in found.items():
            if each.why:
                ends = Pair(Place(a, "node"), Place(b, "node")) if each.alone is None else Place(each.alone, "node")
                text = f"{self.hosts[a]} to {self.hosts[b]}: {each.why}"
                self.failed[text] = Fault("network_adapter_fails", (ends,), text)
        return [found[way][0].figure if way in found else 0.0 for way in ways]


def slowest(by_rank: Sequence[dict[IndexPair, Samples]]) -> dict[IndexPair, Samples]:
    """The samples of each pair, of the two ranks those of the slower one."""
    by_pair = grouped(item for taken in by_rank for item in taken.items())
    return {pair: min(samples, key=median) for pair, samples in by_pair.items()}


def rail_pairs(
    rank: Rank, rounds: Sequence[Sequence[IndexPair]], nbytes: int
) -> tuple[dict[IndexPair, Samples], dict[str, Condition]]:
    """GB/s of this rank's pairs in some rounds, by indices of the group, and the conditions."""
    taken = swaps(rank, rounds, nbytes, RUN_SECONDS)
    torch.cuda.empty_cache()  # the next check may need all memory
    rates = {pair: tuple(nbytes / each / 1e9 for each in samples) for pair, samples in taken.items()}
    return rates, network_conditions(rank)


# Of one operation, which is done nine times for a figure. On sockets, at 4 GB/s, two nodes need 4 s for 8 GiB.
LONGEST_SECONDS = 1.5
TRIAL = 64 * MiB


def doubling(world: World) -> list[World]:
    """The first 1, 2, 4 ... nodes of a world, and all: one NVLink domain after the other, the first also whole."""
    nodes, domains = tuple(ranks_by_node(world)), nvlink_domains(world)
    whole = {len(domains[0])} if domains else set[int]()
    counts = {min(1 << power, len(nodes)) for power in range(len(nodes).bit_length() + 1)} | whole
    nodes = tuple(itertools.chain(*domains)) or nodes
    return list(map(world.subset, ranks_of(world, [nodes[:count] for count in sorted(counts)])))


def affordable(world: World, sizes: Sequence[int]) -> list[int]:
    """Those of these sizes, in bytes, with which nodes are measured: all where nodes have fast ports, since limits are
    published for such networks; elsewhere the smallest, and those that all ranks reduce in a time that a check has."""
    most = world.run(_affordable, max(sizes))[0]
    return [size for size in sizes if size <= max(most, min(sizes))]


def _affordable(rank: Rank, most: int) -> int:
    fast = rank.device.type == "cuda" and network_ports.any_active()
    if most <= TRIAL or any(there for (there,) in everyones(rank, [fast])):
        return most
    reading = bus_bandwidth(rank, COLLECTIVE, TRIAL)
    rate = reading.value * 1e9 / COLLECTIVES[COLLECTIVE].factor(rank.size)  # bytes a second
    return agree(rank, int(rate * LONGEST_SECONDS))
