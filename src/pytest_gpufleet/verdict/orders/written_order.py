"""The order that a recorded machine meets, as the text of a TOML file."""

from __future__ import annotations

import json
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
# Of each table that is there for each kind: what it is of, and the fact of the host that tells them.
TITLES = {"drives": ("NVMe drives", "nvme"), "ports": ("InfiniBand and RoCE ports", "network_ports")}


def machine_of(record: Record) -> Machine:
    """What the record of a run on one machine has of it."""
    present = ("",) * record.run.gpus_present
    return Machine(record.topology.gpus, record.machine.host, record.machine.taken, present=present)


def order_text(record: Record, run: str) -> str:
    """An order as TOML that this machine meets: what it does not tell, and what differs among its GPUs, is a comment.
    `run`: the name of the run's folder."""
    machine, topology = machine_of(record), record.topology
    lines = [HEAD.format(run=run, utc=record.run.utc, host=record.run.host), f"name = {_text(_name(machine))}"]
    tables: dict[str, list[str]] = defaultdict(list)
    for key in ORDER_LINES:
        table, _, field = key.partition(".")
        if table in TITLES:
            tables.setdefault(table, _kinds(table, machine))
        else:
            tables[table].append(_line(key, field, machine, topology))
    for table, of_table in tables.items():
        lines += ["", *([] if table in TITLES else [f"[{table}]"]), *of_table]
    return "\n".join(lines) + "\n"


def _name(machine: Machine) -> str:
    dmi = machine.host.get("dmi")
    called = dmi.get("product") if isinstance(dmi, Mapping) else None
    models = sorted({gpu.name for gpu in machine.gpus})
    return str(called or f"{len(machine.gpus)} x {' and '.join(models)}")


def _line(key: str, field: str, machine: Machine, topology: GpuTopology) -> str:
    values = [value for _, _, value in ORDER_LINES[key].read(machine, topology, {})]
    about = f"  # {ORDER_LINES[key].about}" if ORDER_LINES[key].about else ""
    why = next((str(value) for value in values if isinstance(value, Unavailable)), "")
    if why or not values:
        return f"# {field}: not told{why and f', {why}'}"
    if key == "memory.gibibytes":
        values = [_installed(machine, values[0])]
    if any(value != values[0] for value in values):
        return f"# {field}: not all alike, {', '.join(map(str, dict.fromkeys(values)))}"
    return f"{field} = {_value(values[0])}{about}"


def _installed(machine: Machine, visible: float) -> int:
    """GiB: what the modules have together where they are told, else what the kernel has of it."""
    there = modules(machine)
    told = [] if isinstance(there, Unavailable) else [each["bytes"] for each in there]
    return sum(told) // GIB if told and None not in told else math.ceil(visible)


def _kinds(table: str, machine: Machine) -> list[str]:
    kinds = list((_drives if table == "drives" else _ports)(machine))
    title, fact = TITLES[table]
    none = "none are here" if isinstance(machine.host.get(fact), list) else "not told"
    lines = [f"# {title}{'' if kinds else f': {none}'}"]
    for kind in kinds:
        lines += [f"[[{table}]]", *(f"{key} = {_value(value)}" for key, value in kind), ""]
    return lines[:-1] if kinds else lines


Kind = list[tuple[str, Any]]


def _drives(machine: Machine) -> Iterator[Kind]:
    kinds: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for drive in _told(machine, "nvme"):
        if drive["bytes"]:
            kinds[max(1, drive["bytes"] // GB), drive["model"] or ""].append(drive)
    for (size, model), drives in sorted(kinds.items()):
        named = [("model", model)] if model else []
        yield [("gigabytes", size), *named, ("count", len(drives)), *_firmware(drives)]


def _ports(machine: Machine) -> Iterator[Kind]:
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for port in _told(machine, "network_ports"):
        if port.get("adapter"):
            kinds[port["adapter"], port.get("link_layer") or ""].append(port)
    for (adapter, layer), ports in sorted(kinds.items()):
        up, named = active(ports), [("link_layer", layer)] if layer else []
        rates = {gigabits(port) for port in up}
        rate = [("gigabits_per_second", int(*rates))] if len(rates) == 1 and min(rates).is_integer() else []
        counts = [("count", len(ports)), ("in_use", len(up))]
        yield [("adapter", adapter), *named, *counts, *rate, *_firmware(ports)]


def _told(machine: Machine, fact: str) -> Sequence[Mapping[str, Any]]:
    told = machine.host.get(fact)
    return told if isinstance(told, list) else []


def _firmware(parts: Iterable[Mapping[str, Any]]) -> Kind:
    """That of all of them, if they have the same."""
    values = {part.get("firmware") for part in parts}
    return [("firmware", value) for value in values] if len(values) == 1 and all(values) else []


def _value(value: Any) -> str:
    return _text(value) if isinstance(value, str) else str(round(value))


def _text(text: str) -> str:
    """A text in TOML's own notation, which is that of JSON."""
    return json.dumps(text, ensure_ascii=False)
