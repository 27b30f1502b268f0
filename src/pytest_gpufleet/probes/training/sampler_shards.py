"""Which samples of a data set each rank is given by DistributedSampler, and whether every sample is given out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pytest_gpufleet.world.rank import Rank

BATCH = 16
EPOCHS = (0, 1, 0)  # one again: it must come as it came before

Shard = Sequence[int]  # the samples of one rank in one epoch, in the order in which they came


def sampler_shards(rank: Rank, samples: int, *, drop_last: bool) -> list[list[int]]:
    """The samples that a DataLoader with a DistributedSampler gives to this rank in each of EPOCHS, shuffled."""
    numbered = TensorDataset(torch.arange(samples))
    sampler: DistributedSampler[Any] = DistributedSampler(
        numbered, rank.size, rank.index, shuffle=True, drop_last=drop_last
    )
    loader = DataLoader(numbered, batch_size=BATCH, sampler=sampler)
    shards = []
    for epoch in EPOCHS:
        sampler.set_epoch(epoch)
        shards.append([int(sample) for (batch,) in loader for sample in batch])
    return shards


def sampler_errors(by_rank: Sequence[Sequence[Shard]], samples: int, *, drop_last: bool) -> list[str]:
    """What is wrong with the shards of all ranks, `by_rank[rank][number of EPOCHS]`; empty if nothing is.

    As torch documents the sampler: all ranks get equally many; of a number that does not divide, some samples come
    twice, or with `drop_last` the tail is left out; every epoch has an order of its own, and one epoch always the same.
    """
    errors = []
    for number, epoch in enumerate(EPOCHS[:2]):
        shards = [each[number] for each in by_rank]
        errors += [f"epoch {epoch}: {error}" for error in _of_epoch(shards, samples, drop_last)]
    for rank, (first, second, again) in enumerate(by_rank):
        if list(first) == list(second):
            errors.append(f"rank {rank}: epoch 1 has the samples and the order of epoch 0: set_epoch changes nothing")
        if list(first) != list(again):
            errors.append(f"rank {rank}: epoch 0 is another one when it comes again")
    return errors


def _of_epoch(shards: Sequence[Shard], samples: int, drop_last: bool) -> Iterable[str]:
    ranks = len(shards)
    size = samples // ranks if drop_last else -(-samples // ranks)
    for rank, shard in enumerate(shards):
        if len(shard) != size:
            yield f"rank {rank} has {len(shard)} samples and not {size}"
    given = Counter(sample for shard in shards for sample in shard)
    missing = samples - len(given)
    left_out = samples - size * ranks if drop_last else 0
    if missing > left_out:
        yield f"{missing} of {samples} samples are given to no rank, and {left_out} may be"
    padding = max(0, size * ranks - samples)
    for rank, shard in enumerate(shards):
        for other in range(rank):
            common = len({*shard} & {*shards[other]})
            if common > padding:
                yield f"ranks {other} and {rank} have {common} samples in common, and {padding} may be"
