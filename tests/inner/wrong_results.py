"""Collectives that give wrong results, rarely or at once."""

import pytest
import torch.distributed as dist

from pytest_gpufleet.probes.collectives.exactness import large_all_reduce, stays_exact, two_at_once

pytestmark = pytest.mark.fresh_world


class Damaged:
    def __init__(self, work, tensor):
        self.work, self.tensor = work, tensor

    def wait(self):
        self.work.wait()
        self.tensor[7] += 1


def plant(rank, name, every):
    genuine, calls = getattr(dist, name), []

    def damaged(output, *args, async_op=False, **kwargs):
        work = genuine(output, *args, async_op=async_op, **kwargs)
        calls.append(output.numel() > 1000)
        return Damaged(work, output) if calls[-1] and sum(calls) % every == 0 else work

    if rank.index == 1:
        setattr(dist, name, damaged)


def test_one_result_in_twenty(nccl_group):
    nccl_group.run(plant, "all_reduce", 20)
    (times, fine), (_, wrong) = nccl_group.run(stays_exact, 0.5)
    assert fine == ""
    assert f" of {times:,} results of 16,384 elements are wrong: number " in wrong
    assert " (1 elements)" in wrong


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor"])
def test_one_of_two_at_once(nccl_group, name):
    nccl_group.run(plant, name, 5)
    assert nccl_group.run(two_at_once) == ["", f"{name.removesuffix('_into_tensor')}: 2 wrong elements"]


def test_one_element_of_a_large_one(nccl_group):
    nccl_group.run(plant, "all_reduce", 1)
    fine, wrong = nccl_group.run(large_all_reduce, 4 * 10_007)
    assert fine == ""
    assert wrong == "1 of 10,007 elements are wrong; the first is number 7: 18, expected 17"


def test_both_are_exact(nccl_group):
    assert nccl_group.run(large_all_reduce, 4 * 10_007) == ["", ""]
    assert nccl_group.run(two_at_once) == ["", ""]
    assert [wrong for _, wrong in nccl_group.run(stays_exact, 0.1)] == ["", ""]
