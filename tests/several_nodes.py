"""Ranks of this machine that take themselves for ranks of several: what a probe sees of many nodes, without any."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pytest_gpufleet.run.run import Ranks
from pytest_gpufleet.world.call import RankSpec
from pytest_gpufleet.world.engines.local import LocalEngine
from pytest_gpufleet.world.pool import Pool
from pytest_gpufleet.world.world import World

SECONDS = 300.0


def specs(nodes: int, each: int) -> list[RankSpec]:
    """Of `each` ranks on every one of some nodes."""
    return [
        RankSpec(index, nodes * each, index // each, index % each, each, "cpu", None, cpu_threads=1)
        for index in range(nodes * each)
    ]


@contextmanager
def ranks_on(nodes: int, each: int) -> Iterator[World]:
    """A world of such ranks, with a process group."""
    pool = Pool(LocalEngine(), specs(nodes, each), SECONDS)
    try:
        yield World(pool, with_group=True)
    finally:
        pool.close()


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin (`-p tests.several_nodes`): the CPU ranks of a rehearsal take themselves for RANKS_A_NODE each."""
    each = int(os.environ["RANKS_A_NODE"])
    made = Ranks._specs

    def spread(ranks: Ranks) -> list[RankSpec]:
        return [
            replace(spec, node=spec.index // each, local_index=spec.index % each, local_size=each)
            for spec in made(ranks)
        ]

    Ranks._specs = spread
    Ranks.nodes = config.option.rehearse // each
