"""Triton kernels of BatchNorm, ReLU, residual add and max pooling, for 16-bit activations in channels_last.

Activations are matrices here: a row for each pixel of each image, a column for each channel. A tile is BLOCK_ROWS rows
of BLOCK_CHANNELS channels: 128 bytes in a row, so that every thread reads and writes 16 bytes at once. All sums are in
float32. The number of channels is a multiple of BLOCK_CHANNELS. NaN goes through ReLU and pooling, as with torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd import Function
from torchvision.models.resnet import Bottleneck, ResNet

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's names for what is known when it compiles


@triton.jit
def _place(channels, BLOCK_CHANNELS: tl.constexpr):
    """Which of all rows of tiles this program works on, of how many, and its channels. Neighbours work on the same
    rows: what is read at about the same time lies together."""
    columns = channels // BLOCK_CHANNELS
    column = tl.program_id(0) % columns * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return tl.program_id(0) // columns, tl.num_programs(0) // columns, column


@triton.jit
def _tile(row_of_tiles, column, rows, channels, BLOCK_ROWS: tl.constexpr):
    """Where the elements of a tile are, and which of its rows there are."""
    row = row_of_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row[:, None] * channels + column[None, :], (row < rows)[:, None]


@triton.jit
def sums(x, partial, rows, channels, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Of each channel, the sum and the sum of squares of the rows of this program."""
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    square = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    mine, programs, column = _place(channels, BLOCK_CHANNELS)
    for tile in tl.range(mine, tl.cdiv(rows, BLOCK_ROWS), programs, num_stages=3):
        at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        total += value
        square += value * value
    _store_sums(partial, mine, column, total, square, channels)


@triton.jit
def _store_sums(partial, part, column, first, second, channels):
    at = partial + part * 2 * channels + column
    tl.store(at, tl.sum(first, 0))
    tl.store(at + channels, tl.sum(second, 0))


@triton.jit
def _added_up(partial, parts, channels, BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Both sums of all programs."""
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    first = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
    second = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        at = part[:, None] * 2 * channels + column[None, :]
        there = (part < parts)[:, None]
        first += tl.load(partial + at, mask=there, other=0.0)
        second += tl.load(partial + at + channels, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0), column


@triton.jit
def statistics(
    partial, weight, bias, running_mean, running_var, about, parts, rows, channels, eps, momentum,
    BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """What normalises each channel. `about`: rows of scale, shift, mean and 1 / standard deviation."""
    total, square, column = _added_up(partial, parts, channels, BLOCK_PARTS, BLOCK_CHANNELS)
    mean = total / rows
    variance = square / rows - mean * mean
    variance = tl.where(variance < 0, 0.0, variance)
    inverse = 1 / tl.sqrt(variance + eps)
    scale = tl.load(weight + column) * inverse
    tl.store(about + column, scale)
    tl.store(about + channels + column, tl.load(bias + column) - mean * scale)
    tl.store(about + 2 * channels + column, mean)
    tl.store(about + 3 * channels + column, inverse)
    old_mean, old_var = tl.load(running_mean + column), tl.load(running_var + column)
    tl.store(running_mean + column, old_mean + momentum * (mean - old_mean))
    tl.store(running_var + column, old_var + momentum * (variance * (rows / (rows - 1)) - old_var))


@triton.jit
def normalise(
    x, identity, about, out, rows, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """x * scale + shift, what is to be added to it, and ReLU."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    scale, shift = tl.load(about + column)[None, :], tl.load(about + channels + column)[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * scale + shift
    if ADD:
        value += tl.load(identity + at, mask=there, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def gradient_sums(
    gradient, second, x, out, about, merged, partial, rows, channels,
    RELU: tl.constexpr, JUNCTION: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of each channel, the sum of the gradient behind ReLU and of its product with x.

    RELU: x alone decides what ReLU let through. JUNCTION: something was added before ReLU, so `out` decides; the
    gradient, of two parts if SECOND, is stored as one in `merged`.
    """
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    product = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    mine, programs, column = _place(channels, BLOCK_CHANNELS)
    if RELU:
        scale, shift = tl.load(about + column)[None, :], tl.load(about + channels + column)[None, :]
    for tile in tl.range(mine, tl.cdiv(rows, BLOCK_ROWS), programs, num_stages=3):
        at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        slope = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
        if RELU:
            slope = tl.where(value * scale + shift > 0, slope, 0.0)
        if JUNCTION:
            if SECOND:
                slope += tl.load(second + at, mask=there, other=0.0).to(tl.float32)
            through = tl.load(out + at, mask=there, other=0.0)
            slope = tl.where(through > 0, slope, 0.0).to(merged.dtype.element_ty)
            tl.store(merged + at, slope, mask=there)
            slope = slope.to(tl.float32)
        total += slope
        product += slope * value
    _store_sums(partial, mine, column, total, product, channels)


@triton.jit
def coefficients(
    partial, about, of_weight, of_bias, line, parts, rows, channels,
    BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias, and `line`: the gradient of x is scale * gradient + line[0] * x + line[1]."""
    total, product, column = _added_up(partial, parts, channels, BLOCK_PARTS, BLOCK_CHANNELS)
    scale, mean = tl.load(about + column), tl.load(about + 2 * channels + column)
    inverse = tl.load(about + 3 * channels + column)
    weight = (product - mean * total) * inverse
    tl.store(of_weight + column, weight)
    tl.store(of_bias + column, total)
    slope = -scale * inverse * weight / rows
    tl.store(line + column, slope)
    tl.store(line + channels + column, -scale * total / rows - slope * mean)


@triton.jit
def input_gradient(
    gradient, x, about, line, out, rows, channels,
    RELU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, of that behind ReLU (RELU) or of that of the normalised x."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    scale = tl.load(about + column)[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
    if RELU:
        slope = tl.where(value * scale + tl.load(about + channels + column)[None, :] > 0, slope, 0.0)
    result = slope * scale + value * tl.load(line + column)[None, :] + tl.load(line + channels + column)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def max_pool(
    x, out, taken, rows, channels, height, width,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """The largest of 3 x 3 pixels in steps of 2, padded by 1; `taken`: which of the nine, the first of equals.
    `height` and `width` of `out`, whose rows these are."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    image, y, z = row // (height * width), row // width % height, row % width
    best = tl.full([BLOCK_ROWS, BLOCK_CHANNELS], float("-inf"), tl.float32)
    which = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.int8)
    for tap in tl.static_range(9):
        above, left = 2 * y - 1 + tap // 3, 2 * z - 1 + tap % 3
        inside = (above >= 0) & (left >= 0) & (above < 2 * height) & (left < 2 * width) & (row < rows)
        pixel = (image * 2 * height + above) * 2 * width + left
        from_x = x + pixel[:, None] * channels + column[None, :]
        value = tl.load(from_x, mask=inside[:, None], other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        which = tl.where(better, tap, which).to(tl.int8)
    tl.store(out + at, best.to(out.dtype.element_ty), mask=there)
    tl.store(taken + at, which, mask=there)


@triton.jit
def max_pool_gradient(
    gradient, second, taken, out, rows, channels, height, width,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of the pixels that were pooled, whose rows these are: each lies in up to four windows. The gradient
    of what was pooled comes in two parts; `height` and `width` are of that."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    image, y, z = row // (4 * height * width), row // (2 * width) % (2 * height), row % (2 * width)
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    for window in tl.static_range(4):
        up, across = y // 2 + window // 2, z // 2 + window % 2
        from_up, from_left = y - 2 * up + 1, z - 2 * across + 1  # of this pixel, within the window
        inside = (from_up >= 0) & (from_left >= 0) & (up < height) & (across < width) & (row < rows)
        of = ((image * height + up) * width + across)[:, None] * channels + column[None, :]
        which = tl.load(taken + of, mask=inside[:, None], other=-1)
        value = tl.load(gradient + of, mask=inside[:, None], other=0.0).to(tl.float32)
        value += tl.load(second + of, mask=inside[:, None], other=0.0).to(tl.float32)
        total += tl.where(which == (from_up * 3 + from_left)[:, None], value, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


# A ResNet whose BatchNorm, ReLU, residual add and max pooling are kernels of our own, each at the speed of memory.
#
# Convolutions stay cuDNN's. A gradient that comes from two sides is added up in the kernel that sums it, reductions
# run at the rate of a copy, and nothing is compiled but eight small kernels.

# Of a tile, and how many programs there are for each multiprocessor. One H200 (torch 2.11, triton 3.6), batch 512: sums
# of 4.0 to 4.4 TB/s for all that is larger than the cache, where a copy makes 4.28.
TILE: Any = {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 64, "num_warps": 4}
PARTS: Any = {"BLOCK_PARTS": 64, "BLOCK_CHANNELS": 16, "num_warps": 4}
PROGRAMS = 4


def fuse(network: nn.Module) -> None:
    """Let a ResNet of bottlenecks on a GPU, in channels_last, train with these kernels."""
    assert isinstance(network, ResNet)
    for module in network.modules():
        if type(module) is Bottleneck:
            module.__class__ = _Bottleneck
    network.__class__ = _ResNet


def off_torch(device: torch.device) -> float:
    """By which part what these kernels compute on a device differs from what torch does: of a small stem and junction,
    forward and backward, the result that differs most."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device).half()
        return made.contiguous(memory_format=torch.channels_last)

    shape = (3, 128, 22, 14), (3, 128, 11, 7)  # rows that fill no tile, several columns of tiles
    x, identity, upstream = random(*shape[0]), random(*shape[1]), random(*shape[1])
    scales = 0.5 + torch.rand((4, 128), generator=generator, device=device)

    def results(train: Callable[[Tensor, Tensor, nn.BatchNorm2d, nn.BatchNorm2d], Tensor]) -> list[Tensor]:
        norms = [nn.BatchNorm2d(128, device=device) for _ in range(2)]
        weights = [parameter for norm in norms for parameter in norm.parameters()]
        for parameter, scale in zip(weights, scales, strict=True):
            parameter.data.copy_(scale)
        given = [each.clone().requires_grad_() for each in (x, identity)]
        out = train(given[0], given[1], norms[0], norms[1])
        out.backward(upstream)  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in (*given, *weights) if each.grad is not None]
        return [out.detach(), *gradients, *(buffer for norm in norms for buffer in norm.buffers() if buffer.dim())]

    by_both = zip(results(_with_kernels), results(_with_torch), strict=True)
    parts = [(ours.float() - torchs.float()).norm() / torchs.float().norm() for ours, torchs in by_both]
    return float(torch.stack(parts).max())  # NaN is the largest


def _with_kernels(x: Tensor, identity: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
    value, again = _MaxPool.apply(_norm(first, x, relu=True))
    joined: Pair = _Junction.apply(value, identity + again, second.weight, second.bias, second)
    return joined[0]


def _with_torch(x: Tensor, identity: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
    value = nn.functional.max_pool2d(first(x).relu(), 3, 2, 1)
    joined: Tensor = second(value) + (identity + value)
    return joined.relu()


# Whoever is used twice hands out a pair of itself: then the two gradients are not added up by a kernel of their own.
Pair = tuple[Tensor, Tensor]


class _ResNet(ResNet):  # type: ignore[misc]  # torchvision has no types
    def forward(self, images: Tensor) -> Tensor:
        pair: Pair = _MaxPool.apply(_norm(self.bn1, self.conv1(images), relu=True))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            pair = layer(pair)
        # A mean of rows has its gradient in channels_last; that of avgpool would be copied into it.
        result: Tensor = self.fc(pair[0].permute(0, 2, 3, 1).flatten(1, 2).mean(1))
        return result


class _Bottleneck(Bottleneck):  # type: ignore[misc]
    def forward(self, pair: Pair) -> Pair:
        value, identity = pair
        if self.downsample is not None:
            convolution, norm = self.downsample
            identity = _norm(norm, convolution(identity), relu=False)
        value = _norm(self.bn1, self.conv1(value), relu=True)
        value = _norm(self.bn2, self.conv2(value), relu=True)
        norm, value = self.bn3, self.conv3(value)
        joined: Pair = _Junction.apply(value, identity, norm.weight, norm.bias, norm)
        return joined


def _norm(module: nn.Module, x: Tensor, *, relu: bool) -> Tensor:
    result: Tensor = _Norm.apply(x, module.weight, module.bias, module, relu)
    return result


class _Norm(Function):
    """BatchNorm, and ReLU behind it. Running mean and variance are kept up, as torch does; the count of batches is not,
    since it says nothing where there is a momentum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: nn.BatchNorm2d, relu: bool) -> Tensor:
        about, out = _statistics(x, weight, bias, module), torch.empty_like(x)
        normalise[_tiles(x)](x, x, about, out, *_shape(x), ADD=False, RELU=relu, **TILE)
        ctx.save_for_backward(x, about)
        ctx.relu = relu
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, about = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        partial = _partial(x)
        gradient_sums[_programs(partial)](
            gradient, gradient, x, x, about, gradient, partial, *_shape(x),
            RELU=ctx.relu, JUNCTION=False, SECOND=False, **TILE,
        )  # fmt: skip
        return *_gradients(gradient, x, about, partial, relu=ctx.relu), None, None


class _Junction(Function):
    """BatchNorm of one branch, to which the other one is added, and ReLU; given out as a pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, identity: Tensor, weight: Tensor, bias: Tensor, module: nn.BatchNorm2d) -> Pair:
        about, out = _statistics(x, weight, bias, module), torch.empty_like(x)
        normalise[_tiles(x)](x, identity, about, out, *_shape(x), ADD=True, RELU=True, **TILE)
        ctx.save_for_backward(x, out, about)
        ctx.set_materialize_grads(False)  # of the last one, only one half is used
        return out, out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, out, about = ctx.saved_tensors
        given = [each.contiguous(memory_format=torch.channels_last) for each in gradients if each is not None]
        merged, partial = torch.empty_like(x), _partial(x)
        gradient_sums[_programs(partial)](
            given[0], given[-1], x, out, about, merged, partial, *_shape(x),
            RELU=False, JUNCTION=True, SECOND=len(given) == 2, **TILE,
        )  # fmt: skip
        of_x, of_weight, of_bias = _gradients(merged, x, about, partial, relu=False)
        return of_x, merged, of_weight, of_bias, None


class _MaxPool(Function):
    """Max pooling of 3 x 3 in steps of 2, of an even height and width; given out as a pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Pair:
        images, channels, height, width = x.shape
        out = _activations(x, images, channels, height // 2, width // 2)
        taken = torch.empty_like(out, dtype=torch.int8)
        max_pool[_tiles(out)](x, out, taken, *_shape(out), *out.shape[2:], **TILE)
        ctx.save_for_backward(taken)
        return out, out.view_as(out)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (taken,) = ctx.saved_tensors
        first, second = (each.contiguous(memory_format=torch.channels_last) for each in (first, second))
        images, channels, height, width = taken.shape
        out = _activations(first, images, channels, 2 * height, 2 * width)
        max_pool_gradient[_tiles(out)](first, second, taken, out, *_shape(out), height, width, **TILE)
        return out


def _activations(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _shape(x: Tensor) -> tuple[int, int]:
    """Rows and columns of activations as the kernels see them."""
    return x.numel() // x.shape[1], x.shape[1]


def _tiles(x: Tensor) -> tuple[int]:
    """A program for each tile."""
    rows, channels = _shape(x)
    return (-(-rows // TILE["BLOCK_ROWS"]) * (channels // TILE["BLOCK_CHANNELS"]),)


def _partial(x: Tensor) -> Tensor:
    """Room for the two sums of each program of those that sum: as many as the GPU runs at once, whatever the size."""
    rows, channels = _shape(x)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    most, columns = -(-rows // TILE["BLOCK_ROWS"]), channels // TILE["BLOCK_CHANNELS"]
    return x.new_empty((max(1, min(most, PROGRAMS * processors // columns)), 2, channels), dtype=torch.float32)


def _programs(partial: Tensor) -> tuple[int]:
    return (len(partial) * (partial.shape[2] // TILE["BLOCK_CHANNELS"]),)


def _statistics(x: Tensor, weight: Tensor, bias: Tensor, module: nn.BatchNorm2d) -> Tensor:
    """Scale, shift, mean and 1 / standard deviation of each channel; the module remembers what it does remember."""
    (rows, channels), partial = _shape(x), _partial(x)
    sums[_programs(partial)](x, partial, rows, channels, **TILE)
    about = x.new_empty((4, channels), dtype=torch.float32)
    statistics[(channels // PARTS["BLOCK_CHANNELS"],)](
        partial, weight, bias, module.running_mean, module.running_var, about, len(partial), rows, channels,
        module.eps, module.momentum, **PARTS,
    )  # fmt: skip
    return about


def _gradients(
    gradient: Tensor, x: Tensor, about: Tensor, partial: Tensor, *, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and bias."""
    rows, channels = _shape(x)
    of_weight, of_bias, line = about.new_empty(channels), about.new_empty(channels), about.new_empty((2, channels))
    coefficients[(channels // PARTS["BLOCK_CHANNELS"],)](
        partial, about, of_weight, of_bias, line, len(partial), rows, channels, **PARTS
    )
    of_x = torch.empty_like(x)
    input_gradient[_tiles(x)](gradient, x, about, line, of_x, rows, channels, RELU=relu, **TILE)
    return of_x, of_weight, of_bias
