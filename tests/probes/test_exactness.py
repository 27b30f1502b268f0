"""The data with which collectives are checked, and what becomes of wrong ones."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet.probes.collectives import exactness

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("operation", exactness.OPERATIONS)
@pytest.mark.parametrize("dtype", exactness.DTYPES, ids=str)
def test_numbers_and_results_are_exact_in_their_type(dtype, operation, n):
    try:
        numbers = exactness.whole_numbers(exactness.OPERATIONS[operation], 5000, n, dtype, CPU)
    except exactness.Refused:
        assert exactness.DTYPES[dtype] < exactness.OPERATIONS[operation].headroom(n)
        return
    expected = exactness.OPERATIONS[operation].combine(numbers)
    # As ranks add them up in any order: every partial result must be exact too.
    partial = [numbers[:k].sum(0) for k in range(1, n + 1)] if operation in ("sum", "avg") else []
    if dtype is torch.bool:
        expected, partial = expected.bool(), []
    for whole in (numbers, expected, *partial):
        kept = exactness.as_type(whole, dtype)
        assert torch.equal(kept.to(torch.int64) if dtype is torch.int64 else kept.double().long(), whole.long())
    for row, other in itertools.combinations(numbers, 2):
        assert not torch.equal(row, other)
    if operation == "avg":
        assert torch.equal(expected * n, numbers.sum(0))


@pytest.mark.parametrize("version", ["2.4.0+cpu", "2.8.0"])
def test_what_an_older_gloo_does_wrong_is_not_asked_of_it(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    (reason,) = exactness.exchange(SimpleNamespace(device=CPU), "reduce_scatter", "max").refused
    assert reason.startswith("Gloo of torch before 2.9")


def test_ranks_add_float8_if_all_can(monkeypatch):
    """One that refuses by itself would leave the others waiting."""
    here = SimpleNamespace(device=torch.device("cuda", 0), size=2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(exactness, "agree", lambda rank, mine: mine and 0)
    (reason,) = exactness.exchange(here, "all_reduce", "sum", dtypes=[torch.float8_e5m2]).refused
    assert reason == "float8_e5m2: NCCL adds float8 on later GPUs only"


@pytest.mark.parametrize("dtype", exactness.DTYPES, ids=str)
def test_a_flipped_bit_and_swapped_elements_are_seen(dtype):
    right = exactness.as_type(exactness.whole_numbers(exactness.OPERATIONS["max"], 1000, 2, dtype, CPU)[0], dtype)
    assert exactness.wrong_in(right, right.clone()) == ""
    flipped = right.clone()
    flipped[5:6].view(torch.uint8)[0] ^= 1
    assert exactness.wrong_in(flipped, right).startswith("1 of 1,000 elements are wrong: [5] is ")
    other = next(i for i in range(1000) if right[i].item() != right[5].item())
    swapped = right.clone()
    swapped[5], swapped[other] = right[other].clone(), right[5].clone()
    assert exactness.wrong_in(swapped, right).startswith("2 of 1,000 elements are wrong: ")


def test_nan_is_wrong_and_only_the_allowed_rounding_is_right():
    right = torch.full((4,), 5.0)
    assert exactness.wrong_in(torch.tensor([5.0, torch.nan, 5.0, 5.0]), right) == (
        "1 of 4 elements are wrong: [1] is nan, expected 5.0"
    )
    ulp = 2.0**-21  # of a float32 from 4 to 8
    off = right + torch.tensor([0, 1, 2, 3]) * ulp
    assert exactness.wrong_in(off, right).startswith("3 of 4")
    assert exactness.wrong_in(off, right, ulps=2).startswith("1 of 4 elements are wrong: [3]")


# ---------------------------------------------------------------- collectives that give wrong results
def plant(rank, name, spoiled):
    """Of the exchanges of rank 1 those are wrong whose number is `spoiled`."""
    genuine, calls = getattr(dist, name), []

    def damaged(output, *args, async_op=False, **kwargs):
        work = genuine(output, *args, async_op=async_op, **kwargs)
        calls.append(output.numel() > 1000)
        spoils = calls[-1] and spoiled(sum(calls))
        return SimpleNamespace(wait=lambda: (work.wait(), output[7].add_(1))) if spoils else work

    if rank.index == 1:
        setattr(dist, name, damaged)


@pytest.mark.parametrize(
    "spoiled", [lambda number: number % 20 == 0, lambda number: number == 1], ids=["rare", "first"]
)
def test_wrong_results_that_come_rarely_or_at_once_are_found(two_ranks, spoiled):  # and on rank 0 there are none
    two_ranks.run(plant, "all_reduce", spoiled)
    (times, fine, *_), (_, wrong, *_) = two_ranks.run(exactness.stays_exact, 0.5)
    assert fine == ""
    assert f" of {times:,} results of 16,384 elements are wrong: number " in wrong
    assert " (1 elements)" in wrong


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor"])
def test_one_of_two_at_once_is_named(two_ranks, name):
    two_ranks.run(plant, name, lambda number: number % 5 == 0)
    assert two_ranks.run(exactness.two_at_once) == ["", f"{name.removesuffix('_into_tensor')}: 2 wrong elements"]


def test_one_element_of_a_large_one_is_found(two_ranks):
    two_ranks.run(plant, "all_reduce", bool)
    wrong = "part 0: 1 of 4,096 elements are wrong: [7] is 18.0, expected 17.0"
    assert two_ranks.run(exactness.large_all_reduce, 4 * 10_007) == ["", wrong]


def test_what_is_wrong_in_a_tensor_with_gaps_is_found(two_ranks):
    two_ranks.run(plant, "all_reduce", bool)
    fine, wrong = two_ranks.run(exactness.exchange, "all_reduce", "sum", [torch.float32], strided=True)
    assert (fine.wrong, len(wrong.wrong)) == ((), 3)  # of no smaller ones
    assert all("elements are wrong: [7] is " in each for each in wrong.wrong), wrong


def test_gaps_in_a_tensor_that_are_overwritten_are_found(two_ranks):
    def overwrite(rank):
        genuine = torch.Tensor.copy_
        if rank.index == 0:
            torch.Tensor.copy_ = lambda to, origin: genuine(to, origin) if to.is_contiguous() else to._base.fill_(7)

    two_ranks.run(overwrite)
    overwritten, _ = two_ranks.run(exactness.exchange, "all_gather", "", [torch.float32], strided=True)
    assert all("elements beside the tensor were overwritten" in each for each in overwritten.wrong), overwritten
    assert len(overwritten.wrong) >= 3
