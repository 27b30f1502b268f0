"""Ranks for tests of probes: what one test changes on them, the next one does not find."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from pytest_gpufleet import World
from tests.several_nodes import ranks_on

OnRanks = Callable[[int, int], World]


@pytest.fixture(scope="module")
def worlds() -> Iterator[OnRanks]:
    with ExitStack() as stack:
        yield cache(lambda nodes, each: stack.enter_context(ranks_on(nodes, each)))


@pytest.fixture
def on_ranks(worlds: OnRanks) -> OnRanks:
    """on_ranks(nodes, each): so many ranks on each of so many nodes, with a process group, as they were at first."""

    def as_at_first(nodes: int, each: int) -> World:
        world = worlds(nodes, each)
        world._pool.begin_test()
        return world

    return as_at_first


@pytest.fixture
def two_ranks(on_ranks: OnRanks) -> World:
    return on_ranks(1, 2)


@pytest.fixture
def four_ranks(on_ranks: OnRanks) -> World:
    return on_ranks(1, 4)


@pytest.fixture
def three_nodes(on_ranks: OnRanks) -> World:
    return on_ranks(3, 2)


@pytest.fixture
def four_nodes(on_ranks: OnRanks) -> World:
    return on_ranks(4, 1)
