"""Load that lasts on all nodes, with communication between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_gpufleet import Judge, Measurement, World

pytestmark = [
    pytest.mark.chapter("Between nodes: endurance", "Did all nodes stay sound and fast under load together?"),
    pytest.mark.needs(nodes=2),
]


@pytest.mark.level("burnin")
@pytest.mark.figures("burn_retention", "burn_power", "gemm")
def test_burn_in_of_all_nodes(nccl_group: World, burn_in: Callable[[World], list[Measurement]], judge: Judge) -> None:
    """All nodes work at full load together for as long as was asked for, without a wrong bit, a fault or a slowdown

    Matrix products, reductions over all GPUs of all nodes, patterns in all free memory and training of one network on
    all nodes take turns. Every result is compared with the first, bit for bit, and the health of all GPUs is read after
    every turn. It loads power and cooling of the whole room, and the network between turns. What fails here and not in
    the burn-in of each node alone: look at the supply and the air of those racks, then at the network.
    """
    products, *rest = burn_in(nccl_group)
    judge(*rest, shown=[products], required=False)
