"""ResNet-50 trains as fast as on a healthy machine of this model, on one GPU and on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pytest_gpufleet import (
    WORLD,
    Gpu,
    Judge,
    Measurement,
    Size,
    World,
    expect_none,
    measure,
    measure_all,
    not_applicable,
    scaling_efficiency,
)
from pytest_gpufleet.model.place import BF16_SINCE
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.probes.training import recipes, ways
from pytest_gpufleet.probes.training.loop import train_throughput

pytestmark = pytest.mark.chapter("ResNet-50", "How fast is real training, on one GPU and on all?")

# Figures of these recipes were published for most models; the others are judged where somebody has a limit for them.
PUBLISHED = ("tf32", "amp")
SOME_GPUS = (2, 4)
SEARCHING_SECONDS = 900

since_ampere = pytest.mark.needs(capability=(8, 0))
PHOTOS = Size(256, rehearsal=16)
# The sweep: methods at one batch of each GPU, batches by DDP, and batches a step of the smallest of these.
METHODS = Size(("dp", "ddp", "fsdp"), rehearsal=("ddp", "fsdp"))  # DataParallel is for GPUs only
BATCH = Size(256, rehearsal=4)
BATCHES = Size((64, 128, 256, 512, 1024), rehearsal=(2, 4))
ACCUMULATED = Size((1, 2, 4, 8), rehearsal=(1, 2))
FULL_MEMORY_SECONDS = 20


@pytest.fixture(scope="module")
def resnet(pytestconfig: pytest.Config) -> recipes.Workload:
    """What was asked of these checks. A figure of work that is not the usual one needs a limit that names it, so that
    easier work buys no acceptance."""
    return recipes.Workload(
        model=pytestconfig.getoption("resnet_model"),
        batch=pytestconfig.getoption("resnet_batch"),
        steps=pytestconfig.getoption("resnet_steps"),
        warm_up=pytestconfig.getoption("resnet_warm_up"),
        optimizer=pytestconfig.getoption("resnet_optimizer"),
    )


@pytest.fixture(scope="module")
def alone(nccl_group: World, resnet: recipes.Workload) -> Callable[..., Measurement]:
    """alone(recipe): what each GPU reaches by itself, all at the same time. It is measured once, whichever check asks
    first, and another time by alone(recipe, again=True)."""
    measured = partial(measure, nccl_group, train_throughput, workload=resnet, together=False)
    first = cache(measured)
    return lambda recipe, again=False: measured(recipe) if again else first(recipe)


@pytest.mark.level("standard")
@pytest.mark.figures("solo_train_throughput", required=("solo_train_throughput",))
def test_each_gpu_alone(judge: Judge, alone: Callable[..., Measurement]) -> None:
    """ResNet-50 throughput of each GPU alone

    All GPUs train at the same time, each its own network. GPUs that train together run at the pace of the slowest, so
    only this check shows which one it is. A GPU that is slower than its peers is hot, power-capped, in a slow slot or
    used by another process: compare `nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE`.
    """
    judge(alone("amp"), again=lambda: alone("amp", again=True))


@pytest.mark.level("standard")
@pytest.mark.figures(
    "train_throughput",
    "train_utilization",
    of_several=("solo_train_throughput", "scaling_efficiency", "communication_share"),
    required=("train_throughput", "solo_train_throughput", "scaling_efficiency"),
    of="for the recipes tf32 and amp",
)
@pytest.mark.parametrize(
    "recipe", ["fp32", pytest.param("tf32", marks=since_ampere), "amp", pytest.param("bf16", marks=since_ampere)]
)
def test_throughput_and_scaling(
    nccl_group: World,
    judge: Judge,
    fleet_level: str,
    resnet: recipes.Workload,
    alone: Callable[..., Measurement],
    recipe: str,
) -> None:
    """ResNet-50 throughput of all GPUs, and scaling

    Scaling is the throughput of all GPUs together, of the sum of what each reaches alone, so a slow GPU does not lower
    it. Low on a GPU alone already: see the check of each GPU alone. Low together only: communication (see the bandwidth
    checks), or the host holds the GPUs back (too few cores, CPU governor, another load), and then the GPUs are not busy
    all the time.
    """
    if fleet_level != "burnin" and recipe in longer(nccl_group.gpus):
        not_applicable(f"on this GPU model the recipe {recipe} is part of level burnin")
    some = SOME_GPUS if recipe == "amp" or fleet_level == "burnin" else ()
    _judge(judge, partial(_scaling, nccl_group, resnet, recipe, some, alone), required=recipe in PUBLISHED)


@pytest.mark.level("burnin")
@pytest.mark.needs(capability=(8, 0))  # the hardware that Triton supports, by its README
@pytest.mark.figures(
    "train_throughput",
    "train_utilization",
    of_several=("solo_train_throughput", "scaling_efficiency", "communication_share"),
)
def test_peak_throughput_and_scaling(
    nccl_group: World, judge: Judge, resnet: recipes.Workload, alone: Callable[..., Measurement]
) -> None:
    """ResNet-50 peak throughput, and scaling

    16-bit weights, fused Triton kernels and one CUDA graph for the whole step, so the GPUs never wait for the host. Low
    while the other recipes are right: power or memory clocks under the heaviest load; see the burn-in. The kernels are
    compared with torch on every GPU first; a GPU on which only they differ is suspect.
    """
    _judge(judge, partial(_scaling, nccl_group, resnet, "peak", SOME_GPUS, alone), required=False)


@pytest.mark.level("burnin")
@pytest.mark.host_alone
@pytest.mark.figures("loader_throughput")
def test_training_fed_by_a_data_loader(
    nccl_group: World, judge: Judge, resnet: recipes.Workload, pytestconfig: pytest.Config
) -> None:
    """ResNet-50 throughput on JPEG files

    Shows whether the host decodes images as fast as the GPUs train. Host-bound is common and no defect. Much lower than
    on a machine of the same kind: CPU governor, too few cores for this container, a small /dev/shm. `--resnet-workers
    N` shows whether more loader processes help.
    """
    workers = pytestconfig.getoption("resnet_workers")
    with TemporaryDirectory(prefix="gpufleet-photos-") as folder:
        ways.write_photos(Path(folder), PHOTOS.on(nccl_group))
        fed = partial(measure, nccl_group, ways.fed_throughput, folder, "amp", resnet, workers=workers)
        judge(fed, required=False)


@pytest.mark.level("burnin")
@pytest.mark.figures(
    "solo_train_throughput", "train_memory", of_several=("train_throughput", "scaling_efficiency"), peers=None
)
def test_training_sweep(nccl_group: World, judge: Judge, resnet: recipes.Workload) -> None:
    """ResNet-50 sweep by method, GPUs, batch and accumulation

    For information: throughput, efficiency and memory of DataParallel, DDP and FSDP, of small and large batches, and of
    accumulated gradients, on each GPU alone and on several. Small batches lose to the all_reduce of the gradients and
    to the host. No shipped limit applies.
    """
    recipe = "bf16" if has_bf16(nccl_group.gpus) else "fp32"
    trained = partial(measure_all, timeout=SEARCHING_SECONDS, recipe=recipe, workload=resnet)
    alone: dict[tuple[int, int], Measurement] = {}
    for way in ways_of_sweep(nccl_group, resnet, recipe):
        work = way.batch, way.accumulated
        if work not in alone:
            alone[work], *memory = trained(nccl_group, ways.throughput_of, way)
            judge(alone[work], *memory, required=False)
        for count in several(nccl_group):
            ranks = nccl_group.subset([0] if way.method == "dp" else range(count))
            together, *memory = trained(ranks, ways.throughput_of, way, places=nccl_group.places[:count])
            judge(together, *memory, scaling_efficiency(alone[work], together), required=False)


@pytest.mark.level("burnin")
@pytest.mark.needs(gpus=True)
@pytest.mark.fresh_world  # DataParallel has left something of rank 0 on every GPU
@pytest.mark.figures("train_throughput", "train_memory")
def test_training_in_full_memory(nccl_group: World, judge: Judge, resnet: recipes.Workload) -> None:
    """ResNet-50 with 95 % of GPU memory in use

    Uses memory that small jobs never reach, and checks that it is free again afterwards. Out of memory during training:
    another process took memory meanwhile. Memory that does not come back is held by a process that should not be there:
    `nvidia-smi` lists them.
    """
    every = nccl_group.run(ways.fill_memory, "tf32", resnet, seconds=FULL_MEMORY_SECONDS, timeout=SEARCHING_SECONDS)
    readings, troubles = zip(*every, strict=True)
    judge(*together(nccl_group, readings), required=False)
    expect_none(nccl_group.faults("memory_occupied", ["; ".join(each) for each in troubles]))


def ways_of_sweep(world: World, resnet: recipes.Workload, recipe: str) -> list[ways.Way]:
    """The ways of the sweep, each once. Batches for which a GPU has too little memory are left out."""
    usual = resnet.batch or BATCH.on(world)
    smallest, *larger = BATCHES.on(world)
    found = [
        *(ways.Way("ddp", batch) for batch in (smallest, *larger)),
        *(ways.Way("ddp", smallest, batches) for batches in ACCUMULATED.on(world)),
        *(ways.Way(method, usual) for method in METHODS.on(world)),
    ]
    known = [gpu.memory_bytes for gpu in world.gpus if gpu.memory_bytes]
    most = recipes.fitting(recipe, resnet.model, min(known)) if known else math.inf
    return [way for way in dict.fromkeys(found) if way.batch <= most]


def several(world: World) -> list[int]:
    """2, 4, ... and all GPUs; none of one."""
    return [*(count for count in SOME_GPUS if count < world.size), *([world.size] if world.size > 1 else [])]


def has_bf16(gpus: Sequence[Gpu]) -> bool:
    """Whether all have bf16 and TF32, which came with the same GPUs."""
    known = [gpu.compute_capability >= BF16_SINCE for gpu in gpus if gpu.compute_capability]
    return bool(known) and all(known)


def longer(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The recipes for which level standard has no time: they use the same parts of a GPU as tf32 and amp."""
    return ("bf16", "fp32") if has_bf16(gpus) else ("bf16",)


Figures = tuple[list[Measurement], list[Measurement]]


def _judge(judge: Judge, measured: Callable[..., Figures], required: bool) -> None:
    figures, shown = measured()

    def again() -> list[Measurement]:
        figures, shown[:] = measured(again=True)
        return [*figures, *shown]

    judge(*figures, shown=shown, required=required, again=again, on_miss=lambda: _communication(shown))


def _scaling(
    nccl_group: World,
    resnet: recipes.Workload,
    recipe: str,
    some_gpus: Iterable[int],
    alone: Callable[..., Measurement],
    again: bool = False,
) -> Figures:
    """Throughput on each GPU alone and on all together, with scaling efficiency; and, to be shown, the share of
    communication, how busy each GPU is, and the same for some of the GPUs: as many as `some_gpus` says, where that is
    fewer than all."""
    size = nccl_group.size
    if size == 1:
        one, *details = measure_all(nccl_group, train_throughput, recipe, resnet, closely=True)
        return [one], details
    # All first: then every rank has tried cuDNN's algorithms at the same time.
    every, *details = measure_all(nccl_group, train_throughput, recipe, resnet, closely=True)
    each_alone = alone(recipe, again)
    counts = [count for count in some_gpus if count < size]
    some = [measure(nccl_group.subset(range(count)), train_throughput, recipe, resnet) for count in counts]
    between = [measurement for each in some for measurement in (each, scaling_efficiency(each_alone, each))]
    return [each_alone, every, scaling_efficiency(each_alone, every)], [*details, *between]


def _communication(measurements: Iterable[Measurement]) -> str:
    shares = (each.values[WORLD] for each in measurements if each.metric == "communication_share")
    return "".join(f"Of a step on all GPUs {share:.1%} is communication." for share in shares)
