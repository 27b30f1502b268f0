"""Collectives across nodes deliver exactly the right data."""

from __future__ import annotations

import pytest
import torch

from pytest_gpufleet import Size, World, expect_none
from pytest_gpufleet.probes.between_nodes import rails_of
from pytest_gpufleet.probes.collectives import exactness
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.search.collective import who_corrupts

pytestmark = [
    pytest.mark.chapter("Between nodes: exactness", "Do nodes exchange data without changing a single bit?"),
    pytest.mark.needs(nodes=2),
]

DTYPES = [torch.float32, torch.bfloat16]
SECONDS = {"standard": Size(3.0, rehearsal=0.1), "burnin": Size(60.0, rehearsal=0.1)}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_of_all_nodes_is_exact(nccl_group: World, collective: str) -> None:
    """Collectives over all nodes are exact

    Compares every element with the known result. Wrong here and right on each node alone: the path between nodes
    corrupts data (network adapter, GPUDirect RDMA, switch). The first line names the node, as far as leaving out one
    after the other can find it. Check the errors of its ports (`perfquery`, `mlxlink`), its PCIe errors, and IOMMU and
    ACS settings.
    """
    operation = "sum" if COLLECTIVES[collective].reduces else ""
    deliveries = nccl_group.run(exactness.exchange, collective, operation, dtypes=DTYPES)
    if any(delivery.wrong for delivery in deliveries):
        expect_none([who_corrupts(nccl_group, deliveries, collective, operation, dtypes=DTYPES)])


@pytest.mark.level("standard")
def test_rails_are_exact(nccl_group: World) -> None:
    """all_reduce on all rails at once is exact

    GPUs of the same index on all nodes reduce, while all rails do so at the same time, as data parallel training does.
    Wrong on one rail only: check the adapters next to those GPUs and the switch of that rail.
    """
    rails = [nccl_group.subset(ranks) for ranks in rails_of(nccl_group)]
    by_rail = nccl_group.each(rails, exactness.exchange, "all_reduce", "sum", dtypes=[torch.float32])
    expect_none(
        who_corrupts(rail, deliveries, "all_reduce", "sum", dtypes=[torch.float32])
        for rail, deliveries in zip(rails, by_rail, strict=True)
        if any(delivery.wrong for delivery in deliveries)
    )


@pytest.mark.level("standard")
def test_all_reduce_of_all_nodes_stays_exact(nccl_group: World, fleet_level: str) -> None:
    """Many all_reduces in a row over all nodes are exact

    Finds rare errors: an adapter or a cable that corrupts one transfer in a thousand. If all GPUs are named, one of
    them corrupts the sum of all: check the errors that the ports of each node counted.
    """
    answers = nccl_group.run(exactness.stays_exact, SECONDS[fleet_level])
    print(f"{answers[0].times:,} all_reduces")
    expect_none(nccl_group.faults("collective_wrong", [each.trouble for each in answers]))
