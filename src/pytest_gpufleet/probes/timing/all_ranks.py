"""How operations of all ranks are timed, as nccl-tests does: launches in a row, one synchronisation at the end."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from pytest_gpufleet.world.rank import Rank

Launch = Callable[[], list[dist.Work]]

# nccl-tests launches 20 times. Less often where it would take too long, since on a broken machine an operation can take
# a hundred times as long. Figures of CPU ranks are not judged.
ITERATIONS = {"cuda": 20, "cpu": 2}
MIN_ITERATIONS = 2
MAX_SECONDS = 2.0
# Short operations are launched 20 times in several runs, and the median run is the sample. Ten times a second torch's
# watchdog looks at all operations launched since, and holds up the launches of its rank meanwhile, and so all ranks:
# of many short runs that hits a few, of one long run it would be a part.
MIN_SECONDS = {"cuda": 0.02, "cpu": 0.001}  # of a sample
MAX_RUNS = 50
WARM_UP = {"cuda": 5, "cpu": 1}
WARM_UP_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """Seconds from one launch to the next: one figure a sample, the median of `runs` of `iterations` launches."""

    seconds: tuple[float, ...]
    iterations: int
    runs: int


def timing(
    rank: Rank,
    launch: Launch,
    samples: int,
    before: Callable[[], object] = lambda: None,
    longest: float = MAX_SECONDS,
) -> Timing:
    """Time an operation of all ranks. Every rank calls it.

    `launch` starts the operation and gives what to wait for; `before` is called ahead of each run, outside its time;
    `longest` is about how many seconds a sample may take, unless two operations take longer.
    """

    device = rank.device.type

    def run(iterations: int) -> float:
        before()
        return seconds(rank, launch, iterations)

    run(1)  # connects the ranks and loads the kernels
    warm_up = agree(rank, min(WARM_UP[device], max(1, int(WARM_UP_SECONDS / run(1)))))
    trial = run(warm_up)
    iterations = agree(rank, max(MIN_ITERATIONS, min(ITERATIONS[device], int(longest / trial))))
    runs = agree(rank, min(MAX_RUNS, math.ceil(MIN_SECONDS[device] / (iterations * trial))))
    return Timing(tuple(median(run(iterations) for _ in range(runs)) for _ in range(samples)), iterations, runs)


def seconds(rank: Rank, launch: Launch, iterations: int) -> float:
    """Seconds from one launch to the next, of `iterations` in a row without a gap, as this rank sees it."""
    line_up(rank)
    began = time.perf_counter()
    works = [launch() for _ in range(iterations)]
    if rank.device.type == "cuda":
        # Of all streams, so NCCL's too. To wait for each operation costs host time, and nccl-tests does not.
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        wait(works)  # lets go of the buffers
    else:
        wait(works)
        took = time.perf_counter() - began
    return took / iterations


def wait(works: Iterable[Iterable[dist.Work]]) -> None:
    for work in itertools.chain(*works):
        work.wait()


def line_up(rank: Rank) -> None:
    """All ranks go on from here together."""
    dist.all_reduce(torch.zeros(1, device=rank.device), group=rank.group)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


def agree(rank: Rank, number: int) -> int:
    """The smallest number any rank came with: all must launch equally often."""
    smallest = torch.tensor(number, device=rank.device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=rank.group)
    return int(smallest.item())


def everyones(rank: Rank, values: Sequence[float]) -> list[list[float]]:
    """The values of all ranks, by rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=rank.device)
    copies = mine.new_empty(rank.size * len(values))
    dist.all_gather_into_tensor(copies, mine, group=rank.group)
    return [list(map(float, row)) for row in copies.cpu().view(rank.size, -1)]
