"""The lines of an order, each held against what a machine tells of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.model.order_given import Order
from pytest_gpufleet.model.place import THIS_NODE
from pytest_gpufleet.verdict.orders import ordered_parts as parts
from pytest_gpufleet.verdict.orders.ordered_parts import Asked, Read, is_of, kind_of_port
from pytest_gpufleet.verdict.port_rules import active

# Of the memory that was bought the kernel keeps a part for itself, and so does the firmware: 64 of 4096 bytes for the
# description of each page (struct page, include/linux/mm_types.h), which is 1.6 %, and what is kept for crash dumps. A
# module that is missing is more: of 32 modules 3.1 %.
VISIBLE_MEMORY = 0.97
HOST, GPUS, PORTS = "host_not_as_ordered", "gpus_not_as_ordered", "ports_not_as_ordered"
VERSION = "version_not_as_ordered"


@dataclass(frozen=True)
class Line:
    """`code`: of the fault where a machine has it otherwise."""

    code: str
    read: Read
    fits: Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Held:
    """What came of one line. `untold`: what the machine does not tell, and why."""

    faults: tuple[Fault, ...] = ()
    untold: tuple[str, ...] = ()


def asks(order: Order, key: str) -> bool:
    """Whether an order says anything of this key of ORDER_LINES."""
    return any(_asked(order, key))


def held_against(order: Order, key: str, machine: Machine, topology: GpuTopology) -> Held:
    """A machine against one line of an order. KeyError if there is no such line."""
    line, faults, untold = ORDER_LINES[key], [], []
    for table, asked in _asked(order, key):
        for where, what, value in line.read(machine, topology, table):
            if isinstance(value, Unavailable):
                untold.append(f"{what} is not told: {value}")
            elif not line.fits(value, asked):
                faults.append(Fault(line.code, (where,), f"{what} is {value}, ordered: {_words(asked)}"))
    return Held(tuple(faults), tuple(untold))


def ports_down(order: Order | None, ports: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """Ports that are not up although the order says that as many are in use, or that many are there."""
    found = []
    for kind in order.content.get("ports", ()) if order else ():
        of_kind = [port for port in ports if is_of(port, kind)]
        asked, up = kind.get("in_use", kind["count"]), active(of_kind)
        if not _number(len(up), {"at_least": _least(asked)}):
            found += [
                Fault(
                    "network_port_unlike_others", (THIS_NODE,),
                    f"{port['port']} is {port['state']}, and {_words(asked)} of {kind_of_port(kind)} were ordered",
                )
                for port in of_kind if port not in up
            ]  # fmt: skip
    return found


def _asked(order: Order, key: str) -> Iterator[tuple[Asked, Any]]:
    """Each table of the order that has this key, with its value there."""
    name, _, field = key.partition(".")
    tables = order.content.get(name, ())
    for table in [tables] if isinstance(tables, Mapping) else tables:
        if field in table:
            yield table, table[field]


def _words(asked: Any) -> str:
    return f"at least {asked['at_least']}" if isinstance(asked, Mapping) else str(asked)


def _least(asked: Any) -> Any:
    return asked["at_least"] if isinstance(asked, Mapping) else asked


# ---- whether a value is as asked for


def _number(value: float, asked: Any) -> bool:
    return bool(value >= asked["at_least"] if isinstance(asked, Mapping) else value == asked)


def _text(value: str, asked: str) -> bool:
    return " ".join(value.split()) == " ".join(asked.split())


def _version(value: str, asked: Any) -> bool:
    if not isinstance(asked, Mapping):
        return _text(value, asked)
    has, least = (re.findall(r"[0-9A-Za-z]+", version) for version in (value, asked["at_least"]))
    for one, other in zip(has, least, strict=False):
        if later := _later(one, other):
            return later > 0
    return len(has) >= len(least)


def _later(one: str, other: str) -> int:
    """Above 0 if a part of a version is later than another, below 0 if it is earlier: 159 is later than 95, and A5 of a
    VBIOS than 99, which are hexadecimal numbers of two digits."""
    if one.isdecimal() and other.isdecimal():
        return int(one) - int(other)
    return (one > other) - (one < other)


def _memory(value: float, asked: Any) -> bool:
    least = _least(asked)
    enough = value >= min(VISIBLE_MEMORY * least, least - 1)  # gibibytes are rounded
    return bool(enough and (isinstance(asked, Mapping) or value <= least))


# In the order in which a person reads an order.
ORDER_LINES = {
    "machine.vendor": Line(HOST, parts.of_host("dmi", "vendor"), _text),
    "machine.product": Line(HOST, parts.of_host("dmi", "product"), _text),
    "gpus.count": Line(GPUS, parts.count_of_gpus, _number),
    "gpus.model": Line(GPUS, parts.of_gpus("name"), _text),
    "gpus.nvlinks": Line(GPUS, parts.nvlinks, _number),
    "gpus.vbios": Line(VERSION, parts.of_gpus("vbios"), _version),
    "processors.model": Line(HOST, parts.of_host("processor", "model"), _text),
    "processors.sockets": Line(HOST, parts.of_host("processor_setup", "sockets"), _number),
    "processors.cores": Line(HOST, parts.of_host("processor", "cores"), _number),
    "memory.gibibytes": Line(HOST, parts.gibibytes, _memory),
    "memory.modules": Line(HOST, parts.count_of_modules, _number),
    "memory.module_gibibytes": Line(HOST, parts.size_of_modules, _number),
    "drives.count": Line("drives_not_as_ordered", parts.count_of_drives, _number),
    "drives.firmware": Line(VERSION, parts.firmware_of_drives, _version),
    "ports.count": Line(PORTS, parts.count_of_ports, _number),
    "ports.gigabits_per_second": Line(PORTS, parts.rate_of_ports, _number),
    "ports.firmware": Line(VERSION, parts.firmware_of_ports, _version),
    "firmware.bios": Line(VERSION, parts.of_host("dmi", "bios_version"), _version),
    "firmware.bmc": Line(VERSION, parts.of_host("bmc_firmware"), _version),
    "software.system": Line(VERSION, parts.of_host("system"), _text),
    "software.kernel": Line(VERSION, parts.of_host("kernel"), _version),
    "software.driver": Line(VERSION, parts.software("driver", "driver"), _version),
    "software.cuda": Line(VERSION, parts.software("cuda_driver", "CUDA"), _version),
}
