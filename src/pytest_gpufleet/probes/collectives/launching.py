"""How long the host of each rank needs to launch a collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.timing.all_ranks import line_up
from pytest_gpufleet.world.rank import Rank

NAME, NBYTES = "all_reduce", 8
LAUNCHES = 25  # of a run: far fewer than the thousand that a GPU takes before its host has to wait
RUNS = 9  # of a sample: what holds a host up now and then spoils some of them, and not their median
SAMPLES = 5


def launch_time(rank: Rank) -> Reading:
    """Time in us that this rank's host needs to launch an all_reduce of 8 bytes, while the other ranks do the same; it
    does not wait for any. The median of five samples. On CPU ranks the whole operation."""
    data = torch.zeros(NBYTES // 4, device=rank.device)

    def launch() -> None:
        COLLECTIVES[NAME].run(rank.group, data, data)

    with rank.phase(f"launches of {NAME}"):
        launch()
        samples = tuple(median(_each(rank, launch) for _ in range(RUNS)) * 1e6 for _ in range(SAMPLES))
    conditions: dict[str, Condition] = {"collective": NAME, "bytes": NBYTES, "ranks": rank.size}
    return Reading("launch_time", median(samples), conditions, samples)


def _each(rank: Rank, launch: Callable[[], object]) -> float:
    """Seconds of one launch."""
    line_up(rank)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    return (time.perf_counter() - began) / LAUNCHES
