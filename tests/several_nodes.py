"""Ranks of this machine that take themselves for ranks of several: what a probe sees of many nodes, without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_gpufleet.world.engines.local import LocalEngine
from pytest_gpufleet.world.pool import Pool
from pytest_gpufleet.world.rank_spec import RankSpec
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
