"""Training in a memory that is full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.probes.timing.all_ranks import everyones
from pytest_gpufleet.probes.training.lap import lap
from pytest_gpufleet.probes.training.loop import (
    eager,
    module_of,
    precision,
    release,
    returns_memory,
    synthetic_batch,
)
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, most_images, plan
from pytest_gpufleet.world.rank import Rank

Result = TypeVar("Result")

SMALLEST = 16  # images
FILLED, BRIM = 0.95, 0.985  # of the GPU's memory: what counts as full, and above which a step may find no room
RESOLUTION = 1 / 64  # of the batch: less than what lies between these two

# How cuDNN and cuBLAS say that they found no memory to work in.
NO_MEMORY = ("unable to find an engine", "STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Filled:
    """A training in full memory, as one rank saw it. Memory is in bytes, by the driver's count. `rate`: images/s of all
    ranks."""

    training: Plan
    steps: int
    rate: float
    total: int
    used: int  # after the last step
    free_before: int
    free_after: int

    @property
    def full(self) -> bool:
        """Whether as much was in use as should be; so it is if no kernel takes a larger batch."""
        return self.used >= FILLED * self.total or self.training.recipe.batch >= most_images(self.training.pixels)


@returns_memory
def fill_memory(rank: Rank, recipe: str, workload: Workload = USUAL, *, seconds: float) -> Filled:
    """Train for so many seconds with a batch that fills at least 95 % of every GPU's memory, as far as one is found.

    All ranks train one network with the same batch. Out of memory is an answer while that batch is looked for; once
    training has begun it is an error, as it would be for anybody.
    """
    training = plan(recipe, workload, rank.device, "sweep")
    _train_full(rank, training, 0.0)  # libraries take memory at their first use, and keep it
    release(rank.device)
    free_before, total = torch.cuda.mem_get_info()
    training, steps, rate, used = _train_full(rank, training, seconds)
    release(rank.device)
    return Filled(training, steps, rate, total, used, free_before, torch.cuda.mem_get_info()[0])


def _train_full(rank: Rank, training: Plan, seconds: float) -> tuple[Plan, int, float, int]:
    """The plan with the batch that was found, the steps done, images/s and the bytes then in use. 0 seconds: two small
    steps."""
    # Trying algorithms would fail at random with so little memory left.
    with precision(training.recipe, benchmark=False):
        module = module_of(rank, training)
        step = eager(module, training, rank.device)

        def train(batch: int, steps: int, *, alone: bool = False) -> float:
            """Seconds a step."""
            data = synthetic_batch(rank, training.with_batch(batch))
            with module.no_sync() if alone and isinstance(module, DistributedDataParallel) else nullcontext():
                return lap(rank, lambda: step(*data), steps, together=not alone).mean

        train(SMALLEST, 2)
        if not seconds:
            return training, 2, 0.0, 0
        with rank.phase(f"{training}: look for the batch that fills the memory"):
            batch = largest(
                lambda batch: _fits(rank, lambda: train(batch, 1, alone=True)), SMALLEST, most_images(training.pixels)
            )
        training = training.with_batch(batch)
        release(rank.device)
        with rank.phase(f"{training}: {seconds:g} s in full memory"):
            mean = max(mean for (mean,) in everyones(rank, [train(batch, 2)]))
            steps = max(2, round(seconds / mean))
            mean = train(batch, steps)
        free, total = torch.cuda.mem_get_info()
    return training, steps, rank.size * batch / mean, total - free


def _fits(rank: Rank, attempt: Callable[[], object]) -> bool:
    """Whether an attempt has the memory that it needs on every GPU, and leaves some."""
    release(rank.device)
    done = within_memory(lambda: (attempt(),), rank.device) is not None
    free, total = torch.cuda.mem_get_info()
    return all(fits for (fits,) in everyones(rank, [done and total - free <= BRIM * total]))


def largest(works: Callable[[int], bool], low: int, high: int) -> int:
    """The largest batch from `low`, which works, to `high`, within a sixty-fourth of itself."""
    if works(high):
        return high
    while high - low > max(1, RESOLUTION * low):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def within_memory(attempt: Callable[[], Result], device: torch.device) -> Result | None:
    """What `attempt` returns; None if it ran out of GPU memory, all of which is then free again."""
    try:
        return attempt()
    except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
    # Only here the frames of the attempt are gone, and with them its tensors.
    release(device)
    return None
