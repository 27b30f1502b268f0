"""The search for a slow node or network, on fabrics that are made up: who is named, who never is, and at what cost."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from pytest_gpufleet.model.place import Place
from pytest_gpufleet.probes.links.copies import IndexPair, rounds, some_rounds
from pytest_gpufleet.probes.search.nodes import FIRST_ROUNDS, MOST_CALLS, NOISE, culprits, narrowed, of_rails


@dataclass
class Fabric:
    """`n` nodes, what slow ones reach, what slow links between two let through, and islands with a slow switch between
    them. `only_groups`: what a switch lets through that is slow for more than one pair at a time."""

    n: int
    bad: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[IndexPair, float] = field(default_factory=dict)
    racks: Sequence[Collection[int]] = ()
    between: float = 1.0
    crowded: float = 1.0
    seed: int = 0
    noise: float = NOISE

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.calls = 0

    def reaches(self, group):
        figures = [1.0, *(self.bad.get(node, 1.0) for node in group)]
        figures += [self.links.get(pair, 1.0) for pair in combinations(sorted(group), 2)]
        shares = [len({*group} & {*rack}) for rack in self.racks]
        figures += [self.between] * (sum(map(bool, shares)) > 1)
        figures += [self.crowded] * (sum(share > 1 for share in shares) > 1)
        return 48.0 * min(figures) * self.random.uniform(1 - self.noise, 1 + self.noise)

    def measure(self, groups):
        everyone = [node for group in groups for node in group]
        assert len(everyone) == len({*everyone}), "groups that are measured at the same time share nobody"
        assert {*everyone} <= {*range(self.n)}
        self.calls += 1
        return [self.reaches(group) for group in groups]

    def searched(self):
        """After pairs as the suite measures them: all up to 16 nodes, 4 rounds beyond."""
        seen = {
            pair: figure
            for pairs in some_rounds(range(self.n), self.seed, self.n if self.n <= 16 else 4)
            for pair, figure in zip(pairs, self.measure(pairs), strict=True)
        }
        self.calls = 0
        return culprits(range(self.n), self.measure, seen)


NAMES = {node: f"gf{node}" for node in range(500)}
SEEDS = st.integers(0, 2**20)
SIZES = st.one_of(st.integers(4, 20), st.integers(21, 500))
FACTORS = st.floats(0.01, 0.8)
EXAMPLES = settings(max_examples=70, deadline=None)


def named(found):
    return found.nodes, found.links, found.between


@given(SIZES, SEEDS)
@EXAMPLES
def test_nobody_is_named_where_all_are_well_and_nothing_is_measured(n, seed):
    fabric = Fabric(n, seed=seed)
    assert named(fabric.searched()) == ((), (), ())
    assert fabric.calls == 0


@given(SIZES, SEEDS, FACTORS)
@EXAMPLES
def test_a_single_slow_node_is_always_found_also_without_anything_measured_before(n, seed, factor):
    fabric = Fabric(n, {seed % n: factor}, seed=seed)
    assert named(fabric.searched()) == ((seed % n,), (), ())
    assert fabric.calls <= 4
    fabric.calls = 0
    assert culprits(range(n), fabric.measure).nodes == (seed % n,)
    assert fabric.calls <= FIRST_ROUNDS + 4


@given(SIZES, SEEDS, st.data())
@EXAMPLES
def test_up_to_a_quarter_of_all_nodes_is_found_and_nobody_else(n, seed, data):
    bad = data.draw(st.dictionaries(st.integers(0, n - 1), FACTORS, min_size=1, max_size=n // 4))
    fabric = Fabric(n, bad, seed=seed)
    found = fabric.searched()
    assert found.nodes == tuple(sorted(bad))
    assert found.between == ()
    assert fabric.calls <= MOST_CALLS


@given(SIZES, SEEDS, st.data())
@EXAMPLES
def test_no_healthy_node_is_named_however_many_are_slow(n, seed, data):
    slow = st.floats(0.01, 0.97)  # also by so little that nobody can be sure
    bad = data.draw(st.dictionaries(st.integers(0, n - 1), slow, max_size=n))
    fabric = Fabric(n, bad, seed=seed)
    found = fabric.searched()
    assert {*found.nodes} <= {*bad}
    assert all({*pair} & {*bad} for pair in found.links)
    assert fabric.calls <= MOST_CALLS


@given(st.integers(4, 16), SEEDS, FACTORS)
@EXAMPLES
def test_a_slow_link_blames_none_of_its_nodes(n, seed, factor):
    pair = random.Random(seed).choice(list(combinations(range(n), 2)))
    fabric = Fabric(n, links={pair: factor}, seed=seed)
    assert named(fabric.searched()) == ((), (pair,), ())
    assert fabric.calls <= 2


@given(SIZES, SEEDS, st.data())
@EXAMPLES
def test_slow_links_blame_no_node(n, seed, data):
    """Of which no node has so many that it is cut off."""
    links = {(min(pair), max(pair)): data.draw(FACTORS) for pair in data.draw(st.sampled_from(rounds(n)))}
    fabric = Fabric(n, links=links, seed=seed)
    found = fabric.searched()
    assert (found.nodes, found.between) == ((), ())
    assert {*found.links} <= {*links}
    assert fabric.calls <= MOST_CALLS


@given(SIZES, SEEDS, FACTORS, st.booleans(), st.data())
@EXAMPLES
def test_a_slow_switch_between_halves_blames_no_node(n, seed, factor, in_order, data):
    mixed = list(range(n))
    if not in_order:
        random.Random(seed).shuffle(mixed)
    cut = data.draw(st.integers(2, n - 2))
    racks = [{*mixed[:cut]}, {*mixed[cut:]}]
    fabric = Fabric(n, racks=racks, between=factor, seed=seed)
    found = fabric.searched()
    assert (found.nodes, found.links) == ((), ())
    for a, b in found.between:
        assert any({*a} <= rack and not {*b} & rack for rack in racks)
    assert fabric.calls <= MOST_CALLS


@pytest.mark.parametrize("n", [4, 8, 16, 40, 200, 500])
def test_a_slow_switch_between_halves_is_named(n):
    racks = [range(n // 2), range(n // 2, n)]
    fabric = Fabric(n, racks=racks, between=0.5)
    assert fabric.searched().between == ((tuple(racks[0]), tuple(racks[1])),)
    assert fabric.calls <= 8


def test_a_slow_node_is_found_beside_a_slow_switch():
    found = Fabric(16, {3: 0.3}, racks=[range(8), range(8, 16)], between=0.6).searched()
    assert found.nodes == (3,)
    assert found.between == (((0, 1, 2, 4, 5, 6, 7), tuple(range(8, 16))),)


def test_a_lone_pair_blames_nobody_of_three_the_one_slow_with_both_and_what_was_slow_once_nobody():
    fabric = Fabric(2, {1: 0.1})
    assert (*named(fabric.searched()), fabric.calls) == ((), (), (), 0)
    assert Fabric(3, {2: 0.5}).searched().nodes == (2,)
    assert Fabric(3, links={(0, 2): 0.5}).searched().links == ((0, 2),)
    fabric = Fabric(8)
    seen = dict.fromkeys(combinations(range(8), 2), 48.0)
    found = culprits(range(8), fabric.measure, {**seen, (2, 5): 12.0})
    assert (found.nodes, found.links, fabric.calls) == ((), (), 1)


@pytest.mark.parametrize("figure", [0.0, float("nan")])
def test_a_pair_without_a_figure_is_slow(figure):
    seen = {pair: figure if 3 in pair else 48.0 for pair in combinations(range(6), 2)}
    assert culprits(range(6), Fabric(6).measure, seen).nodes == (3,)


@given(st.integers(4, 60), st.integers(2, 8), SEEDS, st.data())
@EXAMPLES
def test_slow_rails_are_named_and_no_other(nodes, rails, seed, data):
    each = st.tuples(st.integers(0, nodes - 1), st.integers(0, rails - 1))
    bad = data.draw(st.sets(each, min_size=1, max_size=nodes // 4))
    whole = data.draw(st.integers(0, nodes - 1))
    bad |= {(whole, rail) for rail in range(rails)}
    found = {}
    for rail in range(rails):
        fabric = Fabric(nodes, {node: 0.5 for node, other in bad if other == rail}, seed=seed + rail)
        found[rail] = fabric.searched()
    named = {where for fault in of_rails(found, NAMES) for where in fault.subjects}
    slow = {node for node in range(nodes) if all((node, rail) in bad for rail in range(rails))}
    assert whole in slow
    alone = {Place(node, "rail", rail) for node, rail in bad if node not in slow}
    assert named == alone | {Place(node, "node") for node in slow}


def test_a_rail_that_is_slow_on_all_nodes_and_a_slow_switch_of_a_rail_are_named():
    healthy = Fabric(8).searched()
    (fault,) = of_rails({0: healthy, 1: Fabric(8, dict.fromkeys(range(8), 0.5)).searched(), 2: healthy}, NAMES)
    assert (fault.name, fault.subjects) == ("network_between_nodes_slow", ())
    assert fault.what.startswith("rail 1 is slow on all nodes: ")
    split = Fabric(8, racks=[range(4), range(4, 8)], between=0.5).searched()
    (fault,) = of_rails({0: healthy, 1: split}, NAMES)
    assert fault.what.startswith("gf0, gf1, gf2, gf3 and gf4, gf5, gf6, gf7 are fast among themselves, and reach ")


# ---------------------------------------------------------------- what shows in groups only
@given(st.integers(4, 500), SEEDS)
@EXAMPLES
def test_halves_of_a_group_without_a_slow_part_are_nothing(n, seed):
    fabric = Fabric(n, seed=seed)
    assert narrowed(tuple(range(n)), fabric.measure) == ()
    assert fabric.calls <= 4


@pytest.mark.parametrize("n", [8, 9, 22, 64, 500])
def test_a_group_is_halved_down_to_its_slow_part(n):
    for bad in {0, n // 3, n - 2}:
        fabric = Fabric(n, {bad: 0.5})
        (part,) = narrowed(tuple(range(n)), fabric.measure)
        assert bad in part
        assert len(part) <= 3
        assert fabric.calls <= 2 * n.bit_length()


@pytest.mark.parametrize("n", [8, 16, 64, 500])
def test_a_switch_that_is_slow_for_several_pairs_at_a_time_lies_between_halves(n):
    halves = tuple(range(n // 2)), tuple(range(n // 2, n))
    fabric = Fabric(n, racks=halves, crowded=0.5)
    assert fabric.searched().nodes == ()
    assert narrowed(tuple(range(n)), fabric.measure) == halves


# ---------------------------------------------------------------- who meets whom
@given(st.integers(2, 500), SEEDS, st.integers(1, 4))
@EXAMPLES
def test_rounds_are_of_pairs_that_share_nobody_and_never_the_same(n, seed, most):
    among = range(3, 3 + 2 * n, 2)  # numbers of nodes have gaps where some are left out
    some = some_rounds(among, seed, most)
    assert some == some_rounds(list(reversed(among)), seed, most)
    for pairs in some:
        meeting = [node for pair in pairs for node in pair]
        assert len(meeting) == len({*meeting}) == n // 2 * 2
        assert {*meeting} <= {*among}
        assert all(a < b for a, b in pairs)
    every = [pair for pairs in some for pair in pairs]
    assert len(every) == len({*every})
    assert len(some) == min(most, n - 1 if n % 2 == 0 else n)


@pytest.mark.parametrize("n", [3, 4, 7, 16])
def test_all_rounds_have_every_pair(n):
    assert sorted(pair for pairs in some_rounds(range(n), 7, n) for pair in pairs) == [*combinations(range(n), 2)]
