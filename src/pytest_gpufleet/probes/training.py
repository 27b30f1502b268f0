"""ResNet-50 v1.5 training on synthetic data that stays on the device: what a GPU can do when nothing holds it up."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.probes.reading import WORLD, Reading
from pytest_gpufleet.world.rank import Rank

SAMPLES = 3


@dataclass(frozen=True)
class Recipe:
    """How the network is trained; a throughput without its recipe means nothing."""

    dtype: torch.dtype  # float16: autocast with gradient scaling
    tf32: bool
    memory_format: torch.memory_format
    batch: int  # images a rank and step, halved until they fit into the GPU's memory
    bytes_per_image: float
    warm_up: int
    steps: int  # a sample


RECIPES = {
    "fp32": Recipe(
        torch.float32,
        tf32=False,
        memory_format=torch.contiguous_format,
        batch=64,
        bytes_per_image=90e6,
        warm_up=10,
        steps=15,
    ),
    "tf32": Recipe(
        torch.float32,
        tf32=True,
        memory_format=torch.contiguous_format,
        batch=128,
        bytes_per_image=90e6,
        warm_up=10,
        steps=20,
    ),
    "amp": Recipe(
        torch.float16,
        tf32=True,
        memory_format=torch.channels_last,
        batch=1024,
        bytes_per_image=45e6,
        warm_up=10,
        steps=15,
    ),
}

# On CPU ranks a small network and few steps stand in; the conditions of the figure say so.
MODELS = {"cuda": ("resnet50", 224), "cpu": ("resnet18", 64)}
REHEARSAL: dict[str, Any] = {"batch": 8, "warm_up": 1, "steps": 2}


def _bucket_megabytes(rank: Rank) -> int:
    """DDP's bucket size. Over NVLink all gradients in one: on 4x H200 (batch 512, amp, torch 2.11) scaling was 97.1 %
    against 96.4 % with the default of 25 MB, since the reductions take from the backward pass more than they hide.
    Over PCIe, where a reduction takes long, the default, which overlaps them."""
    return 128 if rank.gpu is not None and rank.gpu.nvlinks_active else 25


def _fitted(recipe: Recipe, device: torch.device) -> Recipe:
    if device.type == "cpu":
        return replace(recipe, **REHEARSAL)
    room = 0.8 * torch.cuda.get_device_properties(device).total_memory
    batch = recipe.batch
    while batch * recipe.bytes_per_image > room:
        batch //= 2
    return replace(recipe, batch=batch)


def train_throughput(rank: Rank, recipe_name: str, *, together: bool = True) -> Reading:
    """Images/s of a training loop: forward, loss, backward, SGD with momentum.

    `together`: all ranks train one model with DistributedDataParallel, and the figure is their sum at the pace of the
    slowest. Otherwise each GPU trains a model of its own at the same time and has a figure of its own, which a slow
    neighbour cannot pull down. Median of three samples. Raises FloatingPointError if the loss is not finite: a
    throughput of wrong arithmetic is none.
    """
    on_gpu = rank.device.type == "cuda"
    recipe = _fitted(RECIPES[recipe_name], rank.device)
    architecture, pixels = MODELS[rank.device.type]
    half = recipe.dtype != torch.float32
    ranks = rank.size if together else 1

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(architecture).to(rank.device, memory_format=recipe.memory_format)
    if ranks > 1:
        model = DistributedDataParallel(
            model,
            device_ids=[rank.device] if on_gpu else None,
            process_group=rank.group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_bucket_megabytes(rank),
            broadcast_buffers=False,
            static_graph=True,
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=on_gpu)
    for parameter in model.parameters():
        # The fused kernel leaves its first momentum uninitialised when gradient scaling skips the first step.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(rank.device.type, enabled=half and on_gpu)
    criterion = nn.CrossEntropyLoss()
    shape = (recipe.batch, 3, pixels, pixels)
    images = torch.randn(shape, device=rank.device).contiguous(memory_format=recipe.memory_format)
    labels = torch.randint(1000, (recipe.batch,), device=rank.device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(rank.device.type, torch.float16) if half and on_gpu else nullcontext():
            loss: torch.Tensor = criterion(model(images), labels)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def run(steps: int) -> float:
        """Seconds for so many steps."""
        if ranks > 1:
            dist.all_reduce(torch.zeros(1, device=rank.device), group=rank.group)  # start together
        loss = torch.zeros(())
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        if on_gpu:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
        if not loss.isfinite():
            raise FloatingPointError(f"the loss became {loss.item()} in training {architecture}, recipe {recipe_name}")
        return elapsed

    precision = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = recipe.tf32
    try:
        with (
            rank.phase(f"{architecture}, recipe {recipe_name}, batch {recipe.batch}, {ranks} rank(s)"),
            torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=recipe.tf32),
        ):
            run(recipe.warm_up)
            samples = tuple(ranks * recipe.batch * recipe.steps / run(recipe.steps) for _ in range(SAMPLES))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = precision
    return Reading(
        metric="train_throughput" if together else "solo_train_throughput",
        value=median(samples),
        samples=samples,
        conditions={
            "model": architecture,
            "recipe": recipe_name,
            "ranks": ranks,
            "batch": recipe.batch,
            "image": pixels,
        },
        place=WORLD if together else None,
    )
