"""What a machine tells of the parts that an order is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.model.place import THIS_NODE, Where
from pytest_gpufleet.verdict.port_rules import active, gigabits

# A table of an order: all of it, or that of one kind of drives or ports.
Asked = Mapping[str, Any]
# Where, what is told there, and its value; Unavailable where the machine does not tell.
Told = tuple[Where, str, Any]
Read = Callable[[Machine, GpuTopology, Asked], Iterable[Told]]

# Makers count the gigabytes of a drive in one way (IDEMA LBA1-03): 3.84 TB are 3840.8 GB, 0.02 % more than the label
# says.
SIZE_OF_DRIVES = 0.01
GIB, GB = 1 << 30, 10**9


def of_host(fact: str, *keys: str) -> Read:
    def read(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
        return [(THIS_NODE, (keys or (fact,))[-1].replace("_", " "), _fact(machine, fact, *keys))]

    return read


def _fact(machine: Machine, fact: str, *keys: str) -> Any:
    value = machine.host.get(fact)
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else value
    return Unavailable("this system does not say", applicable=False) if value is None else value


def software(name: str, what: str) -> Read:
    def read(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
        return [(THIS_NODE, what, getattr(topology, name) or Unavailable("the driver does not say", applicable=False))]

    return read


def count_of_gpus(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
    """Also of those that are hidden from this run."""
    return [(THIS_NODE, "the number of GPUs", max(len(machine.present), len(machine.gpus)))]


def of_gpus(fact: str) -> Read:
    def read(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
        return [(gpu.place, fact, gpu[fact]) for gpu in machine.gpus]

    return read


def nvlinks(machine: Machine, topology: GpuTopology, asked: Asked) -> Iterator[Told]:
    for gpu in machine.gpus:
        states = gpu["nvlink_states"]
        if isinstance(states, Unavailable):
            yield gpu.place, "NVLinks", states if states.applicable else 0
        else:
            yield gpu.place, "the number of NVLinks that are up", states.count(1)


def gibibytes(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
    told = _fact(machine, "memory_bytes")
    shown = told if isinstance(told, Unavailable) else round(told / GIB, 1)
    return [(THIS_NODE, "the memory that the system has, in GiB,", shown)]


def modules(machine: Machine) -> list[Mapping[str, Any]] | Unavailable:
    """The memory modules that are there; empty slots are none."""
    told = _fact(machine, "memory_modules")
    return told if isinstance(told, Unavailable) else [each for each in told if each["bytes"] != 0]


def count_of_modules(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
    there = modules(machine)
    count = there if isinstance(there, Unavailable) else len(there)
    return [(THIS_NODE, "the number of memory modules", count)]


def size_of_modules(machine: Machine, topology: GpuTopology, asked: Asked) -> list[Told]:
    there = modules(machine)
    if isinstance(there, Unavailable):
        return [(THIS_NODE, "the size of memory modules", there)]
    unknown = Unavailable("the firmware does not know", applicable=False)
    return [
        (THIS_NODE, f"{each['locator']}, in GiB,", unknown if each["bytes"] is None else each["bytes"] / GIB)
        for each in there
    ]


def _drives(machine: Machine, kind: Asked) -> list[Mapping[str, Any]] | Unavailable:
    told = _fact(machine, "nvme")
    if isinstance(told, Unavailable):
        return told
    size = kind["gigabytes"]
    return [
        drive
        for drive in told
        if abs((drive["bytes"] or 0) / GB - size) <= SIZE_OF_DRIVES * size
        and kind.get("model", drive["model"]) == drive["model"]
    ]


def count_of_drives(machine: Machine, topology: GpuTopology, kind: Asked) -> list[Told]:
    there, what = _drives(machine, kind), " ".join(filter(None, (f"{kind['gigabytes']} GB", kind.get("model"))))
    count = there if isinstance(there, Unavailable) else len(there)
    return [(THIS_NODE, f"the number of NVMe drives of {what}", count)]


def firmware_of_drives(machine: Machine, topology: GpuTopology, kind: Asked) -> list[Told]:
    there = _drives(machine, kind)
    return [] if isinstance(there, Unavailable) else _firmware(there, "name")


def ports_of(machine: Machine, kind: Asked) -> list[Mapping[str, Any]]:
    return [port for port in machine.host.get("network_ports") or () if is_of(port, kind)]


def is_of(port: Mapping[str, Any], kind: Asked) -> bool:
    layer = port.get("link_layer")
    return bool(port.get("adapter") == kind["adapter"] and kind.get("link_layer", layer) == layer)


def kind_of_port(kind: Asked) -> str:
    return " ".join(filter(None, (kind["adapter"], kind.get("link_layer"))))


def count_of_ports(machine: Machine, topology: GpuTopology, kind: Asked) -> list[Told]:
    return [(THIS_NODE, f"the number of network ports of {kind_of_port(kind)}", len(ports_of(machine, kind)))]


def rate_of_ports(machine: Machine, topology: GpuTopology, kind: Asked) -> list[Told]:
    """Of those that are up: the others have the lowest rate that there is."""
    up = active(ports_of(machine, kind))
    if not up:
        return [(THIS_NODE, f"the speed of the ports of {kind_of_port(kind)}, of which none is up,", 0)]
    return [(THIS_NODE, f"the speed of {port['port']} in Gbit/s", gigabits(port)) for port in up]


def firmware_of_ports(machine: Machine, topology: GpuTopology, kind: Asked) -> list[Told]:
    return _firmware(ports_of(machine, kind), "port")


def _firmware(parts: Iterable[Mapping[str, Any]], name: str) -> list[Told]:
    unknown = Unavailable("this system does not say", applicable=False)
    return [(THIS_NODE, f"firmware of {each[name]}", each.get("firmware") or unknown) for each in parts]
