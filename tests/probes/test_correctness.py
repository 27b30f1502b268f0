"""What the checks of training share: shards of DistributedSampler, and copies that differ between ranks."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from pytest_gpufleet.probes.training.correctness import differences, sampler_errors


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "samples"), [(1, 100), (2, 101), (3, 99), (8, 1021), (16, 1021)])
def test_shards_of_torch_are_right_and_an_epoch_that_comes_again_has_the_same_order(ranks, samples, drop_last):
    """Other errors are planted in the check itself: tests/acceptance/test_training_faults.py."""
    by_rank, other = [], []
    for rank in range(ranks):
        sampler = DistributedSampler(torch.arange(samples), ranks, rank, drop_last=drop_last)
        first, second = [*sampler], [sampler.set_epoch(1), *sampler][1:]
        by_rank.append([first, second, first])
        other.append([first, second, second])
    assert sampler_errors(by_rank, samples, drop_last=drop_last) == []
    again = [f"rank {rank}: epoch 0 is another one when it comes again" for rank in range(ranks)]
    assert sampler_errors(other, samples, drop_last=drop_last) == again


# ---------------------------------------------------------------- copies that differ between ranks: which rank is named
def lines(rank, odd):
    copies = {"a": torch.zeros(3, 2, device=rank.device), "b": torch.zeros(5, dtype=torch.float16, device=rank.device)}
    if rank.index in odd:
        copies["b"].view(torch.uint8)[7] ^= 1
    return differences(rank, copies)


WRONG = "b: 1 of 10 bytes, first in element 3"
DOUBT = WRONG + ", against rank {}: no majority says which of them is right"


def test_who_differs(four_ranks):
    assert four_ranks.run(lines, []) == [[], [], [], []]
    assert four_ranks.run(lines, [2]) == [[], [], [WRONG], []]
    assert four_ranks.subset(range(3)).run(lines, [0]) == [[WRONG], [], []]
    # Without a majority all are named.
    assert four_ranks.subset(range(2)).run(lines, [1]) == [[DOUBT.format(1)], [DOUBT.format(0)]]
    assert four_ranks.run(lines, [2, 3]) == [[DOUBT.format(other)] for other in (2, 2, 0, 0)]
