"""Whether training is right: a network that learns in a second, replicas, shards of a sampler."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pytest_gpufleet.probes.compute.rate import matmul_in_tf32
from pytest_gpufleet.probes.timing import everyones
from pytest_gpufleet.world.world import Rank

CLASSES = 4
IMAGES = 32  # of one rank in one step
DIGITS, SHARED_DIGITS = 24, 16  # of sums that fp32 holds: with 16, those of 4096 ranks

# One bright quarter for each class.
_QUARTERS = torch.kron(torch.eye(CLASSES).view(CLASSES, 1, 2, 2), torch.ones(8, 8))


def network(rank: Rank) -> nn.Sequential:
    """With the same weights on every rank; without batch normalization, which depends on how the global batch is cut
    into ranks; with GELU, since at ReLU's kink a difference in the last bit can become a large one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 64), nn.GELU(), nn.Linear(64, CLASSES)
    ).to(rank.device)


def batch(step: int, ranks: Iterable[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The images (n, 1, 16, 16) and labels (n) that these ranks train on in a step: which quarter is bright."""
    images, labels = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        label = torch.randint(CLASSES, (IMAGES,), generator=generator)
        # Not [label], for which torch wakes its threads: that took ranks on busy hosts 20 to 100 ms.
        quarters = _QUARTERS.index_select(0, label)
        images.append(torch.rand(IMAGES, 1, 16, 16, generator=generator) + 0.5 * quarters)
        labels.append(label)
    return torch.cat(images).to(device), torch.cat(labels).to(device)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_step(
    model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The loss; with bfloat16 under autocast."""
    optimizer.zero_grad()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def losses_of_all(rank: Rank, model: nn.Module, optimizer: Optimizer, first: int) -> list[float]:
    """Of three steps on the same images on all ranks, so that their number does not matter."""
    with full_precision():
        return [train_step(model, optimizer, *batch(first + i, [0], rank.device)).item() for i in range(3)]


def checkpoint(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of both, as torch.distributed.checkpoint saves and loads it."""
    # Imported here: a collection of the checks does not wait for it.
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def known_layer(rank: Rank) -> nn.Linear:
    """A layer y = w x of 1000 weights, small integers. The gradient of sum(y) is x for each of them."""
    layer = nn.Linear(1, 1000, bias=False)
    layer.weight.data.copy_(torch.arange(1000).view(-1, 1) % 7)
    return layer.to(rank.device)


def known_input(rank: Rank) -> Tensor:
    """An x for which the average of all ranks' gradients is `known_average`: of up to 24 ranks 2**size - 1, in binary
    one digit for each. Exact in fp32 for up to 4096 ranks, in whatever order, divided or multiplied by the inverse."""
    return torch.full((1, 1), float(rank.size * _digits(rank.size)[rank.index]), device=rank.device)


def known_average(size: int) -> int:
    return sum(_digits(size))


def _digits(size: int) -> list[int]:
    """Of more ranks than fp32 has digits several share one: the sum still lacks it if one of them is lost."""
    return [1 << (index if size <= DIGITS else index % SHARED_DIGITS) for index in range(size)]


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 without TF32 and convolutions that repeat to the bit, so that results can be compared."""
    with matmul_in_tf32(False), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def differences(rank: Rank, tensors: Mapping[str, Tensor]) -> list[str]:
    """Where this rank's copy of tensors differs, in any bit, from the copy that most ranks have. Where no copy is on
    more than half of the ranks every rank has a line and names another one. Ranks send each other digests, and copies
    only where these differ, so that it takes no more memory on thousands of ranks than on two."""
    lines = []
    for name, tensor in tensors.items():
        mine = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        digests = [tuple(row) for row in everyones(rank, [*hashlib.sha256(mine.cpu().numpy().data).digest()])]
        usual, count = Counter(digests).most_common(1)[0]
        if count == rank.size:
            continue
        # Two copies are enough: each rank has one to compare that is not its own.
        first = digests.index(usual)
        second = next(index for index, digest in enumerate(digests) if digest != usual)
        copies = {source: mine.clone() for source in (first, second)}
        for source, copy in copies.items():
            dist.broadcast(copy, dist.get_global_rank(rank.group, source), group=rank.group)
        majority, is_usual = 2 * count > rank.size, digests[rank.index] == usual
        if majority and is_usual:
            continue
        other = second if is_usual else first
        wrong = (mine != copies[other]).nonzero().flatten()
        element = int(wrong[0]) // tensor.element_size()
        doubt = "" if majority else f", against rank {other}: no majority says which of them is right"
        lines.append(f"{name}: {len(wrong)} of {mine.numel()} bytes, first in element {element}{doubt}")
    return lines


EPOCHS = (0, 1, 0)  # one again: it must come as it came before


def sampler_shards(rank: Rank, samples: int, *, drop_last: bool) -> list[list[int]]:
    """The samples that a DataLoader with a DistributedSampler gives to this rank in each of EPOCHS, shuffled."""
    data = TensorDataset(torch.arange(samples))
    sampler: DistributedSampler[Any] = DistributedSampler(data, rank.size, rank.index, drop_last=drop_last)
    loader, shards = DataLoader(data, batch_size=16, sampler=sampler), []
    for epoch in EPOCHS:
        sampler.set_epoch(epoch)
        shards.append([int(sample) for (batch,) in loader for sample in batch])
    return shards


def sampler_errors(by_rank: Sequence[Sequence[list[int]]], samples: int, *, drop_last: bool) -> list[str]:
    """What is wrong with the shards, `by_rank[rank][number of EPOCHS]`. As torch documents the sampler: all
    ranks get equally many; of a number that does not divide, some samples come twice, or with `drop_last` the tail is
    left out; every epoch has an order of its own, and one epoch always the same."""
    errors, ranks = list[str](), len(by_rank)
    size = samples // ranks if drop_last else -(-samples // ranks)
    may_miss = max(0, samples - size * ranks)
    for epoch, *shards in zip(EPOCHS[:2], *by_rank, strict=False):
        for rank, shard in enumerate(shards):
            if len(shard) != size:
                errors.append(f"epoch {epoch}: rank {rank} has {len(shard)} samples and not {size}")
        missing = samples - len(set().union(*shards))
        if missing > may_miss:  # also where ranks have more in common than fills the shards up
            errors.append(f"epoch {epoch}: {missing} of {samples} samples are given to no rank, and {may_miss} may be")
    for rank, (first, second, again) in enumerate(by_rank):
        if first == second:
            errors.append(f"rank {rank}: epoch 1 has the samples and the order of epoch 0: set_epoch changes nothing")
        if first != again:
            errors.append(f"rank {rank}: epoch 0 is another one when it comes again")
    return errors
