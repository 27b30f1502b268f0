"""One sweep over the ways to train a ResNet: method, number of GPUs, batch, and batches whose gradients accumulate."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.parallel import DataParallel

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.probes.timing import everyones
from pytest_gpufleet.probes.training import loop
from pytest_gpufleet.probes.training.recipes import USUAL, Plan, Workload, most_images, plan
from pytest_gpufleet.world.rank import Rank

SAMPLE_SECONDS = {"cuda": 0.5, "cpu": 0.0}


@dataclass(frozen=True)
class Way:
    """How to train: by one of METHODS, with a batch of so many images a GPU, and a step every so many batches."""

    method: str
    batch: int
    accumulated: int = 1


@loop.returns_memory
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


@loop.returns_memory
def fill_memory(
    rank: Rank, recipe: str, workload: Workload = USUAL, *, seconds: float
) -> tuple[list[Reading], list[str]]:
    """Images/s and the memory in use, by the driver's count, of training for so many seconds with a batch that fills at
    least 95 % of every GPU's memory; and what is wrong with that memory. Once training has begun out of memory is an
    error."""
    training = plan(recipe, workload, rank.device, "sweep")
    # Trying algorithms would fail at random with so little memory left.
    with loop.precision(training, benchmark=False):
        _trainer(rank, training)  # libraries take memory at their first use, and keep it
        loop.release(rank.device)
        free, total = torch.cuda.mem_get_info()
        training, steps, rate, used = _train_full(rank, training, seconds)
    loop.release(rank.device)
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
        loop.release(rank.device)
        done = within_memory(partial(train, batch, 1, alone=True), rank.device)
        free, total = torch.cuda.mem_get_info()
        return all(each for (each,) in everyones(rank, [done and total - free <= BRIM * total]))

    with rank.phase(f"{training}: look for the batch that fills the memory"):
        batch = largest(fits, SMALLEST, most_images(training.pixels))
    training = replace(training, batch=batch)
    loop.release(rank.device)
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


def within_memory(attempt: Callable[[], object], device: torch.device) -> bool:
    """Whether an attempt came to its end; if it ran out of GPU memory, all of that is then free again."""
    try:
        attempt()
        return True
    except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
    # Only here the frames of the attempt are gone, and with them its tensors.
    loop.release(device)
    return False
