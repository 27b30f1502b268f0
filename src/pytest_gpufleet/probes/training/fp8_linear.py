"""A linear layer whose three products are computed in FP8, by torch's own scaled products.

As Micikevicius et al. 2022 (FP8 formats for deep learning, arXiv:2209.05433): activations and weights in E4M3,
gradients in E5M2, which has a wider range; each tensor is scaled so that its largest number is the largest that the
format holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NUMBERS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # of a largest number: a tensor of zeros is scaled too


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """functional.linear of x (..., inputs) in 16 bits and a weight (outputs, inputs) of any type; the result and the
    gradient of x have the type of x. All sizes are multiples of 16."""
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        scaled_x, scaled_weight = scaled(x, NUMBERS), scaled(weight, NUMBERS)
        context.save_for_backward(*scaled_x, *scaled_weight)
        context.dtype = weight.dtype
        return _product(scaled_x, _transposed(scaled_weight), x.dtype, fast=True)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, of_x, weight, of_weight = context.saved_tensors
        scaled_gradient = scaled(gradient, GRADIENTS)
        gradient_of_x = _product(scaled_gradient, (weight, of_weight), gradient.dtype)
        gradient_of_weight = _product(_transposed(scaled_gradient), (x, of_x), gradient.dtype)
        return gradient_of_x, gradient_of_weight.to(context.dtype)


def scaled(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in `dtype`, and what it is to be multiplied with: a number in float32 on the same device."""
    # The largest number comes to the largest of the format, up to the last bit of float32, which rounding takes away.
    most = torch.linalg.vector_norm(tensor.detach(), torch.inf)
    scale = most.float().clamp(min=LEAST) / torch.finfo(dtype).max
    # By a vector of one number, so that torch divides in float32 without a copy in float32 before.
    return (tensor / scale.view(1)).to(dtype), scale


def _transposed(scaled: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    numbers, scale = scaled
    return numbers.t(), scale


def _product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """left @ right. The product wants one by rows and the other by columns. `fast`: sums that are less exact, as
    forward passes use them and backward passes do not."""
    (a, of_a), (b, of_b) = left, right
    return torch._scaled_mm(
        a.contiguous(),
        b.t().contiguous().t(),
        scale_a=of_a,
        scale_b=of_b,
        out_dtype=dtype,
        use_fast_accum=fast and a.device.type == "cuda",
    )
