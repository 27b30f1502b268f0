"""What may stand in an order, and how it is read.

A value is what the machine must have; in the place of a number or a version, `{ at_least = 8 }` is what it must have at
the least.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.order_given import Order
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.toml_table import FileError, table_type

MOST = 10**9
_Whole = Annotated[int, Meta(ge=0, le=MOST)]
_Filled = Annotated[str, Meta(pattern=r"\S")]
AtLeastNumber = table_type("AtLeastNumber", {"at_least": _Whole})
AtLeastVersion = table_type("AtLeastVersion", {"at_least": _Filled})
# An error says that a value must be what the description of its type says.
Text = Annotated[str, Meta(pattern=r"\S", description="a text that is not empty")]
Number = Annotated[
    _Whole | AtLeastNumber,  # type: ignore[valid-type]
    Meta(description="a whole number, or { at_least = a whole number }"),
]
Size = Annotated[int, Meta(ge=1, le=MOST, description="a whole number above 0")]
Version = Annotated[
    _Filled | AtLeastVersion,  # type: ignore[valid-type]
    Meta(description="a version as a text, or { at_least = a version as a text }"),
]

DriveTable = table_type("Drives", {"gigabytes": Size, "count": Number}, {"model": Text, "firmware": Version})
PortTable = table_type(
    "Ports",
    {"adapter": Text, "count": Number},
    {"link_layer": Text, "in_use": Number, "gigabits_per_second": Number, "firmware": Version},
)
OrderTable = table_type(
    "Order",
    {"name": Text},
    {
        "machine": table_type("OrderedMachine", {}, {"vendor": Text, "product": Text}),
        "gpus": table_type("OrderedGpus", {}, {"count": Number, "model": Text, "nvlinks": Number, "vbios": Version}),
        "processors": table_type("OrderedProcessors", {}, {"model": Text, "sockets": Number, "cores": Number}),
        "memory": table_type("OrderedMemory", {}, {"gibibytes": Number, "modules": Number, "module_gibibytes": Number}),
        "drives": list[DriveTable],  # type: ignore[valid-type]
        "ports": list[PortTable],  # type: ignore[valid-type]
        "firmware": table_type("OrderedFirmware", {}, {"bios": Version, "bmc": Version}),
        "software": table_type(
            "OrderedSoftware", {}, {"system": Text, "kernel": Version, "driver": Version, "cuda": Version}
        ),
    },
)


def load(path: Path) -> Order:
    """Read an order from a TOML file and check all of it. FileError for a file that cannot be read, a key that nothing
    reads, a value of another type, two tables for one kind of part, or an order of nothing."""
    top = toml_table.read(path)
    top.check(OrderTable)
    seen: dict[tuple[str, ...], int] = {}
    for key, kind in (("drives", ("gigabytes", "model")), ("ports", ("adapter", "link_layer"))):
        for number, table in enumerate(top.tables(key), 1):
            what = (key, *(str(table.values.get(each, "")) for each in kind))
            if seen.setdefault(what, number) != number:
                raise table.error(f"is of one kind with {key} {seen[what]}; write one table with the sum of both.")
    content = {key: value for key, value in top.values.items() if value}
    if content.keys() <= {"name"}:
        raise FileError(f"{path}: orders nothing; write what was bought, as in docs/orders.md.")
    return Order(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), content)


def check(order: Order) -> None:
    """ValueError if what evidence keeps as an order is none."""
    msgspec.convert(order.content, OrderTable)
