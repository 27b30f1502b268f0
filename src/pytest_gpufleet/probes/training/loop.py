"""ResNet training on synthetic data that stays on the device: what a GPU can do when nothing holds it up."""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.gpu import Missing
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.compute.rate import matmul_in_tf32
from pytest_gpufleet.probes.timing import Mark, between, current_stream, everyones, line_up, mark, synchronize
from pytest_gpufleet.probes.training import cuda_graph, recipes
from pytest_gpufleet.probes.training.recipes import Plan, Recipe, Step, Workload
from pytest_gpufleet.world.rank import Rank

SAMPLES = 3
FedStep = Callable[[Tensor, Tensor], Tensor]  # one step of training, of images and labels; returns the loss
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lap:
    """Some steps in a row: seconds of all, and of each; the loss of the last; seconds that the processor computed."""

    seconds: float
    steps: tuple[float, ...]
    loss: float
    processor_seconds: float

    @property
    def mean(self) -> float:
        return self.seconds / len(self.steps)


def lap(rank: Rank, step: Step, count: int, *, together: bool = True) -> Lap:
    """Do `count` steps, on ranks that are `together` from the same moment on. FloatingPointError if the loss is not
    finite: a throughput of wrong arithmetic is none."""
    stream = current_stream(rank.device)
    if together and rank.size > 1:
        line_up(rank)
    synchronize(rank)
    loss = torch.zeros(())
    marks: list[Mark] = [mark(stream)]
    began, computed = time.perf_counter(), time.process_time()
    for _ in range(count):
        loss = step()
        marks.append(mark(stream))
    synchronize(rank)
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - computed
    if not loss.isfinite():
        raise FloatingPointError(f"the loss became {loss.item()}")
    times = tuple(between(*ends) for ends in itertools.pairwise(marks))
    return Lap(seconds, times, loss.item(), processor_seconds)


def record_losses(rank: Rank, training: Mapping[str, Condition], course: Sequence[Lap], *, together: bool) -> None:
    """Put the loss at the end of each lap on record, by the steps done until then: of ranks that train `together` the
    mean, since each sees its own data."""
    steps, losses = itertools.accumulate(len(each.steps) for each in course), [each.loss for each in course]
    if together:
        losses = [fmean(column) for column in zip(*everyones(rank, losses), strict=True)]
    if not together or rank.index == 0:
        rank.record_losses(training, dict(zip(steps, losses, strict=True)), WORLD if together else None)


def utilization(rank: Rank, just_done: Lap) -> float | None:
    """The share of the time in which the GPU ran anything, as NVML has it right after a lap: of its last sample period,
    a sixth of a second to a second (nvml.h, nvmlUtilization_t). Of a CPU rank the share of a core that it used."""
    if rank.gpu is None:
        return min(1.0, just_done.processor_seconds / just_done.seconds)
    with nvml.of_gpu(rank.gpu) as driver:
        percent = driver.ask(0, "utilization_percent")
    return None if isinstance(percent, Missing) else float(percent) / 100


def without_communication(module: nn.Module, step: Step) -> Step:
    """The same step without communication, after which ranks differ."""

    def alone() -> Tensor:
        with without_sync(module):
            return step()

    return alone


def slowest_of(rank: Rank, seconds: Iterable[float]) -> list[float]:
    return [max(column) for column in zip(*everyones(rank, [*seconds]), strict=True)]


def communication_share(
    rank: Rank, conditions: Mapping[str, Condition], usual: Iterable[float], quiet: Iterable[float]
) -> Reading:
    """What the slowest rank's step is longer with communication than without, as a part of it, lap by lap. `usual` and
    `quiet`: seconds of a step with and without."""
    with_it, without = slowest_of(rank, usual), slowest_of(rank, quiet)
    shares = tuple(max(0.0, 1 - alone / all_in) for all_in, alone in zip(with_it, without, strict=True))
    details = {"step": f"{ms(median(with_it))} with communication, {ms(median(without))} without"}
    return Reading("communication_share", median(shares), conditions, shares, WORLD, details)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


class WithLoss(nn.Module):
    """A network, its autocast and its loss as one module, so that the threads of DataParallel do all of it."""

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.network, self.autocast = network, recipe.autocast

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
            loss = nn.functional.cross_entropy(self.network(images), labels)
        return torch.stack([loss])  # DataParallel gathers along a dimension


def returns_memory(probe: Callable[..., Result]) -> Callable[..., Result]:
    """Give back to the GPU what a probe took, so that nobody after it finds the memory full."""

    @wraps(probe)
    def returning(rank: Rank, *args: Any, **kwargs: Any) -> Result:
        result = probe(rank, *args, **kwargs)
        release(rank.device)
        return result

    return returning


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def precision(recipe: Recipe, *, benchmark: bool = True) -> Iterator[None]:
    """The arithmetic of a recipe, and whether cuDNN tries algorithms and takes the fastest."""
    search, tried, tf32 = benchmark and recipe.tried > 0, recipe.tried, recipe.tf32
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=search, benchmark_limit=tried, allow_tf32=tf32)
    with matmul_in_tf32(tf32), flags:
        yield


def network(training: Plan, device: torch.device) -> nn.Module:
    """The network of a plan, with the same weights wherever it is made."""
    # Brings torch's compiler along: seconds for which a collection of the checks shall not wait.
    from torchvision.models import get_model
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    small = training.model == recipes.REHEARSAL_MODEL
    model: nn.Module = ResNet(BasicBlock, [1, 1, 1, 1]) if small else get_model(training.model)
    return model.to(device)


def module_of(rank: Rank, training: Plan, *, together: bool = True) -> nn.Module:
    """The network of a plan with its loss: one that all ranks train `together`, or the rank's own."""
    model = network(training, rank.device).to(memory_format=training.recipe.memory_format)
    return under("ddp" if together and rank.size > 1 else "", rank, WithLoss(model, training.recipe))


def synthetic_batch(rank: Rank, training: Plan) -> tuple[Tensor, Tensor]:
    """Random images and labels on the device, other ones on each rank."""
    torch.manual_seed(1 + rank.index)
    images = torch.randn(training.recipe.batch, 3, training.pixels, training.pixels, device=rank.device)
    labels = torch.randint(1000, (training.recipe.batch,), device=rank.device)
    return images.contiguous(memory_format=training.recipe.memory_format), labels


def eager(module: nn.Module, training: Plan, device: torch.device, *, fused: bool = True, batches: int = 1) -> FedStep:
    """Forward, backward and optimizer as PyTorch runs them, one operation after the other. Of several `batches` the
    gradients stay on their rank (no_sync of DDP) until the last of them."""
    parameters = list(module.parameters())
    optimizer = recipes.make_optimizer(training.optimizer, parameters, fused=fused and device.type == "cuda")
    if training.optimizer == "sgd":
        for parameter in parameters:
            # The fused kernel leaves its first momentum uninitialised when gradient scaling skips the first step.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(device.type, enabled=training.recipe.autocast is torch.float16)
    count = 1  # DDP must have reduced once before it may leave it out

    def step(images: Tensor, labels: Tensor) -> Tensor:
        nonlocal count
        optimizer.zero_grad(set_to_none=True)
        for left in reversed(range(count)):
            with without_sync(module) if left else nullcontext():
                loss: Tensor = module(images, labels).mean()
                scaler.scale(loss / count if count > 1 else loss).backward()  # type: ignore[no-untyped-call]
        count = batches
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def steps_of(rank: Rank, training: Plan, *, together: bool) -> tuple[Step, Step]:
    """A training step on a synthetic batch, and the same without communication, after which ranks differ."""
    images, labels = synthetic_batch(rank, training)
    if training.recipe.graph:
        return cuda_graph.steps(rank, network(training, rank.device), training, images, labels, together=together)
    module = module_of(rank, training, together=together)
    step = partial(eager(module, training, rank.device), images, labels)
    return step, without_communication(module, step)


@returns_memory
def train_throughput(
    rank: Rank,
    recipe: str,
    workload: Workload = recipes.USUAL,
    *,
    together: bool = True,
    communication: bool = False,
    busy: bool = False,
) -> list[Reading]:
    """Images/s of a training loop: forward, loss, backward, optimizer; the median of three samples.

    `together`: all ranks train one model with DistributedDataParallel, and the figure is their sum at the pace of the
    slowest. Otherwise each GPU trains a model of its own at the same time, which a slow neighbour cannot pull down.
    `communication`: also the share of a step that communication takes: laps with and without it take turns. `busy`:
    also the share of the time in which each GPU is busy. FloatingPointError if the loss is not finite, MemoryError if a
    batch that was asked for does not fit.
    """
    training = recipes.plan(recipe, workload, rank.device)
    ranks = rank.size if together else 1
    count, images = training.recipe.steps, ranks * training.recipe.batch
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # for `_details`
    conditions = training.conditions(ranks)
    try:
        with rank.phase(f"{training}, {ranks} rank(s)"), precision(training.recipe):
            laps = _laps(rank, training, together, communication, busy)
            record_losses(rank, conditions, laps.course, together=together)
    except torch.cuda.OutOfMemoryError as error:
        memory = torch.cuda.get_device_properties(rank.device).total_memory / GiB
        raise MemoryError(
            f"{training} does not fit into the {memory:.0f} GiB of this GPU: another process holds memory, or choose "
            "a smaller batch"
        ) from error
    samples = tuple(images * count / each.seconds for each in laps.usual)
    metric, place = ("train_throughput", WORLD) if together else ("solo_train_throughput", None)
    readings = [Reading(metric, median(samples), conditions, samples, place, _details(rank, training, laps))]
    if communication:
        means = ([each.mean for each in some] for some in (laps.usual, laps.quiet))
        readings.append(communication_share(rank, conditions, *means))
    if busy and (shares := tuple(each for each in laps.busy if each is not None)):
        readings.append(Reading("train_utilization", median(shares), conditions, shares))
    return readings


class Laps(NamedTuple):
    usual: list[Lap]  # the samples
    quiet: list[Lap]  # samples without communication, where asked for
    busy: list[float | None]  # how busy the GPU was in each of the usual ones, where asked for
    course: list[Lap]  # all in their order, from the first step on


def _laps(rank: Rank, training: Plan, together: bool, communication: bool, busy: bool) -> Laps:
    step, alone = steps_of(rank, training, together=together)
    laps = Laps([], [], [], [])

    def run(what: Step, count: int) -> Lap:
        laps.course.append(lap(rank, what, count, together=together))
        return laps.course[-1]

    run(step, 1)
    run(step, training.recipe.warm_up)
    if communication:
        run(alone, 1)
    if rank.size > 1:
        line_up(rank)  # also ranks that train alone: beside neighbours that still warm up they would be faster
    for _ in range(SAMPLES):
        laps.usual.append(run(step, training.recipe.steps))
        if busy:
            laps.busy.append(utilization(rank, laps.usual[-1]))
        if communication:
            laps.quiet.append(run(alone, training.recipe.steps))
    return laps


def _details(rank: Rank, training: Plan, laps: Laps) -> dict[str, Condition]:
    """What the figure was computed with, that it learned, and how long the steps of each rank took."""
    times = sorted(seconds for each in laps.usual for seconds in each.steps)
    # Ranks that wait for each other show one time: without communication each shows its own.
    own = median(seconds for each in (laps.quiet or laps.usual) for seconds in each.steps)
    p95 = times[math.ceil(0.95 * len(times)) - 1]
    memory, index = (torch.cuda.max_memory_allocated(), rank.gpu.index) if rank.gpu is not None else (0, rank.index)
    every = everyones(rank, [median(times), p95, own, memory, index, laps.course[0].loss, laps.usual[-1].loss])
    steps, p95s, owns, memories, indices, before, after = zip(*every, strict=True)
    details: dict[str, Condition] = {
        "computed": f"in {training.recipe}",
        "step": f"{ms(median(steps))}, 95 % within {ms(max(p95s))}",
    }
    if rank.size > 1:
        alone = " without communication" if laps.quiet else ""
        who = f"{'rank' if rank.gpu is None else 'GPU'} {indices[owns.index(max(owns))]:.0f}"
        details["slowest"] = f"{who} with {ms(max(owns))}{alone}, median {ms(median(owns))}"
    details["loss"] = f"{fmean(before):.3g} at first, {fmean(after):.3g} in the end"
    if memory:
        tried = training.recipe.tried
        details["convolutions"] = f"by the fastest of {tried} algorithms" if tried else "as cuDNN's heuristics choose"
        details["memory"] = f"{max(memories) / GiB:.1f} GiB a GPU"
    return details


# DDP and FSDP: a copy of the network on every rank, or a part of its weights, their gradients and the state of the
# optimizer.

# Newer versions of torch have renamed it.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def under(
    method: str, rank: Rank, module: nn.Module, parts: Iterable[nn.Module] = (), dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A module as `method` trains it: "ddp", "fsdp" by these parts in `dtype`, or alone.

    Over NVLink DDP has all gradients in one bucket: on 4x H200 (batch 512, amp, torch 2.11) scaling was 97.1 % against
    96.4 % with the default of 25 MB, since the reductions take from the backward pass more than they hide. Over PCIe
    and between nodes, where a reduction takes long, it has the default, which overlaps them.
    """
    if method == "fsdp":
        return fully_sharded(rank, module, dtype, parts)
    if method != "ddp":
        return module
    by_nvlink = rank.gpu is not None and rank.gpu.nvlinks_active and rank.size == rank.local_size
    return DistributedDataParallel(
        module,
        device_ids=[rank.device] if rank.gpu is not None else None,
        process_group=rank.group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=300 if by_nvlink else 25,
        static_graph=True,
        **_NO_BUFFERS,
    )


def without_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Backward passes within this leave gradients on their rank; where ranks do not train by DDP nothing changes."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def fully_sharded(
    rank: Rank, model: nn.Module, dtype: torch.dtype = torch.float32, parts: Iterable[nn.Module] | None = None
) -> nn.Module:
    """`model` under FSDP: the parameters of one of `parts` (submodules, by default its children) are gathered when it
    is their turn. It computes in `dtype` and reduces gradients in fp32. FSDP takes no channels_last parameters."""
    if rank.device.type == "cpu" and torch.__version__ < "2.11":
        # https://github.com/pytorch/pytorch/issues/162338; before torch 2.7 it does not run there at all.
        not_applicable("FSDP on CPU ranks needs torch 2.11: older ones sum gradients where they should average")
    try:  # here, since it takes a second, and a collection of the checks does not wait for it
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard  # type: ignore[attr-defined]
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*(model.children() if parts is None else parts), model):
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def own_shard(rank: Rank, whole: Tensor) -> Tensor:
    """The part of a tensor that FSDP keeps on this rank; empty if there are fewer rows than ranks."""
    shards = whole.chunk(rank.size)
    return shards[rank.index] if rank.index < len(shards) else whole[:0]


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: its shard under FSDP, else all of it."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()
