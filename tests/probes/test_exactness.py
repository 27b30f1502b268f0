"""The data with which collectives are checked, and what becomes of wrong ones."""

import itertools

import pytest
import torch

from pytest_gpufleet.probes.collectives.exactness import (
    DTYPES,
    OPERATIONS,
    Refused,
    as_type,
    whole_numbers,
    wrong_elements,
)
from pytest_gpufleet.probes.collectives.table import COLLECTIVES

CPU = torch.device("cpu")

FAULTS = """
import pytest
import torch.distributed as dist

from pytest_gpufleet.probes.collectives.large_all_reduce import large_all_reduce
from pytest_gpufleet.probes.collectives.repeated import stays_exact, two_at_once

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

def test_one_result_in_a_hundred(nccl_group):
    nccl_group.run(plant, "all_reduce", 100)
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
"""


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_and_results_are_exact_in_their_type(dtype, operation, n):
    try:
        numbers = whole_numbers(OPERATIONS[operation], 5000, n, dtype, CPU)
    except Refused:
        assert DTYPES[dtype] < OPERATIONS[operation].headroom(n)
        return
    expected = OPERATIONS[operation].combine(numbers)
    # As ranks add them up in any order: every partial result must be exact too.
    partial = [numbers[:k].sum(0) for k in range(1, n + 1)] if operation in ("sum", "avg") else []
    if dtype is torch.bool:
        expected, partial = expected.bool(), []
    for whole in (numbers, expected, *partial):
        kept = as_type(whole, dtype)
        assert torch.equal(kept.to(torch.int64) if dtype is torch.int64 else kept.double().long(), whole.long())
    for row, other in itertools.combinations(numbers, 2):
        assert not torch.equal(row, other)
    if operation == "avg":
        assert torch.equal(expected * n, numbers.sum(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_and_swapped_elements_are_seen(dtype):
    right = as_type(whole_numbers(OPERATIONS["max"], 1000, 2, dtype, CPU)[0], dtype)
    assert wrong_elements(right, right.clone()) == ""
    flipped = right.clone()
    flipped[5:6].view(torch.uint8)[0] ^= 1
    assert wrong_elements(flipped, right).startswith("1 of 1,000 elements are wrong: [5] is ")
    other = next(i for i in range(1000) if right[i].item() != right[5].item())
    swapped = right.clone()
    swapped[5], swapped[other] = right[other].clone(), right[5].clone()
    assert wrong_elements(swapped, right).startswith("2 of 1,000 elements are wrong: ")


def test_nan_is_wrong_and_only_the_allowed_rounding_is_right():
    right = torch.full((4,), 5.0)
    assert wrong_elements(torch.tensor([5.0, torch.nan, 5.0, 5.0]), right) == (
        "1 of 4 elements are wrong: [1] is nan, expected 5.0"
    )
    ulp = 2.0**-21  # of a float32 from 4 to 8
    off = right + torch.tensor([0, 1, 2, 3]) * ulp
    assert wrong_elements(off, right).startswith("3 of 4")
    assert wrong_elements(off, right, ulps=2).startswith("1 of 4 elements are wrong: [3]")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_expected_results_by_hand(name):
    inputs = torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]])
    parts = {"all_gather", "gather"}  # a rank's input is one part
    expected = {
        "all_reduce": [[11, 22, 33, 44], [11, 22, 33, 44]],
        "all_gather": [[1, 2, 10, 20], [1, 2, 10, 20]],
        "reduce_scatter": [[11, 22], [33, 44]],
        "broadcast": [[10, 20, 30, 40], [10, 20, 30, 40]],
        "reduce": [None, [11, 22, 33, 44]],
        "all_to_all": [[1, 2, 10, 20], [3, 4, 30, 40]],
        "gather": [None, [1, 2, 10, 20]],
        "scatter": [[10, 20], [30, 40]],
        "sendrecv": [[10, 20, 30, 40], [1, 2, 3, 4]],
    }[name]
    for me in range(2):
        given = inputs[:, :2] if name in parts else inputs
        result = COLLECTIVES[name].expected(given, me, 1, OPERATIONS["sum"].combine)
        assert (None if result is None else result.tolist()) == expected[me]


def test_wrong_results_that_come_rarely_or_at_once_are_found(fleet_here):
    run = fleet_here(FAULTS)
    assert set(run.outcomes.values()) == {"passed"}, run.text
