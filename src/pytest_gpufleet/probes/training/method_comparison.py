"""DataParallel, DistributedDataParallel and FSDP, doing the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import nn

from pytest_gpufleet.model.conditions import METHODS
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import GiB, metric_under
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.probes.training import parallel_methods
from pytest_gpufleet.probes.training.lap import SAMPLES, lap
from pytest_gpufleet.probes.training.loop import (
    WithLoss,
    eager,
    network,
    precision,
    returns_memory,
    synthetic_batch,
)
from pytest_gpufleet.probes.training.recipes import USUAL, Workload, plan
from pytest_gpufleet.probes.training.sharding import fully_sharded
from pytest_gpufleet.world.rank import Rank

BATCH = 256  # a GPU


@returns_memory
def throughput_by(
    rank: Rank, method: str, recipe: str, workload: Workload = USUAL, *, places: Sequence[Where] = ()
) -> list[Reading]:
    """Images/s of training on the GPUs at `places` by one of METHODS, and the memory that it takes on each.

    Without places each GPU trains a network of its own, at the same time and without any of them. "dp" runs on one
    rank, which sees all GPUs; the others on one rank a GPU. The global batch is the same. All take the weights in NCHW
    and the optimizer unfused, since FSDP takes neither channels_last nor every fused optimizer.
    """
    training = plan(recipe, workload, rank.device, "comparison", BATCH)
    together, gpus = bool(places), len(places) or 1
    count, images = training.recipe.steps, training.recipe.batch * gpus
    conditions = {**training.conditions(gpus), "method": method}
    if method == "dp":
        training = training.with_batch(images)
    own = places[rank.index] if together else None
    here = dict(enumerate(places)) if method == "dp" else {rank.device.index: own}
    on_gpu = rank.device.type == "cuda"
    for device in here if on_gpu else ():
        torch.cuda.reset_peak_memory_stats(device)
    # What cuDNN has found to be the fastest it keeps for a thread, and DataParallel starts new ones in every step.
    settings = precision(training.recipe, benchmark=method != "dp")
    with rank.phase(f"{training}, {METHODS[method]}, {gpus} ranks"), settings:
        module = _by(method, rank, WithLoss(network(training, rank.device), training.recipe), gpus)
        step = eager(module, training, rank.device, fused=False)
        data = synthetic_batch(rank, training)
        lap(rank, lambda: step(*data), training.recipe.warm_up)
        laps = [lap(rank, lambda: step(*data), count, together=together) for _ in range(SAMPLES)]
    samples = tuple(images * count / each.seconds for each in laps)
    metric, place = ("train_throughput", WORLD) if together else ("solo_train_throughput", None)
    readings = [Reading(metric_under(metric, conditions), median(samples), conditions, samples, place)]
    for device, at in here.items() if on_gpu else ():
        memory = torch.cuda.max_memory_allocated(device) / GiB
        readings.append(Reading("train_memory", memory, conditions, place=at))
    return readings


def _by(method: str, rank: Rank, module: WithLoss, gpus: int) -> nn.Module:
    if gpus == 1:
        return module
    if method == "ddp":
        return parallel_methods.distributed(rank, module)
    if method == "fsdp":
        stages = [child for name, child in module.network.named_children() if name.startswith("layer")]
        return fully_sharded(rank, module, parts=stages)
    return parallel_methods.threaded(rank, module, gpus)


def in_words(throughput: Mapping[str, float], memory: Mapping[str, Mapping[Where, float]]) -> str:
    """What a comparison says to a person: images/s of each method, GiB on each place of each method."""
    fastest = max(throughput, key=lambda method: throughput[method])
    parts = [f"{METHODS[fastest]} trains fastest"]
    for method, rate in throughput.items():
        if method != fastest:
            parts.append(f"{METHODS[method]} reaches {rate / throughput[fastest]:.0%} of it")
    text = "; ".join(parts)
    if memory:
        leanest = min(memory, key=lambda method: max(memory[method].values()))
        text += (
            f". {METHODS[leanest]} needs the least memory on its fullest GPU ({max(memory[leanest].values()):.1f} GiB)"
        )
    if "dp" in memory:
        first, *others = memory["dp"].values()
        text += f"; DataParallel takes {first:.1f} GiB on the first GPU and {max(others):.1f} GiB on the others"
    return text + "."
