"""The lines of an order, each compared with what is known of a machine."""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from pytest_gpufleet.machine import host
from pytest_gpufleet.machine.bmc import BMC_FIRMWARE
from pytest_gpufleet.machine.disks import NVME, Drive
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.machine.memory import MEMORY_MODULES
from pytest_gpufleet.machine.network_ports import NETWORK_PORTS, Port, active
from pytest_gpufleet.machine.nvlink_domain import IMEX
from pytest_gpufleet.machine.processors import PROCESSOR, PROCESSOR_SETUP
from pytest_gpufleet.machine.tools import HostFact
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE, GpuTopology, Missing, Where, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.redaction import one_line
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.toml_table import FileError, Text, table_type

# What may stand in an order. A value is what the machine must have; in the place of a number or a version,
# `{ at_least = 8 }` is what it must have at the least.
MOST = 10**9
_Whole = Annotated[int, Meta(ge=0, le=MOST)]
AtLeastNumber = table_type("AtLeastNumber", {"at_least": _Whole})
AtLeastVersion = table_type("AtLeastVersion", {"at_least": Text})
Number = Annotated[
    _Whole | AtLeastNumber,  # type: ignore[valid-type]
    Meta(description="a whole number, or { at_least = a whole number }"),
]
Size = Annotated[int, Meta(ge=1, le=MOST, description="a whole number above 0")]
Version = Annotated[
    Text | AtLeastVersion,  # type: ignore[valid-type]
    Meta(description="a version as a text, or { at_least = a version as a text }"),
]

# A table of an order: all of it, or that of one kind of drives or ports.
Asked = Mapping[str, Any]
# One value of the machine, or those of its GPUs by their places, or of its parts by their names; Missing or None where
# it is not known.
Read = Callable[[Machine, GpuTopology, Asked], Any]
Are = Callable[[Any, Asked], bool]  # which of the parts that a fact lists a table of the order is about

# Makers count the gigabytes of a drive in one way (IDEMA LBA1-03): 3.84 TB are 3840.8 GB, 0.02 % more than the label
# says.
SIZE_OF_DRIVES = 0.01
GIB, GB = 1 << 30, 10**9
UNKNOWN = Missing("this system does not say", absent=True)


def of_host(fact: HostFact[Any], read: Callable[[Any], Any] = lambda found: found, are: Are | None = None) -> Read:
    def values(machine: Machine, topology: GpuTopology, asked: Asked) -> Any:
        if isinstance(found := fact.of(machine.host), Missing):
            return found
        return read([each for each in found if are(each, asked)] if are else found)

    return values


def of_gpus(fact: str) -> Read:
    return lambda machine, topology, asked: [(gpu.place, gpu[fact]) for gpu in machine.gpus]


def nvlinks(machine: Machine, topology: GpuTopology, asked: Asked) -> Iterator[tuple[Where, Any]]:
    for gpu in machine.gpus:
        states = gpu["nvlink_states"]
        known = 0 if isinstance(states, Missing) and states.absent else states
        yield gpu.place, known if isinstance(known, Missing | int) else known.count(1)


def is_drive(drive: Drive, kind: Asked) -> bool:
    size = kind["gigabytes"]
    of_size = abs((drive.bytes or 0) / GB - size) <= SIZE_OF_DRIVES * size
    return bool(of_size and kind.get("model", drive.model) == drive.model)


def is_of(port: Port, kind: Asked) -> bool:
    return bool(port.adapter == kind["adapter"] and kind.get("link_layer", port.link_layer) == port.link_layer)


def called(kind: Asked) -> str:
    """A kind of drives or ports: "7680 GB KIOXIA KCD8XPUG7T68", "MT4129 InfiniBand"; "" of anything else."""
    if "gigabytes" in kind:
        return " ".join(filter(None, (f"{kind['gigabytes']} GB", kind.get("model"))))
    return " ".join(filter(None, (kind.get("adapter"), kind.get("link_layer"))))


of_modules = partial(of_host, MEMORY_MODULES, are=lambda module, asked: module.bytes != 0)  # as of an empty slot
of_drives, of_ports = partial(of_host, NVME, are=is_drive), partial(of_host, NETWORK_PORTS, are=is_of)


# Of the memory that was bought the kernel keeps a part for itself, and so does the firmware: 64 of 4096 bytes for the
# description of each page (struct page, include/linux/mm_types.h), which is 1.6 %, and what is kept for crash dumps. A
# module that is missing is more: of 32 modules 3.1 %.
VISIBLE_MEMORY = 0.97
HOST, GPUS, PORTS = "host_not_as_ordered", "gpus_not_as_ordered", "ports_not_as_ordered"
VERSION = "version_not_as_ordered"


@dataclass(frozen=True)
class Line:
    """`code`: of the fault where a machine has it otherwise. `what`: the value in words."""

    code: str
    what: str
    read: Read
    fits: Callable[[Any, Any], bool]

    def values(self, machine: Machine, topology: GpuTopology, kind: Asked) -> Iterator[tuple[Where, str, Any]]:
        """Where, what is read there, and its value; Missing where it is not known."""
        found = self.read(machine, topology, kind)
        what = " of ".join(filter(None, (self.what, called(kind))))
        for at, value in [(THIS_NODE, found)] if isinstance(found, Missing | str | float | int | None) else found:
            known = UNKNOWN if value in (None, "") else value
            yield (at, what, known) if isinstance(at, Where) else (THIS_NODE, f"{self.what} of {at}", known)


def asks(order: Order, key: str) -> bool:
    return any(_asked(order, key))


def held_against(order: Order, key: str, machine: Machine, topology: GpuTopology) -> tuple[list[Fault], list[str]]:
    """A machine against one line of an order: the faults, and what is not known, and why. KeyError without the line."""
    line, faults, unknown = ORDER_LINES[key], [], []
    for table, asked in _asked(order, key):
        values = [*line.values(machine, topology, table)]
        unknown += [] if values else [f"{line.what} is not known: there is none"]
        for where, what, value in values:
            if isinstance(value, Missing):
                unknown.append(f"{what} is not known: {value}")
            elif not line.fits(value, asked):
                faults.append(Fault(line.code, (where,), f"{what} is {value}, ordered: {_words(asked)}"))
    return faults, unknown


def ports_down(order: Order | None, there: Iterable[Port]) -> list[Fault]:
    """Ports that are not up although the order says that as many are in use, or that many are there."""
    found = []
    for kind in order.content.get("ports", ()) if order else ():
        of_kind = [port for port in there if is_of(port, kind)]
        asked, up = kind.get("in_use", kind["count"]), active(of_kind)
        for port in of_kind if len(up) < _least(asked) else ():
            if port not in up:
                what = f"{port.port} is {port.state}, and {_words(asked)} of {called(kind)} were ordered"
                found.append(Fault("network_port_unlike_others", (THIS_NODE,), what))
    return found


def rates_of_ports(order: Order | None) -> list[float]:
    """Those that the order says, in Gbit/s."""
    kinds = order.content.get("ports", ()) if order else ()
    return [_least(kind["gigabits_per_second"]) for kind in kinds if "gigabits_per_second" in kind]


def nodes_of_domain(order: Order | None) -> int:
    """How many nodes an NVLink domain has by the order; 0 if it does not say."""
    return int(_least(order.content.get("domain", {}).get("nodes", 0))) if order else 0


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


# Whether a value is as asked for.


def _number(value: float, asked: Any) -> bool:
    return bool(value >= asked["at_least"] if isinstance(asked, Mapping) else value == asked)


def _text(value: str, asked: str) -> bool:
    return " ".join(value.split()) == " ".join(asked.split())


def _version(value: str, asked: Any) -> bool:
    if not isinstance(asked, Mapping):
        return _text(value, asked)
    has, least = (re.findall(r"[0-9A-Za-z]+", version) for version in (value, asked["at_least"]))
    for one, other in zip(has, least, strict=False):
        # 159 is later than 95, and A5 of a VBIOS than 99, which are hexadecimal numbers of two digits.
        here, there = (int(one), int(other)) if one.isdecimal() and other.isdecimal() else (one, other)
        if here != there:
            return bool(here > there)
    return len(has) >= len(least)


def _memory(value: float, asked: Any) -> bool:
    least = _least(asked)
    enough = value >= min(VISIBLE_MEMORY * least, least - 1)  # gibibytes are rounded
    return bool(enough and (isinstance(asked, Mapping) or value <= least))


# In the order in which a person reads an order.
ORDER_LINES = {
    "machine.vendor": Line(HOST, "vendor", of_host(host.DMI, attrgetter("vendor")), _text),
    "machine.product": Line(HOST, "product", of_host(host.DMI, attrgetter("product")), _text),
    # Also those that are hidden from this run.
    "gpus.count": Line(GPUS, "the number of GPUs", lambda here, *_: max(len(here.present), len(here.gpus)), _number),
    "gpus.model": Line(GPUS, "name", of_gpus("name"), _text),
    "gpus.nvlinks": Line(GPUS, "the number of NVLinks that are up", nvlinks, _number),
    "gpus.vbios": Line(VERSION, "VBIOS", of_gpus("vbios"), _version),
    "domain.nodes": Line("nvlink_domain_incomplete", "the number of nodes in the list of IMEX",
                         of_host(IMEX, lambda imex: len(imex.nodes)), _number),
    "processors.model": Line(HOST, "model of the processors", of_host(PROCESSOR, attrgetter("model")), _text),
    "processors.sockets": Line(HOST, "the number of sockets", of_host(PROCESSOR_SETUP, attrgetter("sockets")), _number),
    "processors.cores": Line(HOST, "the number of cores", of_host(PROCESSOR, attrgetter("cores")), _number),
    "memory.gibibytes": Line(HOST, "the memory that the system has, in GiB,",
                             of_host(host.MEMORY_BYTES, lambda total: round(total / GIB, 1)), _memory),
    "memory.modules": Line(HOST, "the number of memory modules", of_modules(len), _number),
    "memory.module_gibibytes": Line(
        HOST, "the size in GiB",
        of_modules(lambda all: [(each.locator, each.bytes and each.bytes / GIB) for each in all]), _number,
    ),
    "drives.count": Line("drives_not_as_ordered", "the number of NVMe drives", of_drives(len), _number),
    "drives.firmware": Line(VERSION, "firmware", of_drives(partial(map, attrgetter("name", "firmware"))), _version),
    "ports.count": Line(PORTS, "the number of network ports", of_ports(len), _number),
    # Of those that are up: the others have the lowest rate that there is. 0 if none is.
    "ports.gigabits_per_second": Line(
        PORTS, "the speed in Gbit/s",
        of_ports(lambda all: [(each.port, each.gigabits) for each in active(all)] or 0), _number,
    ),
    "ports.firmware": Line(VERSION, "firmware", of_ports(partial(map, attrgetter("port", "firmware"))), _version),
    "firmware.bios": Line(VERSION, "BIOS", of_host(host.DMI, attrgetter("bios_version")), _version),
    "firmware.bmc": Line(VERSION, "BMC firmware", of_host(BMC_FIRMWARE), _version),
    "software.system": Line(VERSION, "system", of_host(host.SYSTEM), _text),
    "software.kernel": Line(VERSION, "kernel", of_host(host.KERNEL), _version),
    "software.driver": Line(VERSION, "driver", lambda here, topology, *_: topology.driver, _version),
    "software.cuda": Line(VERSION, "CUDA", lambda here, topology, *_: topology.cuda_driver, _version),
}  # fmt: skip


# How each of them is written.
_WRITTEN = {_text: Text, _number: Number, _memory: Number, _version: Version}


def _table(name: str, required: Mapping[str, Any] = {}, optional: Mapping[str, Any] = {}) -> Any:
    """The type of a table: with these keys, and those of its lines."""
    lines = {key.partition(".")[2]: _WRITTEN[line.fits] for key, line in ORDER_LINES.items() if key.startswith(name)}
    return table_type(name, required, {**optional, **{key: kind for key, kind in lines.items() if key not in required}})


_PARTS = {
    "drives": _table("drives", {"gigabytes": Size, "count": Number}, {"model": Text}),
    "ports": _table("ports", {"adapter": Text, "count": Number}, {"link_layer": Text, "in_use": Number}),
}
OrderTable = table_type(
    "Order",
    {"name": Text},
    {
        name: list[_PARTS[name]] if name in _PARTS else _table(name)  # type: ignore[valid-type]
        for name in dict.fromkeys(key.partition(".")[0] for key in ORDER_LINES)
    },
)


# Of each table that is there for each kind: the fact of the host that has them, and by what kinds differ.
KINDS: dict[str, tuple[HostFact[Any], tuple[str, str]]] = {
    "drives": (NVME, ("gigabytes", "model")), "ports": (NETWORK_PORTS, ("adapter", "link_layer")),
}  # fmt: skip


def load(path: Path) -> Order:
    """Read an order from a TOML file and check all of it. FileError for a file that cannot be read, a key that nothing
    reads, a value of another type, two tables for one kind of part, or an order of nothing."""
    top = toml_table.read(path)
    top.check(OrderTable)
    seen: dict[tuple[str, ...], int] = {}
    for key, (_, kind) in KINDS.items():
        for number, table in enumerate(top.tables(key), 1):
            what = (key, *(str(table.values.get(each, "")) for each in kind))
            if seen.setdefault(what, number) != number:
                raise table.error(f"is of one kind with {key} {seen[what]}; write one table with the sum of both.")
    content = {key: value for key, value in top.values.items() if value}
    if content.keys() <= {"name"}:
        raise FileError(f"{path}: orders nothing; write what was bought, as in docs/orders.md.")
    return Order(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), content)


HEAD = """\
# What was bought, for --fleet-order: written from {run} of {utc} on {host}.
# Compare it with the order before it is used: it says what that machine has, and not what it should have.
# In the place of a number or a version, {{ at_least = ... }} asks for that or more. What is left out is not asked for.
"""


def order_text(record: Record, run: str) -> str:
    """An order as TOML that this machine meets; what is not known or differs is a comment. `run`: its folder's name."""
    import tomli_w

    topology, product = record.topology, getattr(host.DMI.of(record.machine.host), "product", None)
    machine = Machine(topology.gpus, record.machine.host, present=("",) * record.run.gpus_present)
    models = " and ".join(sorted({gpu.name for gpu in machine.gpus}))
    content: dict[str, Any] = {"name": str(product or f"{len(machine.gpus)} x {models}")}
    left_out: dict[str, str] = {}
    for name, keys in grouped((key.partition(".")[0], key) for key in ORDER_LINES).items():
        tables = _kinds(name, machine) if name in KINDS else [{}]
        left_out |= {} if tables else {name: "none are known"}
        for table in tables:
            values = {key: _value(key, machine, topology, table) for key in keys}
            missing = {key: str(value) for key, value in values.items() if isinstance(value, Missing)}
            left_out |= missing if name not in KINDS else {}
            known = {key: value for key, value in values.items() if key not in missing and value != ""}
            table |= {key.partition(".")[2]: value for key, value in known.items()}
        content[name] = tables if name in KINDS else tables[0]
    head = HEAD.format(run=one_line(run), utc=record.run.utc, host=one_line(record.run.host))
    remarks = "".join(f"# {key}: {one_line(why)}\n" for key, why in left_out.items())
    return f"{head}{remarks}\n{tomli_w.dumps({key: value for key, value in content.items() if value})}"


def _value(key: str, machine: Machine, topology: GpuTopology, table: Asked) -> str | int | Missing:
    values = [value for _, _, value in ORDER_LINES[key].values(machine, topology, table)]
    why = next((str(value) for value in values if isinstance(value, Missing)), "")
    if why or not values:
        return Missing(f"not known{why and f', {why}'}")
    if key == "memory.gibibytes":  # what the modules have together where that is known, else what the kernel has of it
        slots = MEMORY_MODULES.of(machine.host)
        sizes = [] if isinstance(slots, Missing) else [each.bytes for each in slots if each.bytes != 0]
        values = [sum(filter(None, sizes)) // GIB if sizes and None not in sizes else math.ceil(values[0])]
    if any(value != values[0] for value in values):
        return Missing(f"not all alike, {', '.join(map(str, dict.fromkeys(values)))}")
    if isinstance(values[0], float) and not values[0].is_integer():
        return Missing(f"no whole number, {values[0]:g}")
    return values[0] if isinstance(values[0], str) else int(values[0])


def _kinds(name: str, machine: Machine) -> list[dict[str, Any]]:
    """The kinds of drives or ports that are here, but for those of which nobody knows the size or the adapter."""
    fact, names = KINDS[name]
    if isinstance(there := fact.of(machine.host), Missing):
        return []
    if name == "drives":
        kinds = {(max(1, each.bytes // GB), each.model or "") for each in there if each.bytes}
    else:
        kinds = {(each.adapter, each.link_layer or "") for each in there if each.adapter}
    found = [{key: value for key, value in zip(names, kind, strict=True) if value} for kind in sorted(kinds)]
    if name == "ports":
        for kind in found:
            kind["in_use"] = len(active(port for port in there if is_of(port, kind)))
    return found
