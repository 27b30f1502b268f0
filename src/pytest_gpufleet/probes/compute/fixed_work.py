"""Fixed work on fixed data, and the hashes of what comes out: the fingerprint of a GPU.

All data are whole random numbers of torch's generator on the CPU, divided by powers of two: drawn and scaled without
rounding, they are the same bits on every machine. The work is made of what repeats to the bit: one stream, torch's
deterministic algorithms, no search for the fastest one. cuBLAS promises the same bits for the same version on GPUs of
one architecture with the same number of SMs (cuBLAS documentation, "Results Reproducibility"), cuDNN for the same
version and GPU (cuDNN documentation, "Reproducibility")."""

import ctypes
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pytest_gpufleet.machine.software import of_this_process, software
from pytest_gpufleet.model.events import Fingerprint, Part
from pytest_gpufleet.probes.collectives.table import type_name
from pytest_gpufleet.probes.comparison import bits
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.compute.corruption import kind
from pytest_gpufleet.probes.training.correctness import full_precision
from pytest_gpufleet.redaction import variable
from pytest_gpufleet.world.world import Rank, World

DIGITS = 23  # of a number behind the binary point: with its sign fp32 holds it exactly
# Tiles for every SM of a large GPU; and edges that are no multiples of a tile, but of the 16 that fp8 needs.
SHAPES: dict[str, tuple[rate.Shape, ...]] = {
    "cuda": ((4096, 4096, 4096), (1040, 2064, 528)),
    "cpu": ((64, 96, 128), (48, 80, 112)),
}
MATRIX = {"cuda": (4096, 4096), "cpu": (128, 192)}
IMAGES = {"cuda": (64, 64), "cpu": (4, 16)}  # how many, and their edge in pixels
STEPS = 4
CLASSES = 16
ELEMENTS = {"cuda": 4_000_037, "cpu": 10_007}
# Of whole numbers that a type holds: the sum of all ranks stays within, so no order of summing changes a bit.
SUMMED = {torch.float32: 24, torch.float16: 11}
# Variables by which libraries compute otherwise, of those that evidence has.
STEERING = re.compile(r"(CUBLAS|CUDNN|MKL|TORCH_(CUBLAS|CUDNN|BLAS))\w*|NVIDIA_TF32_OVERRIDE|LD_PRELOAD")

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": Tensor.sum,
    "sums of rows": lambda matrix: matrix.sum(1),
    "sums of columns": lambda matrix: matrix.sum(0),
    "softmax of rows": lambda matrix: matrix.softmax(1),
    "layer norm of rows": lambda matrix: functional.layer_norm(matrix, matrix.shape[1:]),
}

Job = tuple[str, str, Callable[[], Tensor]]  # name, hash of its data, and what does the work on the device


def fingerprints(world: World, work: str) -> list[Fingerprint]:
    return [Fingerprint(at, *each) for at, each in zip(world.places, world.run(_fingerprint, work), strict=True)]


def _fingerprint(rank: Rank, work: str) -> tuple[str, dict[str, str], dict[str, Part]]:
    parts = {}
    with repeatable():
        for name, inputs, compute in WORK[work](rank):
            with rank.phase(name):
                first, again = (compute() for _ in range(2))
                parts[name] = Part(inputs, _hash(first) if torch.equal(bits(first), bits(again)) else "")
    return kind(rank.device), _software(rank.device), parts


@contextmanager
def repeatable() -> Iterator[None]:
    """Work that gives the same bits each time. What is left behind, ranks put back before the next test. Each stream of
    a process has a workspace of its own for cuBLAS, which torch gives it; with that cuBLAS repeats to the bit. torch
    looks for CUBLAS_WORKSPACE_CONFIG all the same, once, at the first matmul of a process: too early to set it here, so
    without it torch may only warn. What warns and does not repeat is found by doing it twice."""
    torch.set_deterministic_debug_mode("warn")
    torch.set_num_threads(1)
    with warnings.catch_warnings(), full_precision(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def whole(most: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def fixed(*shape: int, seed: int) -> Tensor:
    """From -1 to 1."""
    return whole(1 << DIGITS, *shape, seed=seed).float() / (1 << DIGITS)


def products(rank: Rank) -> Iterator[Job]:
    def multiplied(precision: str, *matrices: Tensor) -> Tensor:
        a, b = (matrix.to(rate.PRECISIONS[precision].dtype) for matrix in matrices)
        with rate.strictly(precision):
            return rate.multiplication(precision, a, b.t())()

    for m, n, k in SHAPES[rank.device.type]:
        a, b = fixed(m, k, seed=0), fixed(n, k, seed=1)
        inputs, on_device = _hash(a, b), (a.to(rank.device), b.to(rank.device))
        for precision in rate.precisions_of(rank):
            yield f"{precision} product {m} x {n} x {k}", inputs, partial(multiplied, precision, *on_device)


def reductions(rank: Rank) -> Iterator[Job]:
    """Sums and what is made of them, on one device."""
    matrix = fixed(*MATRIX[rank.device.type], seed=2)
    inputs = _hash(matrix)
    for dtype in (torch.float32, torch.bfloat16):
        on_device = matrix.to(rank.device).to(dtype)
        for name, reduce in REDUCTIONS.items():
            yield f"{name}, {type_name(dtype)}", inputs, partial(reduce, on_device)


def training(rank: Rank) -> Iterator[Job]:
    """Steps of training on one device: the losses, and the weights at the end."""
    count, edge = IMAGES[rank.device.type]
    shapes = ((32, 3, 3, 3), (64, 32, 3, 3), (CLASSES, 64 * (edge // 4) ** 2))
    weights = [fixed(*shape, seed=3 + number) / 8 for number, shape in enumerate(shapes)]
    images, labels = fixed(count, 3, edge, edge, seed=6), whole(CLASSES, count, seed=7).abs().long() % CLASSES
    inputs = _hash(*weights, images, labels)

    def trained(dtype: torch.dtype) -> Tensor:
        first, second, last = own = [nn.Parameter(each.to(rank.device, dtype, copy=True)) for each in weights]
        on_device, wanted = images.to(rank.device).to(dtype), labels.to(rank.device)
        optimizer = torch.optim.SGD(own, lr=0.0625, momentum=0.5)
        losses = []
        for _ in range(STEPS):
            hidden = functional.conv2d(on_device, first, stride=2, padding=1).relu()
            hidden = functional.conv2d(hidden, second, stride=2, padding=1).relu()
            loss = functional.cross_entropy(functional.linear(hidden.flatten(1), last).float(), wanted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        return torch.cat([torch.stack(losses), *(each.detach().float().flatten() for each in own)])

    for precision in (each for each in ("fp32", "bf16") if each in rate.precisions_of(rank)):
        yield f"{STEPS} steps of training, {precision}", inputs, partial(trained, rate.PRECISIONS[precision].dtype)


def all_reduce(rank: Rank) -> Iterator[Job]:
    """Sums of all ranks that are exact, so that no algorithm, protocol or order of NCCL changes a bit of them."""

    def summed(own: Tensor) -> Tensor:
        dist.all_reduce(result := own.clone(), group=rank.group)
        return result

    for dtype, digits in SUMMED.items():
        most = max((1 << digits) // rank.size, 1)
        each = [whole(most, ELEMENTS[rank.device.type], seed=8 + index) for index in range(rank.size)]
        own = each[rank.index].to(rank.device).to(dtype)
        yield f"all_reduce of {rank.size} ranks, {type_name(dtype)}", _hash(*each), partial(summed, own)


WORK = {each.__name__: each for each in (products, reductions, training, all_reduce)}


def _hash(*tensors: Tensor) -> str:
    return sha256(b"".join(bits(tensor).cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def _software(device: torch.device) -> dict[str, str]:
    """Of NCCL nothing: what it sums here is exact in any way of summing."""
    versions = {name: version for name, version in software().items() if name != "nccl" and version}
    if device.type == "cuda":
        versions["cublas"] = _cublas()
    steering = {name: value for name, value in of_this_process().items() if STEERING.fullmatch(name)}
    return {**versions, **{name: variable(name, value) for name, value in steering.items()}}


def _cublas() -> str:
    """The version of the cuBLAS that torch has loaded, as 120806 for 12.8.6, where it is no part of another library."""
    try:
        library: Any = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(library.cublasLtGetVersion())
    except (OSError, AttributeError):
        return "unknown"
