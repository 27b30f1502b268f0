"""What evidence says against itself about the order that its machine was held against."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpufleet import __version__
from pytest_gpufleet.model.levels import case_name
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.orders import order_file
from pytest_gpufleet.verdict.orders.order_lines import ORDER_LINES, Held, asks, held_against
from pytest_gpufleet.verdict.orders.written_order import machine_of

AS_ORDERED = "test_1_order.py::test_as_ordered"


def of_order(record: Record) -> Iterator[str]:
    """The order is the one that the run names, and what passed by it does so by the facts that are here."""
    order, run = record.order, record.run
    if (order and (order.file, order.sha256)) != ((run.order, run.order_sha256) if run.order else None):
        yield "the order that it holds is not the one that it names"
    if order is None:
        return
    try:
        order_file.check(order)
    except ValueError as error:
        yield f"what it holds as an order is none: {error}"
        return
    if record.of_cluster or run.rehearsal or record.run.plugin != __version__:
        return
    outcomes = {case_name(check.id): check.outcome for check in record.checks.values()}
    machine = machine_of(record)
    for line in ORDER_LINES:
        outcome = outcomes.get(f"{AS_ORDERED}[{line}]")
        if outcome == "not applicable" and asks(order, line):
            yield f"the order has {line}, but its check was not applicable"
        elif outcome == "passed" and held_against(order, line, machine, record.topology) != Held():
            yield f"{line} is not as ordered, but its check passed"
