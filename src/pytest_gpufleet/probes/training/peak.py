"""A ResNet whose BatchNorm, ReLU, residual add and max pooling are kernels of our own, each at the speed of memory.

Convolutions stay cuDNN's. A gradient that comes from two sides is added up in the kernel that sums it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torchvision.models.resnet import Bottleneck, ResNet

from pytest_gpufleet.probes.training import peak_kernels

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
    """By which part these kernels differ from torch, at most: of a small stem and junction, forward and backward."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device).half()
        return made.contiguous(memory_format=torch.channels_last)

    shape = (3, 128, 22, 14), (3, 128, 11, 7)  # rows that fill no tile, several columns of tiles
    x, identity, upstream = random(*shape[0]), random(*shape[1]), random(*shape[1])
    scales = 0.5 + torch.rand((4, 128), generator=generator, device=device)

    def with_kernels(x: Tensor, identity: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
        value, again = _MaxPool.apply(_norm(first, x))
        joined: Tensor = _norm(second, value, identity + again)[0]
        return joined

    def with_torch(x: Tensor, identity: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
        value = nn.functional.max_pool2d(first(x).relu(), 3, 2, 1)
        return torch.relu(second(value) + (identity + value))

    def results(train: Callable[..., Tensor]) -> list[Tensor]:
        norms = [nn.BatchNorm2d(128, device=device) for _ in range(2)]
        weights = [parameter for norm in norms for parameter in norm.parameters()]
        for parameter, scale in zip(weights, scales, strict=True):
            parameter.data.copy_(scale)
        given = [each.clone().requires_grad_() for each in (x, identity)]
        out = train(given[0], given[1], norms[0], norms[1])
        out.backward(upstream)  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in (*given, *weights) if each.grad is not None]
        return [out.detach(), *gradients, *(buffer for norm in norms for buffer in norm.buffers() if buffer.dim())]

    by_both = zip(results(with_kernels), results(with_torch), strict=True)
    parts = [(ours.float() - torchs.float()).norm() / torchs.float().norm() for ours, torchs in by_both]
    return float(torch.stack(parts).max())  # NaN is the largest


# Whoever is used twice hands out a pair of itself: then the two gradients are not added up by a kernel of their own.
Pair = tuple[Tensor, Tensor]


class _ResNet(ResNet):  # type: ignore[misc]  # torchvision has no types
    def forward(self, images: Tensor) -> Tensor:
        pair: Pair = _MaxPool.apply(_norm(self.bn1, self.conv1(images)))
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
        value = _norm(self.bn1, self.conv1(value))
        value = _norm(self.bn2, self.conv2(value))
        joined: Pair = _norm(self.bn3, self.conv3(value), identity)
        return joined


def _norm(module: nn.Module, x: Tensor, identity: Tensor | None = None, *, relu: bool = True) -> Any:
    return _Norm.apply(x, identity, module.weight, module.bias, module, relu)


class _Norm(Function):
    """BatchNorm, and ReLU behind it. With the other branch as `identity`, which is added before ReLU, it is given out
    as a pair. Running mean and variance are kept up, as torch does; not the count of batches, which nobody needs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, identity: Tensor | None, weight: Tensor, bias: Tensor, module: nn.BatchNorm2d, relu: bool
    ) -> Tensor | Pair:
        (rows, channels), (partial, programs) = _shape(x), _partial(x)
        peak_kernels.sums[programs](x, partial, rows, channels, **TILE)
        # Scale, shift, mean and 1 / standard deviation of each channel.
        about = x.new_empty((4, channels), dtype=torch.float32)
        peak_kernels.statistics[(channels // PARTS["BLOCK_CHANNELS"],)](
            partial, weight, bias, module.running_mean, module.running_var, about, len(partial), rows, channels,
            module.eps, module.momentum, **PARTS,
        )  # fmt: skip
        out, joins, added = torch.empty_like(x), identity is not None, x if identity is None else identity
        peak_kernels.normalise[_tiles(x)](x, added, about, out, rows, channels, ADD=joins, RELU=relu, **TILE)
        ctx.save_for_backward(x, out if joins else x, about)
        ctx.joins, ctx.relu = joins, relu and not joins  # else x alone decides what ReLU let through
        ctx.set_materialize_grads(False)  # of the last pair, only one half is used
        return (out, out.view_as(out)) if joins else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, out, about = ctx.saved_tensors
        given = [each.contiguous(memory_format=torch.channels_last) for each in gradients if each is not None]
        merged = torch.empty_like(x) if ctx.joins else given[0]
        (rows, channels), (partial, programs) = _shape(x), _partial(x)
        peak_kernels.gradient_sums[programs](
            given[0], given[-1], x, out, about, merged, partial, rows, channels,
            RELU=ctx.relu, JUNCTION=ctx.joins, SECOND=len(given) == 2, **TILE,
        )  # fmt: skip
        of_weight, of_bias, line = about.new_empty(channels), about.new_empty(channels), about.new_empty((2, channels))
        peak_kernels.coefficients[(channels // PARTS["BLOCK_CHANNELS"],)](
            partial, about, of_weight, of_bias, line, len(partial), rows, channels, **PARTS
        )
        of_x = torch.empty_like(x)
        peak_kernels.input_gradient[_tiles(x)](merged, x, about, line, of_x, rows, channels, RELU=ctx.relu, **TILE)
        return of_x, merged if ctx.joins else None, of_weight, of_bias, None, None


class _MaxPool(Function):
    """Max pooling of 3 x 3 in steps of 2, of an even height and width; given out as a pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Pair:
        images, channels, height, width = x.shape
        out = _activations(x, images, channels, height // 2, width // 2)
        taken = torch.empty_like(out, dtype=torch.int8)
        peak_kernels.max_pool[_tiles(out)](x, out, taken, *_shape(out), *out.shape[2:], **TILE)
        ctx.save_for_backward(taken)
        return out, out.view_as(out)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (taken,) = ctx.saved_tensors
        first, second = (each.contiguous(memory_format=torch.channels_last) for each in (first, second))
        images, channels, height, width = taken.shape
        out = _activations(first, images, channels, 2 * height, 2 * width)
        peak_kernels.max_pool_gradient[_tiles(out)](first, second, taken, out, *_shape(out), height, width, **TILE)
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


def _partial(x: Tensor) -> tuple[Tensor, tuple[int]]:
    """Room for the two sums of each program, and the programs: as many as the GPU runs at once, whatever the size."""
    rows, channels = _shape(x)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    most, columns = -(-rows // TILE["BLOCK_ROWS"]), channels // TILE["BLOCK_CHANNELS"]
    parts = max(1, min(most, PROGRAMS * processors // columns))
    return x.new_empty((parts, 2, channels), dtype=torch.float32), (parts * columns,)
