"""Collectives deliver exactly the right data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pytest_gpufleet import GiB, Size, World, expect_none, not_applicable
from pytest_gpufleet.probes.collectives import exactness
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.search.collective import who_corrupts

pytestmark = [
    pytest.mark.chapter("Exactness", "Do the GPUs exchange data without changing a single bit?"),
    pytest.mark.needs(ranks=2),
]

# Which ranks make groups: as tensor parallelism (neighbours) and data parallelism (every second rank) split a machine.
GROUPS: dict[str, Callable[[int], list[range]]] = {
    "pairs": lambda n: [range(i, i + 2) for i in range(0, n - 1, 2)],
    "halves": lambda n: [range(n // 2), range(n // 2, n)],
    "every second": lambda n: [range(0, n, 2), range(1, n, 2)],
}

SECONDS = {"standard": Size(3.0, rehearsal=0.1), "burnin": Size(60.0, rehearsal=0.1)}
LARGEST = Size(8 * GiB, rehearsal=4 * 10_007)


def deliver(group: World, collective: str, operation: str = "", **how: Any) -> Sequence[exactness.Delivery]:
    """Exchange data and fail with the culprit if any are wrong; what each rank got."""
    deliveries: Sequence[exactness.Delivery] = group.run(exactness.exchange, collective, operation, **how)
    for reason in deliveries[0].refused:
        print(f"{collective} {operation} is not offered with {reason}")
    if any(delivery.wrong for delivery in deliveries):
        expect_none([who_corrupts(group, deliveries, collective, operation, **how)])
    return deliveries


@pytest.mark.parametrize(
    ("collective", "operation"), exactness.KINDS, ids=["-".join(filter(None, kind)) for kind in exactness.KINDS]
)
def test_collective_is_exact(nccl_group: World, collective: str, operation: str) -> None:
    """Collectives are exact

    Runs a collective on every data type, with sizes that divide and sizes that do not, and compares every element with
    the known result. One wrong element means that a link, a switch or a GPU corrupts data and training goes wrong
    silently. The first line names the culprit, as far as leaving out one rank after the other can find it. Check NVLink
    and ECC errors of that GPU (`nvidia-smi nvlink -e`, `nvidia-smi -q`) and replace it.
    """
    delivery, *_ = deliver(nccl_group, collective, operation)
    if not delivery.right:
        not_applicable("; ".join(delivery.refused))


@pytest.mark.level("standard")
@pytest.mark.needs(ranks=4)
@pytest.mark.parametrize("split", GROUPS)
def test_groups_are_exact(nccl_group: World, split: str) -> None:
    """all_reduce is exact in groups of some of the GPUs

    Runs all_reduce in pairs, halves and every second GPU, as tensor and data parallel training does. If only one group
    is wrong, check the links between its GPUs. If the collectives of all GPUs are exact, NCCL takes another path in the
    small group: NCCL_DEBUG=INFO shows it.
    """
    for ranks in GROUPS[split](nccl_group.size):
        deliver(nccl_group.subset(ranks), "all_reduce", "sum", dtypes=[torch.float32])


@pytest.mark.level("standard")
def test_tensors_with_gaps_are_exact(nccl_group: World) -> None:
    """Collectives are exact on strided tensors

    Sends every second element of a tensor and checks that the elements between stay unchanged. Such tensors are packed
    before the transfer and unpacked after it. If all other checks of this chapter pass, the named GPU packs wrongly:
    check its memory and arithmetic.
    """
    for collective in COLLECTIVES:
        operation = "sum" if COLLECTIVES[collective].reduces else ""
        deliver(nccl_group, collective, operation, dtypes=[torch.float32], strided=True)


@pytest.mark.level("standard")
def test_two_collectives_at_once_are_exact(nccl_group: World) -> None:
    """Two collectives at the same time are exact

    Runs all_reduce and all_gather at the same time, in two groups on two streams, as training does. If each is exact
    alone, suspect the driver or NCCL, and a GPU only if it is always the same one.
    """
    nccl_group.faultless(exactness.two_at_once, code="collective_wrong")


@pytest.mark.level("standard")
def test_largest_all_reduce_is_exact(nccl_group: World) -> None:
    """all_reduce of 8 GiB is exact

    Compares every element of an all_reduce of 8 GiB with the known result. Tensors above 2 GiB need 64-bit offsets and
    pass through all buffers of NCCL many times. If smaller ones are exact, suspect NCCL and the driver first, then the
    named GPU.
    """
    halves = [gpu.memory_bytes // 2 for gpu in nccl_group.gpus if gpu.memory_bytes]
    nccl_group.faultless(exactness.large_all_reduce, min([LARGEST.on(nccl_group), *halves]), code="collective_wrong")


@pytest.mark.level("standard")
def test_all_reduce_stays_exact(nccl_group: World, fleet_level: str) -> None:
    """Thousands of all_reduces in a row are exact

    Finds rare errors: a link or a GPU that corrupts one transfer in a thousand. Check NVLink and ECC errors of the
    named GPUs. If all are named, one of them corrupts the sum of all.
    """
    answers = nccl_group.run(exactness.stays_exact, SECONDS[fleet_level])
    print(f"{answers[0].times:,} all_reduces")
    expect_none(nccl_group.faults("collective_wrong", [each.trouble for each in answers]))
