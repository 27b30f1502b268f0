"""Whether the machine is the one that was bought, line by line of the order."""

from __future__ import annotations

import pytest

from pytest_gpufleet import GpuTopology, LiveMachine, expect_none, not_applicable, not_judged
from pytest_gpufleet.model.endings import NO_ORDER
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.verdict import orders

pytestmark = [
    pytest.mark.chapter("Order", "Is this the machine that was bought?"),
    pytest.mark.proves_sound,
    pytest.mark.needs(gpus=True),
]


@pytest.mark.parametrize("line", orders.ORDER_LINES)
def test_as_ordered(machine: LiveMachine, gpu_topology: GpuTopology, fleet_order: Order | None, line: str) -> None:
    """Each line of the order (--fleet-order) is met

    No speed test finds a part that is missing, of another model or with other firmware. The message names the part,
    what was found and what was ordered. Compare with the order and the delivery note: reseat missing parts, have wrong
    models exchanged, install the agreed firmware and software. If the order is wrong, correct its file. A part that
    cannot be read here leaves the verdict INCOMPLETE: run as root (memory modules), on the host instead of a virtual
    machine or container, or remove the line.
    """
    if fleet_order is None:
        not_applicable(NO_ORDER)
    if not orders.asks(fleet_order, line):
        not_applicable(f"{fleet_order.file} does not say anything of it")
    faults, unknown = orders.held_against(fleet_order, line, machine, gpu_topology)
    expect_none(faults)
    if unknown:
        not_judged("\n".join(unknown))
