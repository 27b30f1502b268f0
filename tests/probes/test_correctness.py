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


def test_two_ranks_with_one_shard():
    given = shards(4, 1021)
    given[3] = given[1]
    errors = sampler_errors(given, 1021, drop_last=False)
    assert [error for error in errors if "in common" in error] == [
        f"epoch {epoch}: ranks 1 and 3 have 256 samples in common, and 3 may be" for epoch in (0, 1)
    ]
    assert any("samples are given to no rank, and 0 may be" in error for error in errors)


def test_ranks_with_different_seeds_share_samples_and_lose_others():
    given = shards(2, 100)
    given[1] = [[(sample + 1) % 100 for sample in epoch] for epoch in given[1]]
    assert any("ranks 0 and 1 have" in error for error in sampler_errors(given, 100, drop_last=False))


def test_padding_is_no_error_and_a_lost_sample_is():
    given = shards(8, 1021)
    assert sum(len(rank[0]) for rank in given) == 1024  # three come twice
    given[5][0] = given[5][0][:-1]
    assert "epoch 0: rank 5 has 127 samples and not 128" in sampler_errors(given, 1021, drop_last=False)


def test_epochs_of_one_order():
    given = [[rank[0], rank[0], rank[0]] for rank in shards(2, 100)]
    assert len(sampler_errors(given, 100, drop_last=False)) == 2
    given = [[rank[0], rank[1], rank[1]] for rank in shards(2, 100)]
    assert sampler_errors(given, 100, drop_last=False) == [
        f"rank {rank}: epoch 0 is another one when it comes again" for rank in (0, 1)
    ]


# ---------------------------------------------------------------- copies that differ between ranks: which rank is named


def test_who_differs(fleet):
    run = fleet(INNER / "differing_replicas.py", ranks=4)
    assert run.status == 0, run.text
    assert list(run.outcomes.values()) == ["passed"] * 3
