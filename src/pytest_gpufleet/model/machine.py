"""A machine at one moment: every fact of its GPUs and its host, to be checked now, or kept as a document."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from pytest_gpufleet.hardware import facts, host
from pytest_gpufleet.hardware.facts import Source, Unavailable
from pytest_gpufleet.model.gpu import GpuTopology

SCHEMA = 2  # 1 had no topology


@dataclass(frozen=True)
class GpuFacts:
    """The facts of one GPU by name (facts.FACTS, facts.COUNTERS); those that cannot be had are Unavailable."""

    index: int
    facts: Mapping[str, Any]

    def __getitem__(self, fact: str) -> Any:
        """KeyError for a name that this version and the recorded machine both do not know."""
        if fact in self.facts:
            return self.facts[fact]
        facts.check_name(fact)
        return Unavailable("not recorded", applicable=False)

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
    _read_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read, whatever was done to the clock since."""
        return time.monotonic() - self._read_at


def take(source: Source, indices: tuple[int, ...]) -> Machine:
    """Read everything. `indices` are the numbers that nvidia-smi gives to the source's GPUs."""
    names = {**facts.FACTS, **facts.COUNTERS, **facts.SLOW_COUNTERS, "p2p": None}
    read = facts.read_all(source, names)
    gpus = tuple(GpuFacts(index, values) for index, values in zip(indices, read, strict=True))
    return Machine(gpus, host.read(), datetime.now(timezone.utc).isoformat(timespec="seconds"))


def to_json(machine: Machine) -> dict[str, Any]:
    """The facts of GPUs and host as plain JSON values."""
    return {
        "taken": machine.taken,
        "host": dict(machine.host),
        "gpus": [{"index": gpu.index, "facts": {k: _plain(v) for k, v in gpu.facts.items()}} for gpu in machine.gpus],
    }


def from_json(document: Mapping[str, Any]) -> Machine:
    """The inverse of to_json, also for a snapshot of any schema."""
    gpus = tuple(
        GpuFacts(gpu["index"], {name: _value(value) for name, value in gpu["facts"].items()})
        for gpu in document["gpus"]
    )
    return Machine(gpus, document["host"], document["taken"])


def snapshot(machine: Machine, topology: GpuTopology) -> dict[str, Any]:
    """The whole document, with a schema version. Of the environment it holds what environment.relevant() shows."""
    return {"schema": SCHEMA, "topology": asdict(topology), **to_json(machine)}


def anonymous(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same document with serials, UUIDs and the host's name replaced by aliases, the same ones every time."""
    aliases: dict[str, str] = {}
    for gpu in document["gpus"]:
        serial, uuid = (str(gpu["facts"][fact]) for fact in ("serial", "uuid"))
        aliases |= {serial: f"{gpu['index']:013d}", uuid: f"GPU-00000000-0000-0000-0000-{gpu['index']:012d}"}
    # Wherever they stand: CUDA_VISIBLE_DEVICES can name UUIDs too.
    names = "|".join(map(re.escape, aliases))
    text = re.sub(rf"(?<!\w)({names})(?!\w)", lambda found: aliases[found[0]], json.dumps(document))
    plain: dict[str, Any] = json.loads(text)
    return {**plain, "host": {**plain["host"], "name": "host"}}


def _plain(value: Any) -> Any:
    return {"unavailable": value.reason, "applicable": value.applicable} if isinstance(value, Unavailable) else value


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "unavailable" in value:
        return Unavailable(value["unavailable"], value["applicable"])
    return value
