"""What the checks of training share: shards of DistributedSampler, and copies that differ between ranks."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from pytest_gpufleet.probes.training.correctness import EPOCHS, sampler_errors
from tests.conftest import INNER


def shards(ranks, samples, drop_last=False):
    """As torch gives them out."""
    by_rank = []
    for rank in range(ranks):
        sampler = DistributedSampler(torch.arange(samples), ranks, rank, drop_last=drop_last)
        every = []
        for epoch in EPOCHS:
            sampler.set_epoch(epoch)
            every.append([*sampler])
        by_rank.append(every)
    return by_rank


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "samples"), [(1, 100), (2, 101), (3, 99), (8, 1021), (16, 1021)])
def test_those_of_torch_are_right(ranks, samples, drop_last):
    assert sampler_errors(shards(ranks, samples, drop_last), samples, drop_last=drop_last) == []


def test_an_epoch_that_comes_again_has_the_same_order():
    """Other errors are planted in the check itself: tests/acceptance/test_training_faults.py."""
    given = [[rank[0], rank[1], rank[1]] for rank in shards(2, 100)]
    assert sampler_errors(given, 100, drop_last=False) == [
        f"rank {rank}: epoch 0 is another one when it comes again" for rank in (0, 1)
    ]


# ---------------------------------------------------------------- copies that differ between ranks: which rank is named


def test_who_differs(fleet):
    run = fleet(INNER / "differing_replicas.py", ranks=4)
    assert run.status == 0, run.text
    assert list(run.outcomes.values()) == ["passed"] * 3
