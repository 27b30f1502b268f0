"""A real machine, recorded, with the one fact changed that a test is about. Loaded with `-p recorded`.

The environment variable SNAPSHOT names the machine, of those in snapshots/ (default: h200x4). CHANGE holds Python
assignments to `gpus` (the facts of each GPU), `host` and `machine` (`count`, `processes`, `log`, `problems`, `links`,
`fabric`).

`gpufleet snapshot --anonymous` made them, with schema 1: without the topology. That of h200x4 was added: it is the one
that tests/recorded/h200x4-b has of a machine of the same kind. h200x1 stays as it was.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

from pytest_gpufleet.hardware import facts, host
from pytest_gpufleet.hardware.facts import FactError, Unavailable
from pytest_gpufleet.hardware.kernel_log import KernelLog
from pytest_gpufleet.model import machine
from pytest_gpufleet.model.gpu import Gpu, GpuTopology

name = os.environ.get("SNAPSHOT", "h200x4")
document = json.loads((Path(__file__).parent / "snapshots" / f"{name}.json").read_text())


taken = machine.from_json(document)
gpus = [dict(gpu.facts) for gpu in taken.gpus]
for values in gpus:  # a snapshot has no readings of telemetry; these are those of an idle H200
    values.update(clock_event_reasons=0x1, temperature_c=30, power_watts=75.0)
host_facts = dict(taken.host)
if "topology" in document:
    topology = GpuTopology.from_json(document["topology"])
else:  # schema 1
    topology = GpuTopology(links=tuple(tuple("X" if row is gpu else "?" for gpu in gpus) for row in gpus))
state = SimpleNamespace(
    count=len(gpus),
    processes={gpu.index: gpu.processes for gpu in topology.gpus},
    log="",
    problems=topology.problems,
    links=topology.links,
    fabric=topology.fabric,
)
exec(os.environ.get("CHANGE", ""), {"gpus": gpus, "host": host_facts, "machine": state, "Unavailable": Unavailable})
gpus = gpus[: state.count]
recorded = replace(
    taken, host=host_facts, gpus=tuple(machine.GpuFacts(index, values) for index, values in enumerate(gpus))
)


class Recorded:
    """A Source that answers from the document, with the GPUs that were asked for."""

    def __init__(self, wanted):
        self._wanted = wanted

    def count(self):
        return len(recorded.gpus[: self._wanted])

    def xids(self):
        return []

    def ask(self, index, fact):
        answer = recorded.gpus[index][fact]
        if isinstance(answer, Unavailable):
            raise FactError(answer.reason, answer.applicable)
        return answer


def gpu(index, values):
    """As the topology tells of a GPU with these facts."""
    unknown = {"name": "unknown GPU", "uuid": "?", "pci_bus_id": "?", "memory_bytes": 0}
    told = {
        field.name: values[field.name]
        for field in fields(Gpu)
        if field.name in values and not isinstance(values[field.name], Unavailable)
    }
    return Gpu(**{**unknown, **told, "index": index, "processes": tuple(state.processes.get(index, ()))})


@contextmanager
def open_source(wanted=None):
    everything = replace(
        topology,
        gpus=tuple(gpu(index, values) for index, values in enumerate(gpus)),
        problems=tuple(state.problems),
        links=tuple(map(tuple, state.links)),
        fabric=state.fabric,
    ).first(state.count)
    yield Recorded(wanted), everything if wanted is None else everything.first(wanted)


facts.open_source = open_source
facts.gpus_present = lambda: len(gpus)
host.read = lambda: dict(host_facts)
log = Path("kernel-log")
log.write_text(state.log)
KernelLog.__init__.__defaults__ = (str(log),)
