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
    """Burn-in of all nodes: full load without errors or slowdown

    Matmuls, reductions over all nodes, memory patterns and training of one network take turns for as long as was asked
    for. Every result is compared bit for bit, and health is read after every turn. It loads power and cooling of the
    whole room. What fails here and not in the burn-in of each node: check power and air of those racks, then the
    network.
    """
    matmuls, *rest = burn_in(nccl_group)
    judge(*rest, shown=[matmuls], required=False)
