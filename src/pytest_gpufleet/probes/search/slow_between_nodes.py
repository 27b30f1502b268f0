"""Who makes the network between nodes slow: what the suite looks for by itself after figures of nodes were too low."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.probes.nodes.node_groups import group_bandwidth, ranks_by_node, ranks_of
from pytest_gpufleet.probes.nodes.rails import Rails, rail_pairs, rails_of, slowest
from pytest_gpufleet.probes.search.deadline import Deadline, failed
from pytest_gpufleet.probes.search.node_culprit import SLOW, Culprits, Group, culprits, narrowed
from pytest_gpufleet.probes.search.slow_collective import gigabytes
from pytest_gpufleet.world.world import World

Hosts = Mapping[int, str]  # the names of nodes, by their numbers
SHOWN = 8  # numbers of nodes in a sentence
FEW = 4  # nodes of which halves are no groups
SLOW_CPU = 0.5  # of CPU ranks, whose machine does other things too


def who_slows_nodes(world: World, measurements: Iterable[Measurement], nbytes: int) -> list[Fault]:
    """Who makes nodes slow together: some of them, what lies between two, or what all share. Pairs of nodes among the
    `measurements` are not measured again; without any, some are. Where every pair is fine, groups of nodes are. Nodes
    with other numbers of GPUs than most take no part: they reach less, or more, without being ill."""
    nodes, deadline = _equally_large(world), Deadline()
    seen = {
        (where.first.node, where.second.node): value
        for each in measurements
        for where, value in each.values.items()
        if isinstance(where, Pair) and {where.first.node, where.second.node} <= {*nodes}
    }

    def measure(groups: Sequence[Group]) -> list[float]:
        by_group = deadline.each(world, ranks_of(world, groups), group_bandwidth, nbytes)
        return [min(reading.value for reading in readings) for readings in by_group]

    try:
        found = culprits(nodes, measure, seen, _share(world))
        if named := _named(found, "node_slow", partial(Place, kind="node"), world.hosts):
            return named
        parts = narrowed(nodes, measure, _share(world)) if len(nodes) >= FEW else ()
        return [Fault("network_between_nodes_slow", (), _of_all(parts, found, world.hosts))]
    except Exception as error:  # whatever it is, the miss comes first
        return [Fault("network_between_nodes_slow", (), failed(error))]


def _equally_large(world: World) -> tuple[int, ...]:
    """The nodes with as many GPUs as most of them have; of equally many nodes those with more GPUs."""
    sizes = {node: len(ranks) for node, ranks in ranks_by_node(world).items()}
    nodes = Counter(sizes.values())
    usual = max(nodes, key=lambda size: (nodes[size], size))
    return tuple(node for node, size in sizes.items() if size == usual)


def who_slows_rails(world: World, rails: Rails, nbytes: int) -> list[Fault]:
    """Whose rails are slow, or what lies between two nodes on a rail."""
    deadline, found, nodes = Deadline(), dict[int, Culprits](), [*ranks_by_node(world)]
    try:
        ranks = rails_of(world)
        for rail, seen in rails.pairs.items():
            measure = _on_rail(world, nodes, ranks[rail], deadline, nbytes)
            found[rail] = culprits(nodes, measure, seen, _share(world))
    except Exception as error:
        return [Fault("network_between_nodes_slow", (), failed(error))]
    none = f"no single rail: {_pairs(figure for each in found.values() for figure in each.seen.values())}"
    return of_rails(found, world.hosts, _share(world)) or [Fault("network_between_nodes_slow", (), none)]


def of_rails(found: Mapping[int, Culprits], hosts: Hosts, share: float = SLOW) -> list[Fault]:
    """What was found on each rail, as faults: a node of which all rails are slow is one, and so is a rail that is slow
    on all nodes."""
    whole = set.intersection(*({*each.nodes} for each in found.values())) if len(found) > 1 else set[int]()
    what = f"each of its {len(found)} rails is"
    faults = [Fault("node_slow", (Place(node, "node"),), what) for node in sorted(whole)]
    best = max(each.usual for each in found.values())
    for rail, each in found.items():
        if each.usual < share * best:
            what = f"rail {rail} is slow on all nodes: {gigabytes([each.usual])} is usual there, {gigabytes([best])} on"
            faults.append(Fault("network_between_nodes_slow", (), f"{what} another one"))
        for fault in _named(each, "rail_slow", partial(Place, kind="rail", index=rail), hosts):
            ends = {part.node for where in fault.subjects for part in where.parts}
            faults += [] if ends and ends <= whole else [fault]
    return faults


def _share(world: World) -> float:
    return SLOW if world.gpus else SLOW_CPU


def _on_rail(
    world: World, nodes: Sequence[int], ranks: Sequence[int], deadline: Deadline, nbytes: int
) -> Callable[[Sequence[Group]], list[float]]:
    """What measures pairs of nodes on one rail, which has these ranks, one of each node."""
    at = {node: index for index, node in enumerate(nodes)}

    def measure(pairs: Sequence[Group]) -> list[float]:
        meeting = [(at[a], at[b]) for a, b in pairs]
        (by_rank,) = deadline.each(world, [ranks], rail_pairs, [meeting], nbytes)
        figures = slowest([taken for taken, _ in by_rank])
        return [median(figures[pair]) for pair in meeting]

    return measure


def _named(found: Culprits, code: str, at: Callable[[int], Place], hosts: Hosts) -> list[Fault]:
    usual = f"{gigabytes([found.usual])} is usual"
    slow = []
    for node in found.nodes:
        own = found.of(node)
        slow.append(Fault(code, (at(node),), f"with {len(own)} others it reaches {gigabytes(own.values())}; {usual}"))
    for a, b in found.links:
        what = f"they reach {gigabytes([found.seen[a, b]])} with each other, and more with others; {usual}"
        slow.append(Fault("node_link_slow", (Pair(at(a), at(b)),), what))
    for one, other in found.between:
        across = [found.seen[pair] for pair in found.seen if {*pair} & {*one} and {*pair} & {*other}]
        among = f"{_nodes(one, hosts)} and {_nodes(other, hosts)} are fast among themselves"
        what = f"{among}, and reach {gigabytes(across)} with each other; {usual}"
        slow.append(Fault("network_between_nodes_slow", (), what))
    return slow


def _of_all(parts: Sequence[Group], found: Culprits, hosts: Hosts) -> str:
    """What is known where no node and no pair is to blame."""
    match parts:
        case [one, other]:
            return (
                f"{_nodes(one, hosts)} and {_nodes(other, hosts)} are fast by themselves, and groups of both are slow"
            )
        case [part]:
            return f"every pair is fast, and groups with {_nodes(part, hosts)} are slow"
        case _:
            return f"no single node: {_pairs(found.seen.values())}"


def _pairs(figures: Iterable[float]) -> str:
    values = [*figures]
    if not values:
        return "no two nodes have as many GPUs"
    if len(values) == 1:
        return f"with two nodes nobody can tell which one it is, and they reach {gigabytes(values)}"
    return f"{len(values)} pairs reach {gigabytes(values)}"


def _nodes(group: Group, hosts: Hosts) -> str:
    return some([hosts[node] for node in group], SHOWN)
