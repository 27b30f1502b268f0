"""Training that is fed from JPEG files: whether the host keeps up with the GPUs."""

import os
import shutil
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.probes.training import loop
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, plan
from pytest_gpufleet.world.rank import Rank

PHOTO_WIDTH, PHOTO_HEIGHT = 500, 375  # a common size in ImageNet; the files come out at about its mean of 110 kB
QUALITY = 90
CLASSES = 4

BATCH = 256  # batches wait in /dev/shm, some for each worker
MAX_WORKERS = 16  # a rank
PREFETCH = 2  # batches a worker has ready: torch's default
HOST_BOUND = 0.95  # of what the GPUs could take

# Of ImageNet, in units of a byte.
MEAN, DEVIATION = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


def write_photos(folder: Path, count: int) -> None:
    """Write `count` JPEG files into sub-folders, one a class: smooth colours with some noise, so that they compress,
    and take as long to decode, as photographs do."""
    generator = np.random.default_rng(0)
    for index in range(count):
        target = folder / f"class{index % CLASSES}"
        target.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((PHOTO_WIDTH, PHOTO_HEIGHT), Image.Resampling.BICUBIC)
        noise = generator.normal(0, 13, (PHOTO_HEIGHT, PHOTO_WIDTH, 1))
        pixels = np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(target / f"{index}.jpg", quality=QUALITY)


def worker_count(ranks: int, batch_bytes: int) -> int:
    """Loader processes for each of `ranks` on this host: a core each, as far as their batches fit into /dev/shm."""
    cores = len(os.sched_getaffinity(0)) // ranks
    room = shutil.disk_usage("/dev/shm").free // 2 // ranks // (PREFETCH * batch_bytes)
    return max(1, min(MAX_WORKERS, cores, room))


def photo_loader(rank: Rank, folder: str, pixels: int, batch: int, batches: int, workers: int) -> DataLoader[Any]:
    """Batches of random photos out of `folder`, each taken many times, as most programs load them: `workers` processes
    decode, crop and flip them, into pinned memory."""
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(pixels), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    photos: Dataset[Any] = datasets.ImageFolder(folder, transforms.Compose(steps))
    generator = torch.Generator().manual_seed(rank.index)
    sampler = RandomSampler(photos, replacement=True, num_samples=batches * batch, generator=generator)  # type: ignore[arg-type]
    return DataLoader(
        photos,
        batch_size=batch,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=PREFETCH,
        pin_memory=rank.device.type == "cuda",
        persistent_workers=True,
        # Forked, and so in the process group of the rank, with which they end. A forkserver would import torch anew.
        multiprocessing_context="fork",
    )


@loop.returns_memory
def fed_throughput(
    rank: Rank, folder: str, recipe: str, workload: Workload = USUAL, *, workers: int | None = None
) -> Reading:
    """Images/s of DistributedDataParallel training on photos that a DataLoader reads from `folder` (see write_photos).
    Its details say what bounds it: the GPUs are given the same batch over and over for comparison. The files are few
    and stay in the page cache, so it is the processors that are tested, and not the disks. A sample is as many batches
    as the workers can have ready, so that none is served from what was ready before."""
    training = plan(recipe, workload, rank.device, kind="custom" if workers else "", most=BATCH)
    batch = training.batch
    workers = workers or worker_count(rank.local_size, batch * 3 * training.pixels**2)
    count = workers * PREFETCH
    # More than are read: else nobody would work on the next ones during the last sample.
    photos = photo_loader(rank, folder, training.pixels, batch, (2 + loop.SAMPLES) * count, workers)
    with rank.phase(f"{training}, fed by {workers} workers"), loop.precision(training):
        module = loop.module_of(rank, training)
        step = loop.eager(module, training, rank.device)
        same = partial(step, *loop.synthetic_batch(rank, training))
        loop.lap(rank, same, training.warm_up)
        full = loop.lap(rank, same, max(count, training.steps))
        with closing(normalised(rank, training, photos)) as images:
            loop.lap(rank, lambda: step(*next(images)), count)
            laps = loop.sampled(rank, [], lambda: step(*next(images)), None, count, together=True).usual
    times = loop.slowest_of(rank, [median(each.mean for each in laps), full.mean])
    details = {"workers": f"{workers} a GPU", "training": f"is {bound(*(rank.size * batch / each for each in times))}"}
    under = training.conditions(rank.size)
    return loop.throughput("loader_throughput", rank.size * batch, laps, under, True, details=details)


def normalised(rank: Rank, training: Plan, photos: DataLoader[Any]) -> Generator[tuple[Tensor, Tensor]]:
    mean, deviation = (torch.tensor(each, device=rank.device).view(1, 3, 1, 1) for each in (MEAN, DEVIATION))
    for batch in photos:
        images, labels = (each.to(rank.device, non_blocking=True) for each in batch)
        yield (images.contiguous(memory_format=training.memory_format) - mean) / deviation, labels


def bound(rate: float, could: float) -> str:
    if rate >= HOST_BOUND * could:
        return f"GPU-bound: {rate:,.0f} images/s, and {could:,.0f} without the loader"
    return f"host-bound: the loader gives {rate:,.0f} images/s of the {could:,.0f} that the GPUs could take"
