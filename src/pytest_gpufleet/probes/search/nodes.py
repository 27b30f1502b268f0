"""Which node, or what between nodes, makes a network slow: found from the figures of groups of nodes alone.

Nodes that are fine in a pair are good, and together with all that are fine with them they are an island. Everybody else
is measured with two different members of each island, as many at the same time as share nobody:

- a node that is slow with two good partners at least, and with every island, is slow itself;
- a pair that is slow again although both are of one island has a slow link;
- two islands of which no pair is fine have something slow between them, such as a switch.

Nobody is named for a lone pair, nor where nothing is better than anything else. What shows in larger groups only is
looked for by halves: the slower half of a group is halved again, and where both are alike, halves that mix them show
whether it is what lies between.

If healthy pairs differ by less than 4 % (NOISE to either side), no healthy node is named because others are slow, or
because a switch is; both together can do it."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, islice, product
from math import isnan
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.distributed as dist

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.metric import Measurement, MiB, Size
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.probes import between_nodes
from pytest_gpufleet.probes.between_nodes import EVERY_PAIR, Group, ranks_by_node
from pytest_gpufleet.probes.links.copies import IndexPair, some_rounds
from pytest_gpufleet.probes.search.collective import deadline, failed, span
from pytest_gpufleet.probes.timing import synchronize
from pytest_gpufleet.world.failure import RankFailure
from pytest_gpufleet.world.world import Rank, World

# Figures of disjoint groups that are measured at the same time; higher is better, and those of one size are comparable.
Measure = Callable[[Sequence[Group]], Sequence[float]]
Hosts = Mapping[int, str]  # the names of nodes, by their numbers

# Healthy pairs of 8x H100 reach 448 to 450 GB/s (oci-hpc): 0.2 % to either side of what is usual.
NOISE = 0.02
# Of what is usual: what reaches less is slow, as `node_group_busbw` and `rail_bandwidth` tolerate it. What loses half
# as much is fine; what lies between is neither, or a partner that is nearly slow could make a healthy node look slow.
SLOW = 0.90
SLOW_CPU = 0.5  # of CPU ranks, whose machine does other things too
PARTNERS = 2  # with which a node must be slow before it is named
FIRST_ROUNDS = 3  # of pairs, if none were measured before: of an odd number each node rests in one at most
MOST_CALLS = 16  # of `measure` after that. A single fault takes two to four of them, whatever the number of nodes
MOST_ISLANDS = 4  # a network in more pieces is broken in a way that names nobody
FEW = 4  # nodes of which halves are no groups
SHOWN = 8  # numbers of nodes in a sentence

unnamed = partial(Fault, "network_between_nodes_slow", ())


@dataclass
class Culprits:
    """Who makes pairs of nodes slow (`nodes`, `links` between good nodes, and something `between` islands of them);
    what is known of pairs, and how to learn more. `seen`: all figures, the worst of each pair. `share`: of what is
    usual; less is slow. `meet`: which two can be compared with others."""

    everyone: Sequence[int]
    measure: Measure
    seen: dict[IndexPair, float]
    share: float = SLOW
    meet: Callable[[int, int], bool] = lambda a, b: True
    calls: int = 0
    nodes: tuple[int, ...] = ()
    links: tuple[IndexPair, ...] = ()
    between: tuple[tuple[Group, Group], ...] = ()

    @property
    def usual(self) -> float:
        return _usual(self.seen.values())

    @property
    def slow(self) -> list[IndexPair]:
        enough = self.share * self.usual
        return [pair for pair in sorted(self.seen) if self.seen[pair] < enough]

    def met(self) -> dict[int, set[int]]:
        """With whom each node was measured."""
        found = defaultdict[int, set[int]](set)
        for a, b in self.seen:
            found[a].add(b)
            found[b].add(a)
        return found

    def look(self, pairs: Sequence[IndexPair]) -> dict[IndexPair, float]:
        """Measure these at the same time; of a pair that was measured before the worse figure stays."""
        figures = dict(zip(pairs, _figures(self.measure, pairs), strict=True))
        self.calls += 1
        self.seen.update({pair: min(figure, self.seen.get(pair, figure)) for pair, figure in figures.items()})
        return figures

    def islands(self) -> list[set[int]]:
        """Nodes that are fine with each other, directly or by others; the largest first."""
        found: list[set[int]] = []
        enough = (1 + self.share) / 2 * self.usual
        for pair in (pair for pair in sorted(self.seen) if self.seen[pair] >= enough):
            touched = [island for island in found if island & {*pair}]
            found = [island for island in found if island not in touched] + [set(pair).union(*touched)]
        return sorted(found, key=lambda island: (-len(island), min(island)))


def culprits(
    nodes: Sequence[int], measure: Measure, seen: Mapping[IndexPair, float] | None = None, share: float = SLOW,
    meet: Callable[[int, int], bool] = lambda a, b: True,
) -> Culprits:  # fmt: skip
    """Who makes pairs of these nodes slow. `seen`: what pairs have reached already; without it, some are measured."""
    known = {pair: 0.0 if isnan(figure) else figure for pair, figure in (seen or {}).items()}
    search = Culprits(sorted(nodes), measure, known, share, meet)
    for pairs in () if known else some_rounds(nodes, 0, FIRST_ROUNDS):
        search.look(pairs)
    most = search.calls + MOST_CALLS
    while search.slow and search.calls < most and (pairs := _to_meet(search)):
        search.look(pairs)
    islands, enough = search.islands(), share * search.usual
    # What is slow once can be anything.
    again = _in_turn(pair for pair in search.slow if any({*pair} <= island for island in islands))
    rounds = [search.look(pairs).items() for pairs in islice(again, most - search.calls)]
    search.links = tuple(sorted(pair for figures in rounds for pair, figure in figures if figure < enough))
    few = sorted(islands, key=min) if len(islands) <= MOST_ISLANDS else []
    met, slow, good = search.met(), {*search.slow}, set[int]().union(*few)
    for node in sorted({*nodes} - good):  # slow with two good partners, some of each island, fine with none
        partners = met[node] & good
        enough_met = len(partners) >= PARTNERS and all(partners & island for island in few)
        if enough_met and slow.issuperset(_pair(node, partner) for partner in partners):
            search.nodes += (node,)
    for a, b in combinations(few, 2):  # slow with each other in two pairs that share nobody, and fine in none
        across = [_pair(node, partner) for node in sorted(a) for partner in sorted(met[node] & b)]
        if slow.issuperset(across) and len(_disjoint(across)) >= PARTNERS:
            search.between += ((tuple(sorted(a)), tuple(sorted(b))),)
    return search


def narrowed(group: Group, measure: Measure, share: float = SLOW) -> tuple[Group, ...]:
    """Where a group is slow of which every pair is fine: the part of it that is slow, the two halves between which it
    is, or nothing if no part of it is slower than another. Two or three calls for each time that it is halved."""
    while len(group) >= FEW:
        half = len(group) // 2
        for start in range(1 + len(group) % 2):  # of an odd number one is left out, first the last and then the first
            a, b = group[start : start + half], group[start + half : start + 2 * half]
            of_a, of_b = _figures(measure, [a, b])
            if min(of_a, of_b) < share * max(of_a, of_b):
                group = a if of_a < of_b else b
                break
        else:
            mixed = _figures(measure, [a[: half // 2] + b[half // 2 :], b[: half // 2] + a[half // 2 :]])
            return (a, b) if max(mixed) < share * min(_figures(measure, [a, b])) else ()
    return (group,)


def _figures(measure: Measure, groups: Sequence[Group]) -> list[float]:
    return [0.0 if isnan(figure) else figure for figure in measure(groups)]


def _usual(figures: Iterable[float]) -> float:
    """The mean of the better half, as the verdict has it: a half that is slow cannot hide behind itself."""
    ranked = sorted(figures, reverse=True)
    return fmean(ranked[: max(1, len(ranked) // 2)]) if ranked else 0.0


def _to_meet(search: Culprits) -> list[IndexPair]:
    """Pairs to be measured next, that share nobody: each island, and each node that is on none, with members of every
    other island, until it has met enough; then the nodes that are on none with each other: they may be an island."""
    islands, met = search.islands()[:MOST_ISLANDS], search.met()
    outside = [{node} for node in search.everyone if not any(node in island for island in islands)]
    wanted = list[IndexPair]()
    for island, unit in product(islands, [*islands, *outside]):
        known = set[int]().union(*(met[node] for node in unit)) & island
        if unit is not island and len(known) < PARTNERS:
            one = min(unit, key=lambda node: (len(met[node] & island), node))
            wanted += [_pair(one, other) for other in sorted(island - known) if search.meet(one, other)]
    if wanted:
        return _disjoint(wanted)
    alone = set[int]().union(*outside)
    curious = [node for node in sorted(alone) if len(met[node] & alone) < FIRST_ROUNDS]
    return _disjoint(pair for pair in combinations(curious, 2) if pair not in search.seen and search.meet(*pair))


def _disjoint(pairs: Iterable[IndexPair]) -> list[IndexPair]:
    """As many of these as share nobody, the first ones first."""
    taken: set[int] = set()
    chosen = []
    for pair in pairs:
        if taken.isdisjoint(pair):
            chosen.append(pair)
            taken.update(pair)
    return chosen


def _in_turn(pairs: Iterable[IndexPair]) -> Iterator[list[IndexPair]]:
    """All of these, those at a time that share nobody."""
    left = [*pairs]
    while left:
        yield (now := _disjoint(left))
        left = [pair for pair in left if pair not in now]


def _pair(a: int, b: int) -> IndexPair:
    return min(a, b), max(a, b)


def who_slows_nodes(world: World, measurements: Iterable[Measurement], nbytes: int) -> list[Fault]:
    """Who makes nodes slow together: some of them, what lies between two, or what all share. Pairs of nodes among the
    `measurements` are not measured again. Nodes with other numbers of GPUs than most take no part: they reach less."""
    sizes = {node: len(ranks) for node, ranks in ranks_by_node(world).items()}
    count = Counter(sizes.values())
    most = max(count, key=lambda size: (count[size], size))  # of equally many nodes those with more GPUs
    nodes = tuple(node for node, size in sizes.items() if size == most)
    left, share = deadline(), SLOW if world.gpus else SLOW_CPU
    seen = {
        (where.first.node, where.second.node): value
        for each in measurements
        for where, value in each.values.items()
        if isinstance(where, Pair) and {where.first.node, where.second.node} <= {*nodes}
    }

    def measure(groups: Sequence[Group]) -> list[float]:
        ranks = between_nodes.ranks_of(world, groups)
        by_group = world.each(ranks, between_nodes.group_bandwidth, nbytes, timeout=left())
        return [min(reading.value for reading in readings) for readings in by_group]

    every = ([node for node in each if node in nodes] for each in between_nodes.nvlink_domains(world))
    domains = [*filter(None, every)]
    try:
        found, named = among_nodes(nodes, domains, measure, seen, world.hosts, share)
        if named:
            return named
        nodes = tuple(between_nodes.mixed(nodes, domains))
        names = [_nodes(part, world.hosts) for part in (narrowed(nodes, measure, share) if len(nodes) >= FEW else ())]
    except Exception as error:  # whatever it is, the miss comes first
        return [unnamed(failed(error))]
    if len(names) == 2:
        return [unnamed(f"{names[0]} and {names[1]} are fast by themselves, and groups of both are slow")]
    slow = f"every pair is fine, and groups with {names[0]} are slow" if names else ""
    return [unnamed(slow or f"no single node: {_pairs(found.seen.values())}")]


def among_nodes(
    nodes: Sequence[int], domains: Sequence[Sequence[int]], measure: Measure, seen: Mapping[IndexPair, float],
    hosts: Hosts, share: float = SLOW,
) -> tuple[Culprits, list[Fault]]:  # fmt: skip
    """Who is slow, as faults, and what was found last. What nodes of an NVLink domain reach with each other is held
    against what those of all domains do, and pairs of two domains against such pairs."""
    at, home = partial(Place, kind="node"), {node: number for number, each in enumerate(domains) for node in each}
    figures = dict(seen)
    for pairs in between_nodes.meetings(nodes, domains, 0) if domains and not seen else ():
        figures.update(zip(pairs, measure(pairs), strict=True))
    figures = {pair: 0.0 if isnan(figure) else figure for pair, figure in figures.items()}
    inside = {pair: figure for pair, figure in figures.items() if home.get(pair[0]) == home.get(pair[1])}
    usual, faults = _usual(inside.values()), list[Fault]()
    found = Culprits(nodes, measure, figures)
    for members in domains or [nodes]:
        own = {pair: figure for pair, figure in inside.items() if pair[0] in members}
        if domains and own and median(own.values()) < share * usual:
            what = f"pairs of its {len(members)} nodes reach {span(own.values())}; {span([usual])} is usual"
            faults.append(Fault("nvlink_domain_slow", (Place(min(members), "domain"),), what))
        elif own or not domains:
            found = culprits(members, measure, own, share)
            faults += _named(found, "node_slow", at, hosts)
    if across := {pair: figure for pair, figure in figures.items() if pair not in inside}:
        found = culprits(nodes, measure, across, share, lambda a, b: home[a] != home[b])
        known = {subject for fault in faults for subject in fault.subjects}
        faults += [fault for fault in _named(found, "node_slow", at, hosts) if not known & {*fault.subjects}]
    return found, faults


def who_slows_rails(world: World, rails: between_nodes.Rails, nbytes: int) -> list[Fault]:
    """Whose rails are slow, or what lies between two nodes on a rail."""
    left, ranks = deadline(), between_nodes.rails_of(world)
    at = {node: index for index, node in enumerate(ranks_by_node(world))}

    def measure(rail: int, pairs: Sequence[Group]) -> list[float]:
        meeting = [(at[a], at[b]) for a, b in pairs]
        (by_rank,) = world.each([ranks[rail]], between_nodes.rail_pairs, [meeting], nbytes, timeout=left())
        figures = between_nodes.slowest([taken for taken, _ in by_rank])
        return [median(figures[pair]) for pair in meeting]

    return slow_rails(rails, world.hosts, measure, SLOW if world.gpus else SLOW_CPU)


def slow_rails(
    rails: between_nodes.Rails, hosts: Hosts, measure: Callable[[int, Sequence[Group]], Sequence[float]],
    share: float = SLOW,
) -> list[Fault]:  # fmt: skip
    try:
        found = {rail: culprits([*hosts], partial(measure, rail), seen, share) for rail, seen in rails.pairs.items()}
    except Exception as error:
        return [unnamed(failed(error))]
    none = f"no single rail: {_pairs(figure for each in found.values() for figure in each.seen.values())}"
    return of_rails(found, hosts, share) or [unnamed(none)]


def of_rails(found: Mapping[int, Culprits], hosts: Hosts, share: float = SLOW) -> list[Fault]:
    """As faults: a node of which all rails are slow is one, and so is a rail that is slow on all nodes."""
    whole = set.intersection(*({*each.nodes} for each in found.values())) if len(found) > 1 else set[int]()
    what = f"each of its {len(found)} rails is"
    faults = [Fault("node_slow", (Place(node, "node"),), what) for node in sorted(whole)]
    best = max(each.usual for each in found.values())
    for rail, each in found.items():
        if each.usual < share * best:
            usual = f"{span([each.usual])} is usual there, {span([best])} on another one"
            faults.append(unnamed(f"rail {rail} is slow on all nodes: {usual}"))
        for fault in _named(each, "rail_slow", partial(Place, kind="rail", index=rail), hosts):
            ends = {part.node for where in fault.subjects for part in where.parts}
            faults += [] if ends and ends <= whole else [fault]
    return faults


def _named(found: Culprits, code: str, at: Callable[[int], Place], hosts: Hosts) -> list[Fault]:
    usual = f"{span([found.usual])} is usual"
    slow = []
    for node in found.nodes:
        own = [figure for pair, figure in found.seen.items() if node in pair]
        slow.append(Fault(code, (at(node),), f"with {len(own)} others it reaches {span(own)}; {usual}"))
    for a, b in found.links:
        what = f"they reach {span([found.seen[a, b]])} with each other, and more with others; {usual}"
        slow.append(Fault("node_link_slow", (Pair(at(a), at(b)),), what))
    for one, other in found.between:
        across = [found.seen[pair] for pair in found.seen if {*pair} & {*one} and {*pair} & {*other}]
        among = f"{_nodes(one, hosts)} and {_nodes(other, hosts)} are fast among themselves"
        slow.append(unnamed(f"{among}, and reach {span(across)} with each other; {usual}"))
    return slow


def _pairs(figures: Iterable[float]) -> str:
    values = [*figures]
    if len(values) == 1:
        return f"with two nodes it can be either, and they reach {span(values)}"
    return f"{len(values)} pairs reach {span(values)}" if values else "no two nodes have as many GPUs"


def _nodes(group: Group, hosts: Hosts) -> str:
    return some([hosts[node] for node in group], SHOWN)


# The same search, where a pair that works is worth 1 and one that does not 0: TCP that the agents try, then groups of
# ranks after a hang. Of many nodes that hang, two that do so with each other are found first, by halves.

HANG_SECONDS = 60.0  # for ranks of some nodes to meet and to reduce once; healthy ones need a few
HANG_BYTES = Size(64 * MiB, rehearsal=1 * MiB)
OTHERS = 3  # nodes with which two that hang are tried
MOST_PAIRS = math.comb(2 + OTHERS, 2)
TEXTS = 2  # of all that one node cannot reach


class CutOff(NamedTuple):
    """Who cannot work with whom, and without which nodes, and why, all others can: of such a pair, one node."""

    faults: tuple[Fault, ...] = ()
    left_out: Mapping[int, str] = {}


def who_is_cut_off(
    nodes: Sequence[int], hosts: Hosts, reached: Callable[[Sequence[IndexPair]], Mapping[IndexPair, str]],
    with_first: bool = True,
) -> CutOff:  # fmt: skip
    """Which of these nodes others cannot reach, or which two cannot reach each other. `reached`: what keeps the nodes
    of each of these pairs apart, "" if nothing. Up to 16 nodes all pairs are tried; beyond, each node meets a few
    others, whatever the number of nodes, and the first, where ranks meet (`with_first`). Of fewer than two nobody."""
    if len(nodes) < 2:
        return CutOff()
    why: dict[IndexPair, str] = {}

    def measure(pairs: Sequence[Group]) -> list[float]:
        for pair, text in reached([(a, b) for a, b in pairs]).items():
            why[pair] = why.get(pair) or text
        return [float(not why[a, b]) for a, b in pairs]

    meeting = some_rounds(nodes, 0, EVERY_PAIR if len(nodes) <= EVERY_PAIR else FIRST_ROUNDS)
    first, *others = sorted(nodes)
    pairs = [*dict.fromkeys([*chain(*meeting), *((first, other) for other in others if with_first)])]
    found = culprits(nodes, measure, dict(zip(pairs, measure(pairs), strict=True)))
    bad = [pair for pair in sorted(why) if why[pair]]

    def texts(within: Iterable[int], beside: Iterable[int]) -> str:
        return "; ".join([why[a, b] for a, b in bad if {a, b} & {*within} and {a, b} & {*beside}][:TEXTS])

    faults = [Fault("node_cut_off", (Place(node, "node"),), texts([node], nodes)) for node in found.nodes]
    left_out = dict.fromkeys(found.nodes, "the others cannot work with it")
    bad = [pair for pair in bad if not {*pair} & {*found.nodes}]
    for one, other in found.between:
        who = f"{_nodes(one, hosts)} and {_nodes(other, hosts)} cannot work with each other"
        faults.append(Fault("network_cut", (), f"{who}: {texts(one, other)}"))
        left_out |= dict.fromkeys(other if len(other) <= len(one) else one, who)
        bad = [(a, b) for a, b in bad if {a, b}.isdisjoint(one) or {a, b}.isdisjoint(other)]
    if len(bad) > SHOWN:
        about = f"{len(bad)} pairs of nodes cannot work together: {texts(nodes, nodes)}"
        faults.append(Fault("network_cut", (), about))
    else:
        faults += [Fault("nodes_cut_off", (Pair(Place(a, "node"), Place(b, "node")),), why[a, b]) for a, b in bad]
    while bad := [pair for pair in bad if not {*pair} & left_out.keys()]:
        often = Counter(node for pair in bad for node in pair)
        node = max(often, key=lambda each: (often[each], each))
        apart = [hosts[other] for pair in bad if node in pair for other in pair if other != node]
        left_out[node] = f"it cannot work with {some(apart, SHOWN)}, and one of them has to go"
    return CutOff(tuple(faults), left_out)


def who_hangs(world: World, announce: Callable[[str], None]) -> CutOff:
    """Which node, or two, a world hangs with; nothing if it does not again. `announce` gets how long it may take."""
    nodes = tuple(ranks_by_node(world))
    many = len(nodes) > FEW
    most = MOST_PAIRS + many * (1 + 2 * math.ceil(math.log2(len(nodes))))
    announce(
        f"who hangs of {len(nodes)} nodes is looked for by halves and pairs: at most {most} tries of "
        f"{HANG_SECONDS:g} s, {most * HANG_SECONDS / 60:.0f} min, and as many new starts of the ranks"
    )
    if many:
        if not (bad := hanging(nodes, lambda group: not all(_work(world, [group])))):
            return CutOff()
        nodes = (*bad, *[node for node in nodes if node not in bad][:OTHERS])
    text = f"their ranks do not meet and reduce {HANG_BYTES.on(world) // MiB} MiB within {HANG_SECONDS:g} s"

    def reached(pairs: Sequence[IndexPair]) -> dict[IndexPair, str]:
        return {
            pair: "" if works else text
            for at_once in _in_turn(pairs)
            for pair, works in zip(at_once, _work(world, at_once), strict=True)
        }

    return who_is_cut_off(nodes, world.hosts, reached)


def hanging(group: Group, hangs: Callable[[Group], bool]) -> Group:
    """Two nodes of a group that hang with each other, or one that does by itself; () if it does not hang. Searched by
    halves: the shortest beginning of the group that hangs, then what of it hangs with its last node."""

    def last(nodes: Group, also: Group = ()) -> int:
        """Of the shortest beginning of `nodes` that hangs."""
        return nodes[bisect_left(range(1, len(nodes)), True, key=lambda count: hangs(nodes[:count] + also))]

    if not hangs(group):
        return ()
    node = last(group)
    before = group[: group.index(node)]
    return (last(before, (node,)), node) if before else (node,)


def _work(world: World, groups: Sequence[Group]) -> list[bool]:
    """Whether the ranks of each of these groups of nodes meet and reduce."""
    ranks, left, works = between_nodes.ranks_of(world, groups), [*range(len(groups))], [True] * len(groups)
    while left:
        try:
            world.each([ranks[index] for index in left], _meet, HANG_BYTES, timeout=HANG_SECONDS)
            return works
        except RankFailure as failure:
            hang = failure.kind == "hang"
            well = {"returned"} if hang else {"returned", "running"}
            ill = {report.rank for report in failure.reports if report.state not in well}
        bad = [index for index in left if ill & {*ranks[index]}] or left
        for index in bad:
            works[index] = False
        # A rank that raises ends the call: the others are tried again.
        left = [] if hang else [index for index in left if index not in bad]
    return works


def _meet(rank: Rank, nbytes: int) -> None:
    with rank.phase("one all_reduce of a group of nodes"):
        dist.all_reduce(torch.zeros(nbytes // 4, device=rank.device), group=rank.group)
        synchronize(rank)
