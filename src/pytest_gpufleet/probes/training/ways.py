"""Other ways to train a ResNet: fed from JPEG files, which shows whether the host keeps up with the GPUs; by method,
number of GPUs, batch, and batches whose gradients accumulate (the sweep); and in full memory."""

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.metric import GiB, Reading
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.probes.memory import shares_memory
from pytest_gpufleet.probes.timing import agree, everyones
from pytest_gpufleet.probes.training import loop
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, most_images, plan
from pytest_gpufleet.world.world import Rank

PHOTO_WIDTH, PHOTO_HEIGHT = 500, 375  # a common size in ImageNet; the files come out at about its mean of 110 kB
CLASSES = 4

BATCH = 256  # batches wait in /dev/shm, some for each worker
MAX_WORKERS = 16  # a rank
PREFETCH = 2  # batches a worker has ready: torch's default
HOST_BOUND = 0.95  # of what the GPUs could take

# Of ImageNet, in units of a byte.
MEAN, DEVIATION = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


def write_photos(folder: Path, count: int) -> None:
    """`count` JPEG files, in a folder for each class, so noisy that they take as long to decode as photographs do."""
    generator = np.random.default_rng(0)
    for index in range(count):
        target = folder / f"class{index % CLASSES}"
        target.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((PHOTO_WIDTH, PHOTO_HEIGHT), Image.Resampling.BICUBIC)
        noise = generator.normal(0, 13, (PHOTO_HEIGHT, PHOTO_WIDTH, 1))
        pixels = np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(target / f"{index}.jpg", quality=90)


def worker_count(ranks: int, batch_bytes: int) -> int:
    """Loader processes for each of `ranks` on this host: a core each, as far as their batches fit into /dev/shm."""
    room = shutil.disk_usage("/dev/shm").free // 2 // ranks // (PREFETCH * batch_bytes)
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks, room))


def photo_loader(rank: Rank, folder: str, pixels: int, batch: int, batches: int, workers: int) -> DataLoader[Any]:
    """Batches of photos of `folder`, in random order, decoded, cropped and flipped by `workers`, into pinned memory."""
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


@loop.returns_memory()
def fed_throughput(
    rank: Rank, folder: str, recipe: str, workload: Workload = USUAL, *, workers: int | None = None
) -> Reading:
    """Images/s of DistributedDataParallel training on photos that a DataLoader reads from `folder` (see write_photos).
    Its details say what bounds it. The files stay in the page cache: the processors are tested, and not the disks. A
    sample is as many batches as the workers can have ready, so that none is served from what was ready before."""
    training = loop.plan_of_all(rank, recipe, workload, kind="custom" if workers else "", most=BATCH)
    batch = training.batch
    workers = workers or agree(rank, worker_count(rank.local_size, batch * 3 * training.pixels**2))
    count = workers * PREFETCH
    # More than are read: else nobody would work on the next ones during the last sample.
    photos = photo_loader(rank, folder, training.pixels, batch, (2 + loop.SAMPLES) * count, workers)
    with rank.phase(f"{training}, fed by {workers} workers"), loop.precision(training):
        step = loop.eager(loop.module_of(rank, training), training, rank.device)
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


SAMPLE_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@dataclass(frozen=True)
class Way:
    """How to train: by one of METHODS, with a batch of so many images a GPU, and a step every so many batches."""

    method: str
    batch: int
    accumulated: int = 1


@loop.returns_memory()
def throughput_of(
    rank: Rank, way: Way, recipe: str, workload: Workload = USUAL, *, places: Sequence[Where] = ()
) -> list[Reading]:
    """Images/s of training in one way on the GPUs at `places`, and the memory that it takes on each; without places
    each rank trains a network of its own. "dp" runs on one rank, which sees all GPUs. All take the weights in NCHW and
    the optimizer unfused, since FSDP takes neither channels_last nor every fused optimizer."""
    training = plan(recipe, replace(workload, batch=way.batch), rank.device, "sweep")
    together, gpus = bool(places), len(places) or 1
    conditions = {**training.conditions(gpus), "accumulated": way.accumulated}
    here: dict[int | None, Where | None] = {rank.device.index: places[rank.index] if together else None}
    if together:
        conditions["method"] = way.method
    if in_threads := together and way.method == "dp":
        training, here = replace(training, batch=way.batch * gpus), {**dict(enumerate(places))}
    if rank.device.type == "cpu":
        here = {}  # whose memory nobody counts
    for device in here:
        torch.cuda.reset_peak_memory_stats(device)
    # What cuDNN has found to be the fastest it keeps for a thread, and DataParallel starts new ones in every step.
    settings = loop.precision(training, benchmark=not in_threads)
    with rank.phase(f"{training}, {way.accumulated} batch(es) a step, {way.method} on {gpus} rank(s)"), settings:
        model = loop.network(training, rank.device)
        stages = [child for name, child in model.named_children() if name.startswith("layer")]
        module = loop.under(way.method if gpus > 1 else "", rank, loop.WithLoss(model, training), stages)
        if in_threads and gpus > 1:
            # One process, a thread for each GPU: PyTorch advises against it, and old code still has it.
            module = DataParallel(module, device_ids=list(range(gpus)), output_device=rank.device)
        data = loop.synthetic_batch(rank, training)
        step = partial(loop.eager(module, training, rank.device, fused=False, batches=way.accumulated), *data)
        (mean,) = loop.slowest_of(rank, [loop.lap(rank, step, training.warm_up, together=together).mean])
        count = max(training.steps // way.accumulated, 1, round(SAMPLE_SECONDS[rank.device.type] / mean))
        laps = loop.sampled(rank, [], step, None, count, together=together).usual
    memory = {at: torch.cuda.max_memory_allocated(device) / GiB for device, at in here.items()}
    return [
        loop.throughput("train_throughput", gpus * way.batch * way.accumulated, laps, conditions, together),
        *(Reading("train_memory", used, conditions, place=at) for at, used in memory.items()),
    ]


SMALLEST = 16  # images
FILLED, BRIM = 0.95, 0.985  # of the GPU's memory: what counts as full, and above which a step may find no room
RETURNED = 0.99  # of the memory that was free before: libraries may have taken a little more
RESOLUTION = 1 / 64  # of the batch: less than what lies between FILLED and BRIM

# How cuDNN and cuBLAS say that they found no memory to work in.
NO_MEMORY = ("unable to find an engine", "STATUS_ALLOC_FAILED")


@loop.returns_memory()
def fill_memory(rank: Rank, recipe: str, work: Workload = USUAL, *, seconds: float) -> tuple[list[Reading], list[str]]:
    """Images/s and the memory in use, by the driver's count, of training for so many seconds with a batch that fills
    95 % of every GPU's memory or more; and what is wrong with that. Once training has begun no memory is an error."""
    if shares_memory(rank.device):
        not_applicable("its memory is the host's, of which nobody may take all")
    training = plan(recipe, work, rank.device, "sweep")
    # Trying algorithms would fail at random with so little memory left.
    with loop.precision(training, benchmark=False):
        _trainer(rank, training)  # libraries take memory at their first use, and keep it
        loop.release()
        free, total = torch.cuda.mem_get_info()
        training, steps, rate, used = _train_full(rank, training, seconds)
    loop.release()
    trouble = [] if full(training, used, total) else ["no batch was found that fills its memory"]
    if torch.cuda.mem_get_info()[0] < RETURNED * free:
        trouble.append("memory was not returned")
    conditions = {**training.conditions(rank.size), "method": "ddp", "accumulated": 1}
    details: dict[str, Condition] = {"steps": steps}
    return [
        Reading("train_throughput", rate, conditions, place=WORLD, details=details),
        Reading("train_memory", used / GiB, conditions, details=details),
    ], trouble


def full(training: Plan, used: int, total: int) -> bool:
    """Whether as much was in use as should be, or no kernel takes a larger batch."""
    return used >= FILLED * total or training.batch >= most_images(training.pixels)


def _trainer(rank: Rank, training: Plan) -> Callable[..., float]:
    """train(batch, steps, alone=False): the seconds that a step of one network takes; alone without communication."""
    module = loop.module_of(rank, training)
    step = loop.eager(module, training, rank.device)

    def train(batch: int, steps: int, alone: bool = False) -> float:
        data = loop.synthetic_batch(rank, replace(training, batch=batch))
        with loop.without_sync(module) if alone else nullcontext():
            return loop.lap(rank, lambda: step(*data), steps, together=not alone).mean

    train(SMALLEST, 2)
    return train


def _train_full(rank: Rank, training: Plan, seconds: float) -> tuple[Plan, int, float, int]:
    """The plan with the batch that was found, the steps done, images/s and the bytes then in use."""
    train = _trainer(rank, training)

    def fits(batch: int) -> bool:
        loop.release()
        done = within_memory(partial(train, batch, 1, alone=True))
        free, total = torch.cuda.mem_get_info()
        return all(each for (each,) in everyones(rank, [done and total - free <= BRIM * total]))

    with rank.phase(f"{training}: look for the batch that fills the memory"):
        batch = largest(fits, SMALLEST, most_images(training.pixels))
    training = replace(training, batch=batch)
    loop.release()
    with rank.phase(f"{training}: {seconds:g} s in full memory"):
        steps = max(2, round(seconds / loop.slowest_of(rank, [train(batch, 2)])[0]))
        mean = train(batch, steps)
    free, total = torch.cuda.mem_get_info()
    return training, steps, rank.size * batch / mean, total - free


def largest(works: Callable[[int], bool], low: int, high: int) -> int:
    """From `low`, which works, within a sixty-fourth of itself."""
    if works(high):
        return high
    while high - low > max(1, RESOLUTION * low):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def within_memory(attempt: Callable[[], object]) -> bool:
    """Whether an attempt came to its end; if it ran out of GPU memory, all of that is then free again."""
    try:
        attempt()
        return True
    except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
    # Only here the frames of the attempt are gone, and with them its tensors.
    loop.release()
    return False
