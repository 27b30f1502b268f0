"""The order that a recorded machine meets, as the text of a TOML file."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.orders.order_lines import ORDER_LINES
from pytest_gpufleet.verdict.orders.ordered_parts import GB, GIB, modules
from pytest_gpufleet.verdict.port_rules import active, gigabits

HEAD = """\
# What was bought, for --fleet-order: written from {run} of {utc} on {host}.
# Compare it with the order before it is used: it says what that machine has, and not what it should have.
# In the place of a number or a version, {{ at_least = ... }} asks for that or more. What is left out is not asked for.
"""
# Of each table that is there for each kind: the fact of the host that tells them.
KINDS = {"drives": "nvme", "ports": "network_ports"}
Kind = dict[str, Any]


def machine_of(record: Record) -> Machine:
    """What the record of a run on one machine has of it."""
    present = ("",) * record.run.gpus_present
    return Machine(record.topology.gpus, record.machine.host, record.machine.taken, present=present)


def order_text(record: Record, run: str) -> str:
    """An order as TOML that this machine meets: what it does not tell, and what differs among its GPUs, is a comment.
    `run`: the name of the run's folder."""
    import tomli_w

    machine, topology = machine_of(record), record.topology
    content: dict[str, Any] = {"name": _name(machine)}
    left_out: dict[str, str] = {}
    for key in ORDER_LINES:
        table, _, field = key.partition(".")
        try:
            if table in KINDS:
                content[table] = _kinds(table, machine)
            else:
                content.setdefault(table, {})[field] = _value(key, machine, topology)
        except _LeftOut as why:
            left_out[table if table in KINDS else key] = str(why)
    head = HEAD.format(run=_line(run), utc=record.run.utc, host=_line(record.run.host))
    remarks = "".join(f"# {key}: {_line(why)}\n" for key, why in left_out.items())
    return f"{head}{remarks}\n{tomli_w.dumps({key: value for key, value in content.items() if value})}"


def _line(text: str) -> str:
    """As a comment can have it."""
    return " ".join(text.split())


class _LeftOut(Exception):
    """Why there is nothing to ask for."""


def _name(machine: Machine) -> str:
    dmi = machine.host.get("dmi")
    called = dmi.get("product") if isinstance(dmi, Mapping) else None
    models = sorted({gpu.name for gpu in machine.gpus})
    return str(called or f"{len(machine.gpus)} x {' and '.join(models)}")


def _value(key: str, machine: Machine, topology: GpuTopology) -> str | int:
    values = [value for _, _, value in ORDER_LINES[key].read(machine, topology, {})]
    why = next((str(value) for value in values if isinstance(value, Unavailable)), "")
    if why or not values:
        raise _LeftOut(f"not told{why and f', {why}'}")
    if key == "memory.gibibytes":
        values = [_installed(machine, values[0])]
    if any(value != values[0] for value in values):
        raise _LeftOut(f"not all alike, {', '.join(map(str, dict.fromkeys(values)))}")
    return values[0] if isinstance(values[0], str) else round(values[0])


def _installed(machine: Machine, visible: float) -> int:
    """GiB: what the modules have together where they are told, else what the kernel has of it."""
    there = modules(machine)
    told = [] if isinstance(there, Unavailable) else [each["bytes"] for each in there]
    return sum(told) // GIB if told and None not in told else math.ceil(visible)


def _kinds(table: str, machine: Machine) -> list[Kind]:
    kinds = list((_drives if table == "drives" else _ports)(machine))
    if not kinds:
        raise _LeftOut("none are here" if isinstance(machine.host.get(KINDS[table]), list) else "not told")
    return kinds


def _drives(machine: Machine) -> Iterator[Kind]:
    kinds: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for drive in _told(machine, "nvme"):
        if drive["bytes"]:
            kinds[max(1, drive["bytes"] // GB), drive["model"] or ""].append(drive)
    for (size, model), drives in sorted(kinds.items()):
        named = {"model": model} if model else {}
        yield {"gigabytes": size, **named, "count": len(drives), **_firmware(drives)}


def _ports(machine: Machine) -> Iterator[Kind]:
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for port in _told(machine, "network_ports"):
        if port.get("adapter"):
            kinds[port["adapter"], port.get("link_layer") or ""].append(port)
    for (adapter, layer), ports in sorted(kinds.items()):
        up, named = active(ports), {"link_layer": layer} if layer else {}
        rates = {gigabits(port) for port in up}
        rate = {"gigabits_per_second": int(*rates)} if len(rates) == 1 and min(rates).is_integer() else {}
        yield {"adapter": adapter, **named, "count": len(ports), "in_use": len(up), **rate, **_firmware(ports)}


def _told(machine: Machine, fact: str) -> Sequence[Mapping[str, Any]]:
    told = machine.host.get(fact)
    return told if isinstance(told, list) else []


def _firmware(parts: Iterable[Mapping[str, Any]]) -> Kind:
    """That of all of them, if they have the same."""
    values = {part.get("firmware") for part in parts}
    return {"firmware": values.pop()} if len(values) == 1 and all(values) else {}
