"""How throughput grows with the batch, and training in a memory that is full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.timing.all_ranks import everyones
from pytest_gpufleet.probes.training.lap import SAMPLES, lap
from pytest_gpufleet.probes.training.loop import (
    eager,
    module_of,
    precision,
    release,
    returns_memory,
    steps_of,
    synthetic_batch,
)
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, most_images, plan
from pytest_gpufleet.world.rank import Rank

Result = TypeVar("Result")

SMALLEST, LARGEST_ON_CPU = 16, 32
RESOLUTION = 1 / 16  # of the largest batch

SAMPLE_SECONDS = {"cuda": 1.0, "cpu": 0.1}

# How cuDNN and cuBLAS say that they found no memory to work in.
NO_MEMORY = ("unable to find an engine", "STATUS_ALLOC_FAILED")

FILLED = 0.95  # of the GPU's memory
AIM = 0.97
ATTEMPTS = 12


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


def largest(works: Callable[[int], bool], low: int, high: int) -> int:
    """The largest batch between `low`, which works, and `high`, which does not, within a sixteenth of itself."""
    while high - low > max(1, RESOLUTION * low):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


@returns_memory
def throughput_by_batch(rank: Rank, recipe: str, workload: Workload = USUAL) -> list[Reading]:
    """Images/s and memory of training on one GPU for batches of 16, 32 and so on, up to the largest that fits.

    The largest is found by trying. A workload's own batch is left aside. On a CPU it ends at 32.
    """
    training = plan(recipe, workload, rank.device, "sweep")
    readings: dict[int, list[Reading]] = {}

    def works(batch: int) -> bool:
        with rank.phase(f"{training.with_batch(batch)}: does it fit?"):
            measured = within_memory(lambda: _throughput(rank, training.with_batch(batch)), rank.device)
        release(rank.device)
        if measured is not None:
            readings[batch] = measured
        return measured is not None

    most = most_images(training.pixels) if rank.device.type == "cuda" else LARGEST_ON_CPU
    batch = SMALLEST
    while batch <= most and works(batch):
        batch *= 2
    if not readings:
        raise MemoryError(f"{training}: not even {SMALLEST} images fit into the memory of this GPU")
    largest(works, batch // 2, min(batch, most + 1))
    return [reading for batch in sorted(readings) for reading in readings[batch]]


def _throughput(rank: Rank, training: Plan) -> list[Reading]:
    batch = training.recipe.batch
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with precision(training.recipe):
        step, _ = steps_of(rank, training, together=False)
        mean = lap(rank, step, training.recipe.warm_up, together=False).mean
        count = max(training.recipe.steps, round(SAMPLE_SECONDS[rank.device.type] / mean))
        samples = tuple(batch * count / lap(rank, step, count, together=False).seconds for _ in range(SAMPLES))
    conditions = training.conditions(1)
    readings = [Reading("train_throughput", median(samples), conditions, samples, WORLD)]
    if rank.device.type == "cuda":
        readings.append(Reading("train_memory", torch.cuda.max_memory_allocated() / GiB, conditions))
    return readings


@dataclass(frozen=True)
class Filled:
    """A training in full memory, as one rank saw it. Memory is in bytes, by the driver's count."""

    training: Plan
    steps: int
    total: int
    used: int  # after the last step
    free_before: int
    free_after: int


def fill_memory(rank: Rank, recipe: str, workload: Workload = USUAL, *, seconds: float) -> Filled:
    """Train for so many seconds with a batch that fills at least 95 % of every GPU's memory, as far as one is found.

    All ranks train one network with the same batch. Out of memory is an answer while that batch is looked for; once
    training has begun it is an error, as it would be for anybody.
    """
    training = plan(recipe, workload, rank.device, "full memory")
    _train_full(rank, training, 0.0)  # libraries take memory at their first use, and keep it
    release(rank.device)
    free_before, total = torch.cuda.mem_get_info()
    training, steps, used = _train_full(rank, training, seconds)
    release(rank.device)
    return Filled(training, steps, total, used, free_before, torch.cuda.mem_get_info()[0])


def _train_full(rank: Rank, training: Plan, seconds: float) -> tuple[Plan, int, int]:
    """The plan with the batch that was found, the steps done and the bytes then in use. 0 seconds: two small steps."""
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
            return training, 2, 0
        with rank.phase(f"{training}: look for the batch that fills the memory"):
            batch = _filling_batch(rank, training, lambda batch: train(batch, 1, alone=True))
        training = training.with_batch(batch)
        with rank.phase(f"{training}: {seconds:g} s in full memory"):
            mean = max(mean for (mean,) in everyones(rank, [train(batch, 2)]))
            steps = max(2, round(seconds / mean))
            train(batch, steps)
        free, total = torch.cuda.mem_get_info()
    return training, steps, total - free


def _filling_batch(rank: Rank, training: Plan, train: Callable[[int], float]) -> int:
    """The batch with which training fills the memory of every GPU to 95 %; of those that fit, the largest tried."""
    total = torch.cuda.get_device_properties(rank.device).total_memory
    most = most_images(training.pixels)
    # Memory grows with the batch in a straight line, of which two points are enough for a good first guess.
    one, two = _peak_memory(train, SMALLEST), _peak_memory(train, 2 * SMALLEST)
    an_image = (two - one) / SMALLEST
    outside = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    guess = SMALLEST + (AIM * total - outside - one) / an_image
    first = int(min(guess for (guess,) in everyones(rank, [min(guess, most)])))
    return fullest(partial(_share_in_use, rank, train, total), first, most, an_image / total)


def _peak_memory(train: Callable[[int], float], batch: int) -> int:
    torch.cuda.reset_peak_memory_stats()
    train(batch)
    return torch.cuda.max_memory_allocated()


def _share_in_use(rank: Rank, train: Callable[[int], float], total: int, batch: int) -> float | None:
    """The share of memory in use on the emptiest GPU; None if the batch does not fit on one."""
    release(rank.device)
    fits = within_memory(lambda: train(batch), rank.device) is not None
    every = everyones(rank, [fits, 1 - torch.cuda.mem_get_info()[0] / total])
    return min(share for _, share in every) if all(fit for fit, _ in every) else None


def fullest(share_in_use: Callable[[int], float | None], first: int, most: int, an_image: float) -> int:
    """The batch of at most `most` images that fills the memory, or the largest tried that fits.

    `share_in_use(batch)` is None where it does not fit; `first` is tried first; an image takes about `an_image` of all.
    """
    batch, best, too_large = first, SMALLEST, most + 1
    for _ in range(ATTEMPTS):
        share = share_in_use(batch)
        if share is not None:
            best = batch
            if share >= FILLED:
                break
            larger = batch + max(1, int((AIM - share) / an_image))
        else:
            too_large = batch
            larger = int(0.98 * batch)
        batch = min(max(best, larger), too_large - 1)
        if batch == best:
            break
    return best
