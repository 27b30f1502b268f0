"""A machine at one moment: every fact of its GPUs and its host, to be checked now, or kept as a document."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.xid_catalogue import Logged


@dataclass(frozen=True)
class Machine:
    """Its GPUs, in the order of the run, and its host. `logged`: the errors that the kernel's log held. `present`: the
    PCI bus ids of all its GPUs, also of those hidden from the run; "" for one that does not answer."""

    gpus: tuple[Gpu, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    logged: Logged = field(default_factory=Logged)
    present: tuple[str, ...] = ()
    _read_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read, whatever was done to the clock since."""
        return time.monotonic() - self._read_at


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
        Gpu(gpu["index"], {name: _value(value) for name, value in gpu["facts"].items()}) for gpu in document["gpus"]
    )
    return Machine(gpus, document["host"], document["taken"])


def _plain(value: Any) -> Any:
    return {"unavailable": value.reason, "applicable": value.applicable} if isinstance(value, Unavailable) else value


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "unavailable" in value:
        return Unavailable(value["unavailable"], value["applicable"])
    return value
