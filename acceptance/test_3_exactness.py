"""Collectives deliver exactly the right data."""

import pytest
import torch

from pytest_gpufleet import GiB, not_applicable
from pytest_gpufleet.probes.collectives.exactness import KINDS, exchange
from pytest_gpufleet.probes.collectives.large_all_reduce import large_all_reduce
from pytest_gpufleet.probes.collectives.repeated import stays_exact, two_at_once
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.search import wrong_data

# Which ranks make groups: as tensor parallelism (neighbours) and data parallelism (every second rank) split a machine.
GROUPS = {
    "pairs": lambda n: [range(i, i + 2) for i in range(0, n - 1, 2)],
    "halves": lambda n: [range(n // 2), range(n // 2, n)],
    "every second": lambda n: [range(0, n, 2), range(1, n, 2)],
}

SECONDS = {"standard": 3, "burnin": 60}
LARGEST = 8 * GiB


@pytest.fixture(autouse=True)
def several(nccl_group):
    if nccl_group.size == 1:
        not_applicable("one rank has nobody to talk to")


def deliver(group, collective, operation="", **how):
    """Exchange data and fail with the culprit if any are wrong; what each rank got."""
    deliveries = group.run(exchange, collective, operation, **how)
    for reason in deliveries[0].refused:
        print(f"{collective} {operation} is not offered with {reason}")
    if any(delivery.wrong for delivery in deliveries):
        pytest.fail(wrong_data.of_wrong_data(group, deliveries, collective, operation, **how), pytrace=False)
    return deliveries


@pytest.mark.parametrize(("collective", "operation"), KINDS, ids=["-".join(filter(None, kind)) for kind in KINDS])
def test_collective_is_exact(nccl_group, collective, operation):
    """Every element of a collective's result is exactly right

    Every type that the backend has, sizes that fit and sizes that do not, several roots. The data are such that a
    swapped, lost, doubled or flipped element changes the result, and every result is exact in its type: one wrong
    element means that a link, a switch or a GPU corrupts data, and training on this machine goes wrong silently. The
    first line names where it comes from, as far as leaving out one rank after the other can tell. Look for NVLink and
    ECC errors of that GPU (`nvidia-smi nvlink -e`, `nvidia-smi -q`) and replace it.
    """
    delivery, *_ = deliver(nccl_group, collective, operation)
    if not delivery.right:
        not_applicable("; ".join(delivery.refused))


@pytest.mark.level("standard")
@pytest.mark.parametrize("split", GROUPS)
def test_groups_are_exact(nccl_group, split):
    """all_reduce is exact in groups of some of the GPUs, as parallel training makes them

    Wrong in one group only: the links among its GPUs, or one of them. If the collectives of all GPUs are exact, NCCL
    goes other ways in the small group: NCCL_DEBUG=INFO shows them.
    """
    if nccl_group.size < 4:
        not_applicable("fewer than four ranks have no groups to split into")
    for ranks in GROUPS[split](nccl_group.size):
        deliver(nccl_group.subset(ranks), "all_reduce", "sum", dtypes=[torch.float32])


@pytest.mark.level("standard")
def test_tensors_with_gaps_are_exact(nccl_group):
    """Every second element of a tensor is sent exactly, and what lies between stays as it is

    Such tensors are packed before and unpacked after the way, as frameworks do. If all other checks of this file pass,
    the GPU that is named packs wrongly: look at its memory and arithmetic.
    """
    for collective in COLLECTIVES:
        operation = "sum" if COLLECTIVES[collective].reduces else ""
        deliver(nccl_group, collective, operation, dtypes=[torch.float32], strided=True)


@pytest.mark.level("standard")
def test_two_collectives_at_once_are_exact(nccl_group):
    """Two collectives at the same time, in two groups on two streams, do not disturb each other

    Training overlaps them all the time. If each alone is exact (the checks above), suspect the driver or NCCL, and a
    GPU only if it is always the same one.
    """
    wrong = zip(nccl_group.run(two_at_once), map(nccl_group.name_of, range(nccl_group.size)), strict=True)
    assert [f"{name}: {', '.join(faults)}" for faults, name in wrong if faults] == []


@pytest.mark.level("standard")
def test_largest_all_reduce_is_exact(nccl_group):
    """Every element of an all_reduce of 8 GiB is exactly right

    What is larger than two gigabytes needs longer offsets, and goes through all buffers of NCCL many times over. Wrong
    here, and right in the checks of smaller ones: suspect NCCL and the driver first, then the GPU that is named.
    """
    nbytes = 4 * 10_007
    if nccl_group.gpus:
        nbytes = min(LARGEST, min(gpu.memory_bytes for gpu in nccl_group.gpus) // 2)
    answers = nccl_group.run(large_all_reduce, nbytes)
    assert [f"{nccl_group.name_of(index)}: {fault}" for index, fault in enumerate(answers) if fault] == []


@pytest.mark.level("standard")
def test_all_reduce_stays_exact(nccl_group, fleet_level):
    """Every one of thousands of large all_reduces in a row is exactly right

    Finds what goes wrong rarely: a link or a GPU that corrupts one transfer in a thousand. Look for NVLink and ECC
    errors of the GPUs that are named; if all are, one of them spoils everybody's sum.
    """
    seconds = SECONDS[fleet_level] if nccl_group.gpus else 0.1
    answers = nccl_group.run(stays_exact, seconds)
    print(f"{answers[0][0]:,} all_reduces")
    wrong = [f"{nccl_group.name_of(i)}: {fault}" for i, (_, fault) in enumerate(answers) if fault]
    assert wrong == []
