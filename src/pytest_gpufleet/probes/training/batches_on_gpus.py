"""Throughput by batch and number of GPUs, and with gradients that are accumulated over several batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import metric_under
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.timing.all_ranks import everyones
from pytest_gpufleet.probes.training.lap import SAMPLES, Step, lap
from pytest_gpufleet.probes.training.loop import (
    module_of,
    optimization,
    precision,
    release,
    returns_memory,
    synthetic_batch,
)
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, plan
from pytest_gpufleet.world.rank import Rank

SAMPLE_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@returns_memory
def throughput_on_gpus(
    rank: Rank,
    recipe: str,
    workload: Workload = USUAL,
    *,
    batches: Sequence[int],
    accumulated: Sequence[int] = (1,),
    together: bool = True,
) -> list[Reading]:
    """Images/s of training with each of these batches a GPU, and gradients accumulated over so many of them a step.

    `together`: all ranks train one network with DistributedDataParallel. Otherwise each trains its own, all at the same
    time. Batches for which a GPU has too little memory are left out; a workload's own batch is left aside.
    """
    kind = "sweep" if max(accumulated) == 1 else "accumulation"
    training = plan(recipe, replace(workload, batch=None), rank.device, kind)
    # Decided by all: one that trained what another leaves out would wait for it forever.
    most = min(fits for (fits,) in everyones(rank, [training.recipe.batch]))
    readings = []
    for batch in batches:
        for count in accumulated if batch <= most else ():
            readings.append(_throughput(rank, training.with_batch(batch), count, together))
            release(rank.device)
    return readings


def _throughput(rank: Rank, training: Plan, accumulated: int, together: bool) -> Reading:
    ranks = rank.size if together else 1
    images = ranks * training.recipe.batch * accumulated
    with rank.phase(f"{training}, {ranks} rank(s), {accumulated} batch(es) a step"), precision(training.recipe):
        step = accumulating(rank, training, accumulated, together=together)
        mean = lap(rank, step, training.recipe.warm_up, together=together).mean
        mean = max(each for (each,) in everyones(rank, [mean]))
        count = max(training.recipe.steps // accumulated, 1, round(SAMPLE_SECONDS[rank.device.type] / mean))
        lap(rank, step, 1)  # from here on side by side, also those that train alone
        laps = [lap(rank, step, count, together=together) for _ in range(SAMPLES)]
    samples = tuple(images * count / each.seconds for each in laps)
    conditions = training.conditions(ranks)
    if training.kind == "accumulation":
        conditions["accumulated"] = accumulated
    metric, place = ("train_throughput", WORLD) if together else ("solo_train_throughput", None)
    return Reading(metric_under(metric, conditions), median(samples), conditions, samples, place)


def accumulating(rank: Rank, training: Plan, batches: int, *, together: bool) -> Step:
    """A training step of so many batches: gradients stay on their rank (no_sync) until the last of them."""
    images, labels = synthetic_batch(rank, training)
    module = module_of(rank, training, together=together)
    optimizer, scaler = optimization(module, training, rank.device)
    reduced = False  # DDP must have reduced once before it may be told not to

    def backward(share: int) -> Tensor:
        loss: Tensor = module(images, labels).mean()
        scaler.scale(loss / share if share > 1 else loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step() -> Tensor:
        nonlocal reduced
        optimizer.zero_grad(set_to_none=True)
        share = batches if reduced else 1
        with module.no_sync() if isinstance(module, DistributedDataParallel) and reduced else nullcontext():
            for _ in range(share - 1):
                backward(share)
        reduced = True
        loss = backward(share)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step
