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
    """Every element of a collective's result over all GPUs of all nodes is exactly right

    The data are such that a swapped, lost, doubled or flipped element changes the result. Wrong here, and right on
    every node alone: the way between nodes corrupts data (network adapter, GPUDirect RDMA, switch), and training on
    these nodes goes wrong silently. The first line names the node, as far as leaving out one after the other can tell.
    Look at the errors of its ports (`perfquery`, `mlxlink`), at its PCIe errors, and at IOMMU and ACS settings.
    """
    operation = "sum" if COLLECTIVES[collective].reduces else ""
    deliveries = nccl_group.run(exactness.exchange, collective, operation, dtypes=DTYPES)
    if any(delivery.wrong for delivery in deliveries):
        expect_none([who_corrupts(nccl_group, deliveries, collective, operation, dtypes=DTYPES)])


@pytest.mark.level("standard")
def test_rails_are_exact(nccl_group: World) -> None:
    """all_reduce is exact among GPUs of the same index on all nodes, while all rails do so at the same time

    Data parallelism makes such groups wherever tensor parallelism fills a node. Wrong on one rail only: look at the
    network adapters next to those GPUs, and at the switch of that rail.
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
    """Every one of many large all_reduces in a row over all nodes is exactly right

    Finds what goes wrong rarely: an adapter or a cable that corrupts one transfer in a thousand. If all GPUs are named,
    one of them spoils everybody's sum: look at the errors that the ports of each node have counted.
    """
    answers = nccl_group.run(exactness.stays_exact, SECONDS[fleet_level])
    print(f"{answers[0][0]:,} all_reduces")
    expect_none(nccl_group.faults("collective_wrong", [wrong for _, wrong in answers]))
