"""A linear layer whose three products are computed in FP8, by torch's own scaled products.

As Micikevicius et al. 2022 (FP8 formats for deep learning, arXiv:2209.05433): activations and weights in E4M3,
gradients in E5M2, which has a wider range; each tensor is scaled so that its largest number is the largest that the
format holds.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpufleet.probes.training import compile_cache, triton_needs

NUMBERS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # of a largest number: a tensor of zeros is scaled too
# Of the kernel. One H200 (torch 2.11, triton 3.6) scales 16384 x 4096 numbers of 16 bits in 74 us with it, in 74 to 90
# with other sizes; their bytes take 64.
TILE: Any = {"ROWS": 128, "COLUMNS": 128, "num_warps": 4}


class Scaled(NamedTuple):
    """A matrix in 8 bits. Products of FP8 want one side by rows and the other by columns, so it is there both ways."""

    numbers: Tensor  # (rows, columns)
    turned: Tensor  # (columns, rows)
    scale: Tensor  # what numbers are to be multiplied with: one in float32 on the same device


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """functional.linear of x (..., inputs) in 16 bits and a weight (outputs, inputs) of any type, which is rounded to
    that of x first; the result and the gradient of x have the type of x. All sizes are multiples of 16."""
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight.to(x.dtype))
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = scaled(x, NUMBERS), scaled(weight, NUMBERS)
        context.save_for_backward(of_x.turned, of_x.scale, of_weight.turned, of_weight.scale)
        return _product(of_x.numbers, of_x.scale, of_weight.numbers, of_weight.scale, x.dtype, fast=True)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale_of_x, weight, scale_of_weight = context.saved_tensors
        numbers, turned, scale = scaled(gradient, GRADIENTS)
        gradient_of_x = _product(numbers, scale, weight, scale_of_weight, gradient.dtype)
        gradient_of_weight = _product(turned, scale, x, scale_of_x, gradient.dtype)
        return gradient_of_x, gradient_of_weight


def scaled(tensor: Tensor, dtype: torch.dtype) -> Scaled:
    """The matrix in `dtype`, scaled so that its largest number is the largest of the format."""
    tensor = tensor.detach().contiguous()
    # Up to the last bit of float32, which rounding takes away. To divide takes the kernel three times as long.
    factor = torch.finfo(dtype).max / torch.linalg.vector_norm(tensor, torch.inf).float().clamp(min=LEAST)
    both_ways = _by_triton if _triton_agrees(tensor.device, tensor.dtype, dtype) else _by_torch
    return Scaled(*both_ways(tensor, factor, dtype), factor.reciprocal())


def _by_torch(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """tensor x factor in `dtype`, and that turned; slower than by Triton, in several steps."""
    numbers = (tensor.float() * factor).to(dtype)
    return numbers, numbers.t().contiguous()


def _by_triton(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from pytest_gpufleet.probes.training.fp8_kernels import scaled_both_ways

    rows, columns = tensor.shape
    numbers = torch.empty_like(tensor, dtype=dtype)
    turned = numbers.new_empty(columns, rows)
    tiles = -(-rows // TILE["ROWS"]), -(-columns // TILE["COLUMNS"])
    scaled_both_ways[tiles](tensor, factor, numbers, turned, rows, columns, **TILE)
    return numbers, turned


@cache
def _triton_agrees(device: torch.device, source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether Triton works here, and what it compiles for these types does what torch does.

    ptxas as it comes with Triton (12.8 with triton 3.6, 12.9 with 3.8) mixes up the bytes of such a kernel for Hopper
    (triton-lang/triton issue 11111): on an H200 all that is turned is wrong where the source is float32, and right
    where it has 16 bits; by ptxas 13.0, which comes with torch, both are right. A compiler's fault is none of the GPU,
    so nothing that it made is used unseen.
    """
    if device.type != "cuda" or triton_needs.missing() is not None:
        return False
    compile_cache.use(device)  # Triton's own place is in the home, which may be read-only or not there
    # Several tiles, and a part of one at each edge.
    rows, columns = 2 * TILE["ROWS"] + 16, 3 * TILE["COLUMNS"] + 48
    matrix = torch.randn(rows, columns, generator=torch.Generator(device).manual_seed(0), device=device).to(source)
    factor = torch.ones((), device=device)
    by_both = zip(_by_triton(matrix, factor, dtype), _by_torch(matrix, factor, dtype), strict=True)
    return all(torch.equal(ours.view(torch.uint8), torchs.view(torch.uint8)) for ours, torchs in by_both)


def scaled_by(device: torch.device, source: torch.dtype) -> str:
    """What scales tensors of this type here: it tells in the speed."""
    return "Triton" if all(_triton_agrees(device, source, dtype) for dtype in (NUMBERS, GRADIENTS)) else "torch"


def _product(
    a: Tensor, scale_of_a: Tensor, b: Tensor, scale_of_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """a @ b.t(), scaled. `fast`: sums that are less exact, as forward passes use them and backward passes do not."""
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_of_a, scale_b=scale_of_b, out_dtype=dtype, use_fast_accum=fast and a.is_cuda
    )
