"""Ranks for tests of probes, in this process: what one test changes on them, the next one does not find. Those of
several nodes are of this machine, and take themselves for ranks of several."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest

from pytest_gpufleet import World
from pytest_gpufleet.world.engines.local import LocalEngine
from pytest_gpufleet.world.world import Pool
from tests.world.fake_engine import specs

SECONDS = 300.0


@pytest.fixture(scope="module")
def worlds():
    with ExitStack() as stack:

        def made(nodes, each):
            on_one_core = [replace(spec, cpu_threads=1) for spec in specs(*[each] * nodes)]
            pool = Pool(LocalEngine(), on_one_core, SECONDS)
            stack.callback(pool.stop)
            return World(pool, with_group=True)

        yield cache(made)


@pytest.fixture
def on_ranks(worlds):
    """on_ranks(nodes, each): so many ranks on each of so many nodes, with a process group, as they were at first."""

    def as_at_first(nodes, each):
        world = worlds(nodes, each)
        world._pool.stop()  # what is planted stays on a rank
        world._pool.begin_test()
        return world

    return as_at_first


def ranks(nodes, each):
    @pytest.fixture
    def fixture(on_ranks):
        return on_ranks(nodes, each)

    return fixture


two_ranks, three_ranks, four_ranks = ranks(1, 2), ranks(1, 3), ranks(1, 4)
three_nodes, four_nodes = ranks(3, 2), ranks(4, 1)
