"""How the networks are trained: recipes by name, and the work that is given to a GPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_gpufleet.model.conditions import Condition

Step = Callable[[], torch.Tensor]  # one step of training; returns the loss


@dataclass(frozen=True)
class Plan:
    """How a network is trained: a recipe, and from `model` on what a device was asked for."""

    name: str  # of the recipe
    arithmetic: str  # in words
    batch: int  # images a GPU and step, halved until they fit into the GPU's memory
    megabytes_per_image: float  # of ResNet-50
    warm_up: int
    steps: int  # a sample: 0.6 to 1.2 s on an H200, of which healthy ones differ by 1 %
    autocast: torch.dtype | None = None  # float16: with gradient scaling
    weights: torch.dtype = torch.float32  # of all layers but BatchNorm; float32 master weights stand behind others
    tf32: bool = False
    # Algorithms, of which cuDNN takes the fastest; 0: it says which one should be. With torch 2.11 and cuDNN 9.19 the
    # first search of a user takes 8 to 15 s, in which NVRTC compiles all plans. It gains fp32 8 % (H200, of 10 and of
    # 4), amp 0.2 % (H100: 5,210 for 5,201 images/s) and tf32 nothing (H200: 2,144).
    tried: int = 4
    memory_format: torch.memory_format = torch.contiguous_format
    graph: bool = False  # flat parameters, kernels of our own, the whole step a CUDA graph: see cuda_graph.py
    model: str = "resnet50"
    pixels: int = 224
    optimizer: str = "sgd"
    kind: str = ""  # of workload; empty for the one that limits are made for

    def conditions(self, ranks: int) -> dict[str, Condition]:
        """What the figure depends on. A limit that does not name the kind of workload is not meant for another one."""
        size: dict[str, Condition] = {"ranks": ranks, "batch": self.batch, "image": self.pixels}
        optimizer = {} if self.optimizer == "sgd" else {"optimizer": self.optimizer}
        kind = {"workload": self.kind} if self.kind else {}
        return {"model": self.model, "recipe": self.name, **size, **optimizer, **kind}

    def __str__(self) -> str:
        return f"{self.model}, recipe {self.name}, batch {self.batch}, {self.optimizer}"


_FP32 = Plan("fp32", "fp32 without TF32, NCHW", 64, 90, warm_up=10, steps=15, tried=10)
_TF32 = replace(_FP32, name="tf32", arithmetic="TF32, NCHW", batch=128, steps=10, tf32=True, tried=0)
_AMP = Plan(
    "amp", "fp16 autocast, gradient scaling, channels_last", 1024, 45, warm_up=6, steps=5, autocast=torch.float16,
    tf32=True, tried=0, memory_format=torch.channels_last,
)  # fmt: skip
_BF16 = replace(_AMP, name="bf16", arithmetic="bf16 autocast, channels_last", autocast=torch.bfloat16, tried=4)
# The fastest that is known, for torchvision's bottlenecks on GPUs that Triton compiles for.
KERNELS = "Triton kernels for BatchNorm, ReLU, add and max pooling, CUDA graph of the whole step, channels_last"
_PEAK = replace(
    _BF16, name="peak", arithmetic=f"fp16 weights with fp32 master weights, fp32 BatchNorm, {KERNELS}",
    warm_up=15, steps=10, autocast=None, weights=torch.float16, graph=True,
)  # fmt: skip
RECIPES = {each.name: each for each in (_FP32, _TF32, _AMP, _BF16, _PEAK)}

# The networks (torchvision's, with the stride of v1.5) and their memory for an image, of that of ResNet-50.
MODELS = {"resnet50": 1.0, "resnet101": 1.5, "resnet152": 2.1}

# On CPU ranks: smaller than any of torchvision's, ResNet-18 with one block a stage. The conditions of figures say so.
REHEARSAL_MODEL = "resnet10"
REHEARSAL: dict[str, Any] = {
    "arithmetic": "fp32", "model": REHEARSAL_MODEL, "pixels": 32, "batch": 8, "warm_up": 1, "steps": 1,
    "tf32": False, "autocast": None, "weights": torch.float32,
}  # fmt: skip

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 1e-2}),
}


def make_optimizer(
    name: str, parameters: Iterable[torch.Tensor], *, fused: bool, capturable: bool = False
) -> torch.optim.Optimizer:
    """An optimizer for `parameters`; `capturable`: for use in a CUDA graph."""
    make, settings = OPTIMIZERS[name]
    extra = {"capturable": True} if capturable and name != "sgd" else {}  # SGD always is
    return make(parameters, fused=fused, **settings, **extra)


@dataclass(frozen=True)
class Workload:
    """What may be asked of a training run. None: as the recipe has it, as far as it fits into the GPU's memory."""

    model: str = "resnet50"
    batch: int | None = None  # images a GPU
    steps: int | None = None  # a sample
    warm_up: int | None = None  # at least one: DDP must have reduced once before it may leave it out
    optimizer: str = "sgd"


USUAL = Workload()


def most_images(pixels: int) -> int:
    """The largest batch: kernels, several of torch's too, count elements in 32 bits, of which a ResNet's first
    convolution makes most, 64 channels of half the pixels in each direction."""
    return (2**31 - 1) // (64 * (pixels // 2) ** 2)


def fitting(name: str, model: str, memory: float) -> int:
    """So many images fit into so many bytes of GPU memory when a model is trained by a recipe, as far as is known."""
    return int(0.8 * memory / (RECIPES[name].megabytes_per_image * MODELS[model] * 1e6))


def plan(name: str, workload: Workload, device: torch.device, kind: str = "", most: int | None = None) -> Plan:
    """The training that a device is given for a recipe. `kind` of workload, if it is not the one that limits are made
    for; at `most` so many images a GPU, unless a batch was asked for."""
    on_cpu = device.type == "cpu"
    made = replace(RECIPES[name], **{"model": workload.model, **(REHEARSAL if on_cpu else {})})
    batch = made.batch
    while not on_cpu and batch > fitting(name, made.model, torch.cuda.get_device_properties(device).total_memory):
        batch //= 2
    return replace(
        made,
        batch=workload.batch or min(batch, most or batch),
        steps=workload.steps or made.steps,
        warm_up=workload.warm_up or made.warm_up,
        optimizer=workload.optimizer,
        kind=kind or ("" if workload == USUAL else "custom"),
    )
