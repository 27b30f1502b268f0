"""What the checks of training share: a network that learns in a second, and a layer whose gradients are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pytest_gpufleet.probes.tf32 import products_in_tf32
from pytest_gpufleet.world.rank import Rank

CLASSES = 4
IMAGES = 32  # of one rank in one step
DIGITS, SHARED_DIGITS = 24, 16  # of sums that fp32 holds: with 16, those of 4096 ranks

# One bright quarter for each class.
_QUARTERS = torch.kron(torch.eye(CLASSES).view(CLASSES, 1, 2, 2), torch.ones(8, 8))


def network(rank: Rank) -> nn.Sequential:
    """A convolution and two linear layers, with the same weights on every rank.

    Made so that results can be compared. Without batch normalization, which depends on how the global batch is cut
    into ranks; with GELU, since at ReLU's kink a difference in the last bit can become a large one.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 64), nn.GELU(), nn.Linear(64, CLASSES)
    ).to(rank.device)


def batch(step: int, ranks: Iterable[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The images (n, 1, 16, 16) and labels (n) that these ranks train on in a step, IMAGES for each rank.

    One quarter of an image is bright, and which one is its label.
    """
    images, labels = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        label = torch.randint(CLASSES, (IMAGES,), generator=generator)
        # Not [label], for which torch wakes its threads: that took ranks on busy hosts 20 to 100 ms.
        quarters = _QUARTERS.index_select(0, label)
        images.append(torch.rand(IMAGES, 1, 16, 16, generator=generator) + 0.5 * quarters)
        labels.append(label)
    return torch.cat(images).to(device), torch.cat(labels).to(device)


def known_layer(rank: Rank) -> nn.Linear:
    """A layer y = w x of 1000 weights, small integers. The gradient of sum(y) is x for each of them."""
    layer = nn.Linear(1, 1000, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1000).view(-1, 1) % 7)
    return layer.to(rank.device)


def known_input(rank: Rank) -> Tensor:
    """An x for which the average of all ranks' gradients is `known_average`: of up to 24 ranks 2**size - 1, in binary
    one digit for each.

    Exact in fp32 for up to 4096 ranks, in whatever order it is summed and whether each is divided by the size or
    multiplied by its rounded inverse.
    """
    return torch.full((1, 1), float(rank.size * _digit(rank.index, rank.size)), device=rank.device)


def known_average(size: int) -> int:
    """What `known_input` gives on average."""
    return sum(_digit(index, size) for index in range(size))


def _digit(index: int, size: int) -> int:
    """Of more ranks than fp32 has digits several share one: the sum still lacks it if one of them is lost."""
    return 1 << (index if size <= DIGITS else index % SHARED_DIGITS)


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 without TF32 and convolutions that repeat to the bit, so that results can be compared."""
    with products_in_tf32(False), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
