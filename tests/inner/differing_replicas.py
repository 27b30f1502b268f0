"""Replicas that differ on some ranks."""

import torch

from pytest_gpufleet.probes.training.correctness import differences


def lines(rank, odd):
    copies = {"a": torch.zeros(3, 2, device=rank.device), "b": torch.zeros(5, dtype=torch.float16, device=rank.device)}
    if rank.index in odd:
        copies["b"].view(torch.uint8)[7] ^= 1
    return differences(rank, copies)


WRONG = "b: 1 of 10 bytes, first in element 3"
DOUBT = WRONG + ", against rank {}: no majority says which of them is right"


def test_equal(nccl_group):
    assert nccl_group.run(lines, []) == [[], [], [], []]


def test_the_minority_is_named(nccl_group):
    assert nccl_group.run(lines, [2]) == [[], [], [WRONG], []]
    assert nccl_group.subset(range(3)).run(lines, [0]) == [[WRONG], [], []]


def test_without_a_majority_all_are_named(nccl_group):
    assert nccl_group.subset(range(2)).run(lines, [1]) == [[DOUBT.format(1)], [DOUBT.format(0)]]
    doubts = [[DOUBT.format(other)] for other in (2, 2, 0, 0)]
    assert nccl_group.run(lines, [2, 3]) == doubts
