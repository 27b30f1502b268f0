"""How long operations of all ranks take, one after the other without a gap, as nccl-tests launches them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from pytest_gpufleet.probes.timing.one_gpu import seconds_each
from pytest_gpufleet.world.rank import Rank

# nccl-tests launches 20 times. Less often what takes long: on a broken machine an operation can take a hundred times as
# long, and of large messages a few tell as much. Figures of CPU ranks are not judged.
ITERATIONS = {"cuda": 20, "cpu": 2}
MIN_ITERATIONS = 2
RUN_SECONDS = 0.06
# A sample is the median of several runs. A host holds up a launch now and then for one to five milliseconds (it may be
# torch's watchdog, which looks at all launches of its rank ten times a second), and all ranks wait for the one that was
# held up. On eight H200 every third sample of one or two runs of 15 to 25 ms was off, by up to 14 %.
MIN_RUNS = {"cuda": 3, "cpu": 1}
MAX_RUNS = 7
MIN_SECONDS = {"cuda": 0.05, "cpu": 0.001}  # of a sample
# So operations go ahead of those that are timed, and the GPUs have work for this long while the host is held up.
AHEAD_SECONDS = 0.005
MAX_AHEAD = 50
LONG_SECONDS = 0.15  # of an operation: what disturbs for milliseconds is nothing beside that
WARM_UP = {"cuda": 5, "cpu": 1}
WARM_UP_SECONDS = 0.5
TICK = 0.5e-6  # seconds, of the clock of a GPU: ranks that only keep step with others launch nothing


@dataclass(frozen=True)
class Timing:
    """Seconds that one operation takes: one figure a sample, the median of `runs` of `iterations` operations."""

    seconds: tuple[float, ...]
    iterations: int
    runs: int


def timing(
    rank: Rank,
    launch: Callable[[], object],
    samples: int,
    before: Callable[[], object] = lambda: None,
    longest: float = RUN_SECONDS,
) -> Timing:
    """Time an operation of all ranks. Every rank calls it.

    `launch` starts the operation on the current stream (a CPU rank waits for it); `before` is called ahead of each run,
    outside its time; `longest` is about how many seconds a run may take, unless two operations take longer.
    """
    device = rank.device.type
    ahead = 0

    def run(iterations: int) -> float:
        before()
        return seconds(rank, launch, iterations, ahead)

    run(1)  # connects the ranks and loads the kernels
    warm_up = agree(rank, min(WARM_UP[device], max(1, int(WARM_UP_SECONDS / run(1)))))
    iterations, runs, ahead = (agree(rank, number) for number in plan(device, run(warm_up), longest))
    return Timing(tuple(median(run(iterations) for _ in range(runs)) for _ in range(samples)), iterations, runs)


def plan(device: str, each: float, longest: float = RUN_SECONDS) -> tuple[int, int, int]:
    """How many operations to time in a run, how many runs make a sample, and how many operations to launch ahead of
    each, where one takes `each` seconds and a run should take `longest` at most."""
    iterations = max(MIN_ITERATIONS, min(ITERATIONS[device], int(longest / each)))
    if each > LONG_SECONDS:
        return iterations, 1, 0
    fill = math.ceil(MIN_SECONDS[device] / (iterations * each))
    runs = min(MAX_RUNS, max(MIN_RUNS[device], fill // 2 * 2 + 1))  # odd: one of them is the median
    return iterations, runs, min(MAX_AHEAD, math.ceil(AHEAD_SECONDS / each))


def seconds(rank: Rank, launch: Callable[[], object], iterations: int, ahead: int = 0) -> float:
    """Seconds that one operation takes, of `iterations` in a row behind `ahead` untimed ones, as this rank sees it: by
    the clock of the GPU, on which nothing but operations counts, or of the host on CPU ranks."""
    line_up(rank)
    if rank.device.type != "cuda":
        return seconds_each(rank.device, launch, iterations)
    for _ in range(ahead):
        launch()
    each = seconds_each(rank.device, launch, iterations)
    torch.cuda.synchronize()
    return max(TICK / iterations, each)


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
