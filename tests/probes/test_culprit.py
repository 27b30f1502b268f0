"""The search for who is to blame, on ranks that are made slow or wrong on purpose."""

from itertools import combinations

import pytest

from pytest_gpufleet.probes.search.collective import of_their_kind, slow_pairs, slow_rank
from tests.conftest import INNER


def test_searches_find_who_is_slow(fleet):
    run = fleet(INNER / "searches.py", "-rP", ranks=4, NCCL_ALGO="Ring")
    assert (len(run.outcomes), set(run.outcomes.values())) == (9, {"passed"}), run.text


def rates(n, slow=(), fast=380.0, low=12.0):
    return {pair: low if pair in slow or set(pair) & set(slow) else fast for pair in combinations(range(n), 2)}


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_rank_is_slow_only_if_all_its_pairs_are(n):
    for rank in range(n):
        assert slow_rank(rates(n, slow=[rank])) == rank
    assert slow_rank(rates(n)) is None
    assert slow_rank(rates(n, slow=[(0, 1)])) is None
    assert slow_rank(rates(n, slow=range(n))) is None


@pytest.mark.parametrize(("low", "named"), [(0.94, 2), (0.96, None)])
def test_a_rank_is_named_from_five_per_cent_on(low, named):
    """One of 18 NVLinks less is 5.6 %."""
    assert slow_rank(rates(8, slow=[2], low=low * 380.0)) == named
    assert slow_pairs(rates(8, slow=[(2, 5)], low=low * 380.0)) == ([(2, 5)] if named else [])


def test_nobody_is_named_by_less_than_the_others_differ():
    differing = {pair: rate + 10 * pair[0] for pair, rate in rates(4, slow=[3], low=350.0).items()}
    assert slow_rank({**differing, (0, 1): 400.0}) is None
    assert slow_rank({**differing, (0, 3): 250.0, (1, 3): 250.0, (2, 3): 250.0, (0, 1): 400.0}) == 3


def test_links_of_two_kinds_make_no_culprit():
    # Two NVLink bridges in a machine with two sockets: pairs 0-1 and 2-3 are fast, the others cross the sockets.
    mixed = {pair: 100.0 if pair in [(0, 1), (2, 3)] else 20.0 for pair in combinations(range(4), 2)}
    assert slow_rank(mixed) is None
    assert slow_pairs(mixed) == []
    # GPU 3 has lost its bridge and half its lanes.
    assert slow_rank({**mixed, (2, 3): 10.0, (0, 3): 10.0, (1, 3): 10.0}) == 3


# Which GPUs of a machine with 8 V100 have two NVLinks, one, or none between them.
CUBE_MESH = {
    "NV2": [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)],
    "NV1": [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)],
}
SOCKETS = {"NODE": [pair for half in (range(4), range(4, 8)) for pair in combinations(half, 2)]}
BRIDGES = {"NV": [(0, 1), (2, 3)]}


@pytest.mark.parametrize(
    ("n", "links", "usual", "share"),
    [
        (8, CUBE_MESH, {"NV2": 44.0, "NV1": 22.0, "SYS": 9.0}, 0.5),
        (8, SOCKETS, {"NODE": 25.0, "SYS": 18.0}, 0.6),
        (4, BRIDGES, {"NV": 100.0, "SYS": 20.0}, 0.5),
    ],
    ids=["cube mesh", "two sockets", "bridges"],
)
def test_pairs_are_held_against_those_of_their_kind(n, links, usual, share):
    kind = {pair: next((name for name in links if pair in links[name]), "SYS") for pair in combinations(range(n), 2)}
    healthy = {pair: usual[kind[pair]] for pair in kind}
    assert slow_rank(of_their_kind(healthy, kind)) is None
    assert slow_pairs(of_their_kind(healthy, kind)) == []
    for rank in range(n):
        slowed = {pair: rate * share if rank in pair else rate for pair, rate in healthy.items()}
        assert slow_rank(of_their_kind(slowed, kind)) == rank


def test_slow_pairs_are_found():
    assert slow_pairs(rates(8, slow=[(2, 5)])) == [(2, 5)]
    assert slow_pairs(rates(8, slow=[(2, 5), (1, 7)])) == [(1, 7), (2, 5)]
    assert slow_pairs({**rates(4), (0, 1): 12.0, (0, 2): 290.0, (1, 2): 330.0}) == [(0, 1)]  # others may vary a little
    assert slow_pairs(rates(8)) == slow_pairs(rates(2)) == []
