"""A machine as a document: everything the inventory reads, to be checked now, kept, or loaded in a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from pytest_gpufleet.hardware import facts, host
from pytest_gpufleet.hardware.facts import FactError, Source, Unavailable

SCHEMA = 1


@dataclass(frozen=True)
class GpuFacts:
    """The facts of one GPU by name (facts.FACTS, facts.COUNTERS); those that cannot be had are Unavailable."""

    index: int
    facts: Mapping[str, Any]

    def __getitem__(self, fact: str) -> Any:
        return self.facts.get(fact, Unavailable("not recorded", applicable=False))

    @property
    def identity(self) -> str:
        name, serial, pci, uuid = (self[fact] for fact in ("name", "serial", "pci_bus_id", "uuid"))
        return f"GPU {self.index} {name}, serial {serial}, {pci}, {uuid}"


@dataclass(frozen=True)
class Machine:
    """Its GPUs, in the order of the run, and its host."""

    gpus: tuple[GpuFacts, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read."""
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.taken)).total_seconds()


def take(source: Source, indices: tuple[int, ...]) -> Machine:
    """Read everything. `indices` are the numbers that nvidia-smi gives to the source's GPUs."""
    names = {**facts.FACTS, **facts.COUNTERS, **facts.SLOW_COUNTERS, "p2p": None}
    read = facts.read_all(source, names)
    gpus = tuple(GpuFacts(index, values) for index, values in zip(indices, read, strict=True))
    return Machine(gpus, host.read(), datetime.now(timezone.utc).isoformat(timespec="seconds"))


def to_json(machine: Machine) -> dict[str, Any]:
    """The document, with a schema version. It holds no secrets: of the environment only what is allowed."""
    return {
        "schema": SCHEMA,
        "taken": machine.taken,
        "host": dict(machine.host),
        "gpus": [{"index": gpu.index, "facts": {k: _plain(v) for k, v in gpu.facts.items()}} for gpu in machine.gpus],
    }


def from_json(document: Mapping[str, Any]) -> Machine:
    """The inverse of to_json. ValueError for a document of another schema."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"a snapshot of schema {document.get('schema')!r}; this version reads schema {SCHEMA}")
    gpus = tuple(
        GpuFacts(gpu["index"], {name: _value(value) for name, value in gpu["facts"].items()})
        for gpu in document["gpus"]
    )
    return Machine(gpus, document["host"], document["taken"])


def anonymous(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same document with serials, UUIDs and the host's name replaced by aliases, the same ones every time."""
    gpus = [
        {
            **gpu,
            "facts": {
                **gpu["facts"],
                "serial": f"{gpu['index']:013d}",
                "uuid": f"GPU-00000000-0000-0000-0000-{gpu['index']:012d}",
            },
        }
        for gpu in document["gpus"]
    ]
    return {**document, "gpus": gpus, "host": {**document["host"], "name": "host"}}


class Recorded:
    """A Source that answers from a document. `broken` maps a fact to the Unavailable with which it answers instead."""

    def __init__(self, machine: Machine, broken: Mapping[str, Unavailable] | None = None) -> None:
        self._machine = machine
        self._broken = broken or {}

    def count(self) -> int:
        return len(self._machine.gpus)

    def xids(self) -> list[tuple[int, int]]:
        return []

    def ask(self, index: int, fact: str) -> Any:
        value = self._broken.get(fact, self._machine.gpus[index][fact])
        if isinstance(value, Unavailable):
            raise FactError(value.reason, value.applicable)
        return value


def _plain(value: Any) -> Any:
    return {"unavailable": value.reason, "applicable": value.applicable} if isinstance(value, Unavailable) else value


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "unavailable" in value:
        return Unavailable(value["unavailable"], value["applicable"])
    return value
