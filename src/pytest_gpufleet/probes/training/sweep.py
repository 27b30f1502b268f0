"""One sweep over the ways to train a ResNet: method, number of GPUs, batch, and batches whose gradients accumulate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import GiB, metric_under
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.probes.timing.all_ranks import everyones
from pytest_gpufleet.probes.training import parallel_methods
from pytest_gpufleet.probes.training.lap import SAMPLES, Step, lap
from pytest_gpufleet.probes.training.loop import (
    WithLoss,
    network,
    optimization,
    precision,
    returns_memory,
    synthetic_batch,
)
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, plan
from pytest_gpufleet.probes.training.sharding import fully_sharded
from pytest_gpufleet.world.rank import Rank

SAMPLE_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@dataclass(frozen=True)
class Way:
    """How to train: by one of METHODS, with a batch of so many images a GPU, and a step every so many batches."""

    method: str
    batch: int
    accumulated: int = 1


@returns_memory
def throughput_of(
    rank: Rank, way: Way, recipe: str, workload: Workload = USUAL, *, places: Sequence[Where] = ()
) -> list[Reading]:
    """Images/s of training in one way on the GPUs at `places`, and the memory that it takes on each.

    Without places each rank trains a network of its own, all at the same time. "dp" runs on one rank, which sees all
    GPUs; the other methods on one rank a GPU. All take the weights in NCHW and the optimizer unfused, since FSDP takes
    neither channels_last nor every fused optimizer.
    """
    training = plan(recipe, replace(workload, batch=way.batch), rank.device, "sweep")
    together, gpus = bool(places), len(places) or 1
    conditions = {**training.conditions(gpus), "accumulated": way.accumulated}
    if together:
        conditions["method"] = way.method
    in_threads = together and way.method == "dp"
    if in_threads:
        training = training.with_batch(way.batch * gpus)
    own = places[rank.index] if together else None
    here = dict(enumerate(places)) if in_threads else {rank.device.index: own}
    on_gpu = rank.device.type == "cuda"
    for device in here if on_gpu else ():
        torch.cuda.reset_peak_memory_stats(device)
    # What cuDNN has found to be the fastest it keeps for a thread, and DataParallel starts new ones in every step.
    settings = precision(training.recipe, benchmark=not in_threads)
    with rank.phase(f"{training}, {way.accumulated} batch(es) a step, {way.method} on {gpus} rank(s)"), settings:
        module = _by(way.method, rank, WithLoss(network(training, rank.device), training.recipe), gpus)
        step = accumulating(rank, module, training, way.accumulated)
        mean = lap(rank, step, training.recipe.warm_up, together=together).mean
        mean = max(each for (each,) in everyones(rank, [mean]))
        count = max(training.recipe.steps // way.accumulated, 1, round(SAMPLE_SECONDS[rank.device.type] / mean))
        lap(rank, step, 1)  # from here on side by side, also those that train alone
        laps = [lap(rank, step, count, together=together) for _ in range(SAMPLES)]
    samples = tuple(gpus * way.batch * way.accumulated * count / each.seconds for each in laps)
    metric, place = ("train_throughput", WORLD) if together else ("solo_train_throughput", None)
    readings = [Reading(metric_under(metric, conditions), median(samples), conditions, samples, place)]
    for device, at in here.items() if on_gpu else ():
        readings.append(Reading("train_memory", torch.cuda.max_memory_allocated(device) / GiB, conditions, place=at))
    return readings


def _by(method: str, rank: Rank, module: WithLoss, gpus: int) -> nn.Module:
    if gpus == 1:
        return module
    if method == "ddp":
        return parallel_methods.distributed(rank, module)
    if method == "fsdp":
        stages = [child for name, child in module.network.named_children() if name.startswith("layer")]
        return fully_sharded(rank, module, parts=stages)
    # One process, a thread for each GPU: PyTorch advises against it, and old code still has it.
    return DataParallel(module, device_ids=list(range(gpus)), output_device=rank.device)


def accumulating(rank: Rank, module: nn.Module, training: Plan, batches: int) -> Step:
    """A training step of so many batches: gradients stay on their rank (no_sync of DDP) until the last of them."""
    images, labels = synthetic_batch(rank, training)
    optimizer, scaler = optimization(module, training, rank.device, fused=False)
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
