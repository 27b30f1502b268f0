"""ResNet training on synthetic data that stays on the device: what a GPU can do when nothing holds it up."""

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.model.conditions import Condition, Conditions
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.metric import GiB, Reading, metric_under
from pytest_gpufleet.model.place import WORLD, Missing
from pytest_gpufleet.probes.compute.rate import matmul_in_tf32
from pytest_gpufleet.probes.timing import agree, everyones, line_up, parts, synchronize
from pytest_gpufleet.probes.training import cuda_graph, recipes
from pytest_gpufleet.probes.training.recipes import Plan, Step, Workload
from pytest_gpufleet.world.world import Rank

SAMPLES = 3
LEARNED = 0.999  # of the first loss; on one to four GPUs 0.94 or less was left of it (docs/results)
FedStep = Callable[[Tensor, Tensor], Tensor]  # one step of training, of images and labels; returns the loss


class Lap(NamedTuple):
    """Some steps in a row: seconds of each, and the loss of the last."""

    steps: tuple[float, ...]
    loss: float

    @property
    def mean(self) -> float:
        return fmean(self.steps)


def lap(rank: Rank, step: Step, count: int, *, together: bool = True) -> Lap:
    """Do `count` steps, on ranks that begin `together`. FloatingPointError if the loss is not finite."""
    if together and rank.size > 1:
        line_up(rank)
    synchronize(rank)
    losses = deque[Tensor](maxlen=1)
    steps = parts(rank.device, lambda: losses.append(step()), 1, count)
    if not losses[0].isfinite():
        raise FloatingPointError(f"the loss became {losses[0].item()}")
    return Lap(tuple(steps), losses[0].item())


def must_have_learned(first: Lap, last: Lap) -> None:
    """ArithmeticError if the loss did not fall: where all gradients are NaN, gradient scaling leaves out every step."""
    if text := not_learned(first.loss, last.loss, LEARNED):
        raise ArithmeticError(text)


def not_learned(first: float, last: float, most: float) -> str:
    """Whether the loss is above this part of the first one, in a text."""
    return "" if last <= most * first else f"it did not learn: loss {first:.4g} at first, {last:.4g} in the end"


class Laps(NamedTuple):
    usual: list[Lap]  # the samples
    quiet: list[Lap]  # samples without communication, where asked for
    busy: list[float]  # how busy the GPU was in each of the usual ones, where asked for and known


def sampled(
    rank: Rank, course: list[Lap], step: Step, alone: Step | None, count: int, *, together: bool, busy: bool = False
) -> Laps:
    """SAMPLES of `count` steps, in turns with as many `alone`, without communication; all laps behind the `course`."""
    laps = Laps([], [], [])

    def run(what: Step, count: int) -> Lap:
        course.append(lap(rank, what, count, together=together))
        return course[-1]

    if alone:
        run(alone, 1)
    if rank.size > 1:
        line_up(rank)  # also ranks that train alone: beside neighbours that still warm up they would be faster
    for _ in range(SAMPLES):
        computed = time.process_time()
        laps.usual.append(run(step, count))
        spent = time.process_time() - computed
        if busy and (share := utilization(rank, spent / sum(laps.usual[-1].steps))) is not None:
            laps.busy.append(share)
        if alone:
            laps.quiet.append(run(alone, count))
    return laps


def record_losses(rank: Rank, training: Conditions, course: Sequence[Lap], *, together: bool) -> None:
    """The loss after each lap, by the steps done until then: of ranks `together`, which see other data, the mean."""
    steps, losses = itertools.accumulate(len(each.steps) for each in course), [each.loss for each in course]
    if together:
        losses = [fmean(column) for column in zip(*everyones(rank, losses), strict=True)]
    if not together or rank.index == 0:
        rank.record_losses(training, dict(zip(steps, losses, strict=True)), WORLD if together else None)


def utilization(rank: Rank, computed: float) -> float | None:
    """The share of the time in which the GPU ran anything, as NVML has it right after a lap: of its last sample period,
    a sixth of a second to a second (nvml.h, nvmlUtilization_t). Of a CPU rank the part of a core that it `computed`."""
    if rank.gpu is None:
        return min(1.0, computed)
    with nvml.of_gpu(rank.gpu) as driver:
        percent = driver.ask(0, "utilization_percent")
    return None if isinstance(percent, Missing) else float(percent) / 100


def without_communication(module: nn.Module, step: Step) -> Step:
    def alone() -> Tensor:
        with without_sync(module):
            return step()

    return alone


def slowest_of(rank: Rank, seconds: Iterable[float]) -> list[float]:
    return list(map(max, zip(*everyones(rank, [*seconds]), strict=True)))


def communication_share(rank: Rank, conditions: Conditions, usual: Iterable[float], quiet: Iterable[float]) -> Reading:
    """By which part the slowest rank's step is longer with communication (`usual`, seconds) than without (`quiet`)."""
    with_it, without = slowest_of(rank, usual), slowest_of(rank, quiet)
    shares = tuple(max(0.0, 1 - alone / all_in) for all_in, alone in zip(with_it, without, strict=True))
    details = {"step": f"{ms(median(with_it))} with communication, {ms(median(without))} without"}
    return Reading("communication_share", median(shares), conditions, shares, WORLD, details)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


class WithLoss(nn.Module):
    """A network, its autocast and its loss as one module, so that the threads of DataParallel do all of it."""

    def __init__(self, network: nn.Module, training: Plan) -> None:
        super().__init__()
        self.network, self.autocast = network, training.autocast

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
            loss = nn.functional.cross_entropy(self.network(images), labels)
        return torch.stack([loss])  # DataParallel gathers along a dimension


@contextmanager
def returns_memory() -> Iterator[None]:
    """Give back to the GPU what a probe took, so that nobody after it finds the memory full."""
    yield
    release()


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # of a CPU rank nothing


@contextmanager
def precision(training: Plan, *, benchmark: bool = True) -> Iterator[None]:
    """The arithmetic of a plan, and whether cuDNN tries algorithms and takes the fastest."""
    search, tried, tf32 = benchmark and training.tried > 0, training.tried, training.tf32
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
    model = network(training, rank.device).to(memory_format=training.memory_format)
    return under("ddp" if together and rank.size > 1 else "", rank, WithLoss(model, training))


def synthetic_batch(rank: Rank, training: Plan) -> tuple[Tensor, Tensor]:
    """Images and labels, other ones on each rank."""
    torch.manual_seed(1 + rank.index)
    images = torch.randn(training.batch, 3, training.pixels, training.pixels, device=rank.device)
    labels = torch.randint(1000, (training.batch,), device=rank.device)
    return images.contiguous(memory_format=training.memory_format), labels


def eager(module: nn.Module, training: Plan, device: torch.device, *, fused: bool = True, batches: int = 1) -> FedStep:
    """A step as PyTorch runs it, one operation after the other."""
    parameters = list(module.parameters())
    optimizer = recipes.make_optimizer(training.optimizer, parameters, fused=fused and device.type == "cuda")
    if training.optimizer == "sgd":
        for parameter in parameters:
            # The fused kernel leaves its first momentum uninitialised when gradient scaling skips the first step.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(device.type, enabled=training.autocast is torch.float16)
    return fed(module, optimizer, scaler, batches)


def fed(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, batches: int = 1) -> FedStep:
    """Forward, backward and optimizer of a module that gives its loss. Ranks reduce once in so many `batches`."""
    count = 1  # DDP must have reduced once before it may leave it out

    def step(*batch: Tensor) -> Tensor:
        nonlocal count
        optimizer.zero_grad(set_to_none=True)
        for left in reversed(range(count)):
            with without_sync(module) if left else nullcontext():
                loss: Tensor = module(*batch).mean()
                scaler.scale(loss / count if count > 1 else loss).backward()  # type: ignore[no-untyped-call]
        count = batches
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def steps_of(rank: Rank, training: Plan, *, together: bool) -> tuple[Step, Step]:
    """A training step on a synthetic batch, and the same without communication, after which ranks differ."""
    images, labels = synthetic_batch(rank, training)
    if training.graph:
        return cuda_graph.steps(rank, network(training, rank.device), training, images, labels, together=together)
    module = module_of(rank, training, together=together)
    step = partial(eager(module, training, rank.device), images, labels)
    return step, without_communication(module, step)


def plan_of_all(rank: Rank, recipe: str, workload: Workload, **how: Any) -> Plan:
    """The plan for the GPU with the least memory, so that all ranks do the same."""
    own = recipes.plan(recipe, workload, rank.device, **how)
    return replace(own, batch=agree(rank, own.batch)) if rank.size > 1 else own


@returns_memory()
def train_throughput(
    rank: Rank, recipe: str, workload: Workload = recipes.USUAL, *, together: bool = True, closely: bool = False
) -> list[Reading]:
    """Images/s of a training loop: forward, loss, backward, optimizer; the median of three samples. `together`: all
    ranks train one model with DistributedDataParallel, and the figure is their sum at the pace of the slowest.
    Otherwise each GPU trains a model of its own at the same time, which a slow neighbour cannot pull down. `closely`:
    also what share of a step communication takes, and of the time in which each GPU is busy. ArithmeticError if
    the loss is not finite or does not fall, MemoryError if a batch that was asked for does not fit."""
    training = plan_of_all(rank, recipe, workload)
    ranks = rank.size if together else 1
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # for `details`
    conditions = training.conditions(ranks)
    try:
        with rank.phase(f"{training}, {ranks} rank(s)"), precision(training):
            step, alone = steps_of(rank, training, together=together)
            course = [lap(rank, step, each, together=together) for each in (1, training.warm_up)]
            quiet = alone if closely and ranks > 1 else None
            laps = sampled(rank, course, step, quiet, training.steps, together=together, busy=closely)
            record_losses(rank, conditions, course, together=together)
            if not training.kind:  # else it may be too few steps
                must_have_learned(course[0], laps.usual[-1])
    except torch.cuda.OutOfMemoryError as error:
        memory = torch.cuda.get_device_properties(rank.device).total_memory / GiB
        raise MemoryError(
            f"{training} does not fit into the {memory:.0f} GiB of this GPU: another process holds memory, or choose "
            "a smaller batch"
        ) from error
    about = details(rank, f"in {training.arithmetic}", course[0], laps.usual, laps.quiet)
    if rank.device.type == "cuda":
        tried = training.tried
        about["convolutions"] = f"by the fastest of {tried} algorithms" if tried else "as cuDNN's heuristics choose"
    readings = [throughput("train_throughput", ranks * training.batch, laps.usual, conditions, together, details=about)]
    if quiet:
        readings.append(communication_share(rank, conditions, *([each.mean for each in some] for some in laps[:2])))
    if closely and laps.busy:
        readings.append(Reading("train_utilization", median(laps.busy), conditions, tuple(laps.busy)))
    return readings


def throughput(
    metric: str, units: int, laps: Iterable[Lap], conditions: Conditions, together: bool, **more: Any
) -> Reading:
    """Images or tokens/s, of so many in a step: of all ranks `together`, or of this one ("solo_")."""
    rates = tuple(units / each.mean for each in laps)
    name, place = (metric, WORLD) if together else (f"solo_{metric}", None)
    return Reading(metric_under(name, conditions), median(rates), conditions, rates, place, **more)


def details(rank: Rank, how: str, first: Lap, usual: Sequence[Lap], quiet: Sequence[Lap] = ()) -> dict[str, Condition]:
    """What a throughput was computed with, that the network learned, and how long the steps of each rank took."""
    # Ranks that wait for each other show one time: without communication each shows its own.
    times = [median(seconds for each in some for seconds in each.steps) for some in (usual, quiet or usual)]
    memory, index = (torch.cuda.max_memory_allocated(), rank.gpu.index) if rank.gpu is not None else (0, rank.index)
    every = everyones(rank, [*times, memory, index, first.loss, usual[-1].loss])
    steps, own, memories, indices, before, after = zip(*every, strict=True)
    found: dict[str, Condition] = {"computed": how, "step": ms(median(steps))}
    if rank.size > 1:
        alone = " without communication" if quiet else ""
        who = f"{'rank' if rank.gpu is None else 'GPU'} {indices[own.index(max(own))]:.0f}"
        found["slowest"] = f"{who} with {ms(max(own))}{alone}, median {ms(median(own))}"
    found["loss"] = f"{fmean(before):.3g} at first, {fmean(after):.3g} in the end"
    if rank.gpu is not None:
        found["memory"] = f"{max(memories) / GiB:.1f} GiB a GPU"
    return found


# DDP: a copy of the network on every rank. FSDP: a part of its weights, their gradients and the optimizer's state.

# Newer versions of torch have renamed it.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def under(
    method: str, rank: Rank, module: nn.Module, parts: Iterable[nn.Module] = (), dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A module as `method` trains it: "ddp", "fsdp" by these parts in `dtype`, or alone. Over NVLink DDP has all
    gradients in one bucket: on 4x H200 (batch 512, amp, torch 2.11) scaling was 97.1 % against 96.4 % with the default
    of 25 MB, since the reductions take from the backward pass more than they hide. Over PCIe and between nodes, where a
    reduction takes long, it has the default, which overlaps them."""
    if method == "fsdp":
        return fully_sharded(rank, module, dtype, parts)
    if method != "ddp":
        return module
    linked = rank.gpu is not None and bool(rank.gpu.nvlinks_active)
    nodes, by_nvlink = zip(*everyones(rank, [rank.node, linked]), strict=True)  # all ranks must have the same buckets
    return DistributedDataParallel(
        module,
        device_ids=[rank.device] if rank.gpu is not None else None,
        process_group=rank.group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=300 if len({*nodes}) == 1 and all(by_nvlink) else 25,
        static_graph=True,
        **_NO_BUFFERS,
    )


def without_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Backward passes within this leave gradients on their rank; where ranks do not train by DDP nothing changes."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def fully_sharded(
    rank: Rank, model: nn.Module, dtype: torch.dtype = torch.float32, parts: Iterable[nn.Module] | None = None
) -> nn.Module:
    """`model` under FSDP, gathered by `parts` (by default its children), in `dtype`; gradients are reduced in fp32."""
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
    return dict(enumerate(whole.chunk(rank.size))).get(rank.index, whole[:0])


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: its shard under FSDP, else all of it."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()
