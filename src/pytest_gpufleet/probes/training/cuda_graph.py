"""The fastest training steps: 16-bit weights, kernels of our own, one CUDA graph.

Parameters, gradients and optimizer state lie in one tensor each, so that the gradients are reduced by one all_reduce
and the optimizer is a handful of kernels. The optimizer works on float32 master weights; the network computes with a
16-bit copy of them, except BatchNorm, which uses the master weights themselves."""

import itertools
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_gpufleet.model.endings import not_applicable, not_judged
from pytest_gpufleet.probes.timing import captured, everyones
from pytest_gpufleet.probes.training.recipes import Plan, Step, make_optimizer, most_images
from pytest_gpufleet.world.world import Rank

# Small gradients would be zero in fp16. NVIDIA's for ResNet-50 (DeepLearningExamples): the sum of all ranks' has room.
LOSS_SCALE = 128.0
STEM_CHANNELS = 4  # of the images, the last one zero: tensor cores do not take three
ALIGNMENT = 64  # elements: kernels want a parameter to begin at a multiple of 16 bytes
WARM_UP = 5  # steps before a CUDA graph is captured, in which cuDNN makes its choices
COMPILERS = ("gcc", "clang")  # what Triton looks for where CC names none (triton/runtime/build.py)
# By which part what Triton compiles may differ from torch's operations. Rounding made 0.014: torch rounds more often.
ALIKE = 0.05


def steps(
    rank: Rank, network: nn.Module, plan: Plan, images: Tensor, labels: Tensor, *, together: bool
) -> tuple[Step, Step]:
    """A training step, and the same without all_reduce: CUDA graphs on GPUs. The network, in float32, is changed."""
    on_gpu = images.device.type == "cuda"
    if on_gpu:
        _use_kernels(rank, network, plan)
    group = rank.group if together and rank.size > 1 else None
    # A channel more, which is zero in images and so stays zero in weights.
    stem: Any = network.conv1
    stem.weight = nn.Parameter(nn.functional.pad(stem.weight.detach(), (0, 0, 0, 0, 0, STEM_CHANNELS - 3)))
    network.to(memory_format=plan.memory_format)
    padded = nn.functional.pad(images, (0, 0, 0, 0, 0, STEM_CHANNELS - 3))
    inputs = padded.to(plan.weights).contiguous(memory_format=plan.memory_format)
    flat = Flat(network, plan.weights)
    optimizer = make_optimizer(plan.optimizer, [flat.master], fused=on_gpu, capturable=on_gpu)
    unscale = torch.tensor([1 / (LOSS_SCALE * (group.size() if group is not None else 1))], device=images.device)
    loss = torch.zeros((), device=images.device)

    def train(communicate: bool) -> None:
        result = nn.functional.cross_entropy(network(inputs).float(), labels)
        computed = torch.autograd.grad(result * LOSS_SCALE, flat.parameters)
        for part in flat.parts:
            torch._foreach_copy_(flat.gradients[part], computed[part])
        if communicate and group is not None:
            dist.all_reduce(flat.gradient, group=group)
        torch.mul(flat.gradient, unscale, out=flat.master.grad)
        optimizer.step()
        flat.copy.copy_(flat.master.detach()[: flat.copy.numel()])
        loss.copy_(result.detach())

    # One pool of memory for both: neither leaves anything in it that the other could overwrite.
    pool = torch.cuda.graph_pool_handle() if on_gpu else None

    def step_of(work: Callable[[], None]) -> Step:
        # Captured at its first use, or not at all.
        ready = cache(lambda: captured(work, WARM_UP, pool).replay if on_gpu else work)

        def step() -> Tensor:
            ready()()
            return loss

        return step

    return step_of(partial(train, True)), step_of(partial(train, False))


def lacking() -> str | None:
    """What is missing of Triton, and for the C code by which it launches its kernels. None if nothing is."""
    if find_spec("triton") is None:
        return "the kernels of recipe peak need Triton, which torch for CUDA on Linux brings along"
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        return "Triton needs a C compiler: install gcc"
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").is_file():
        return "Triton needs the headers of Python: install python3-dev or python3-devel"
    return None


def _use_kernels(rank: Rank, network: nn.Module, plan: Plan) -> None:
    """Let a network train with kernels of our own, if they compute what torch does. A compiler's fault is none of the
    GPU: ptxas 12.8 and 12.9, of Triton 3.6 to 3.8, err in 8 bits on Hopper (triton-lang/triton issue 11111)."""
    if reason := lacking():
        not_applicable(reason)
    if plan.batch > (most := most_images(plan.pixels)):
        not_applicable(f"recipe {plan.name} takes batches of up to {most:,} images")
    # Triton's own place is in the home, which may be read-only or not there. This one goes with the rank.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(get_temp_dir(), "triton")))
    from pytest_gpufleet.probes.training import peak

    off = peak.off_torch(rank.device)
    if not any(each <= ALIKE for (each,) in everyones(rank, [off])):  # NaN is not
        not_judged(f"what Triton compiles here is {off:.1%} off what torch computes: install another version of Triton")
    if not off <= ALIKE:
        raise ArithmeticError(f"kernels are {off:.1%} off what torch computes here, and right on other GPUs")
    peak.fuse(network)


class Flat:
    """The parameters of a network, moved into flat tensors: first those that it uses in `dtype`, then BatchNorm's in
    float32. `parts`: slices of `parameters`, by dtype. `master`: all of them in float32; `copy`: the first part of it
    in `dtype`; `gradient`: of all, as it is reduced, and `gradients` the same by parameter."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        norms = [p for module in network.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()]
        exact = {id(p) for p in (norms if dtype != torch.float32 else network.parameters())}
        self.parameters = sorted(network.parameters(), key=lambda p: id(p) in exact)
        split = len(self.parameters) - len(exact)
        self.parts = [each for each in (slice(0, split), slice(split, None)) if self.parameters[each]]
        lengths = (-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in self.parameters)
        offsets = [0, *itertools.accumulate(lengths)]
        master = torch.zeros(offsets[-1], device=self.parameters[0].device)
        self.copy = master[: offsets[split]].to(dtype)
        self.gradient = torch.zeros_like(master, dtype=dtype)
        self.gradients = []
        with torch.no_grad():
            for index, (parameter, offset) in enumerate(zip(self.parameters, offsets, strict=False)):
                of_master, of_copy, of_gradient = (
                    flat.as_strided(parameter.shape, parameter.stride(), offset)
                    for flat in (master, self.copy if index < split else master, self.gradient)
                )
                of_master.copy_(parameter)
                of_copy.copy_(parameter)
                parameter.data = of_copy
                self.gradients.append(of_gradient)
        self.master = nn.Parameter(master)
        self.master.grad = torch.zeros_like(master)
