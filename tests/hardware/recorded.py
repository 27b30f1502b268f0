"""A real machine, recorded, with the one fact changed that a test is about. Loaded with `-p recorded`.

The environment variable SNAPSHOT names the machine, of those in snapshots/ (default: h200x4). CHANGE holds Python
assignments to `gpus` (the facts of each GPU), `host` and `topology`.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from pytest_gpufleet.hardware import facts, host, locks, machine
from pytest_gpufleet.hardware.facts import Unavailable
from pytest_gpufleet.hardware.topology import Gpu, GpuTopology
from pytest_gpufleet.hardware.xids import KernelLog

name = os.environ.get("SNAPSHOT", "h200x4")
document = json.loads((Path(__file__).parent / "snapshots" / f"{name}.json").read_text())
taken = machine.from_json(document)
gpus = [dict(gpu.facts) for gpu in taken.gpus]
host_facts = dict(taken.host)
state = SimpleNamespace(count=len(gpus), driver="580.159.04", cuda_driver="13.0", processes={}, log="", problems=())
exec(os.environ.get("CHANGE", ""), {"gpus": gpus, "host": host_facts, "machine": state, "Unavailable": Unavailable})
gpus = gpus[: state.count]
recorded = replace(
    taken, host=host_facts, gpus=tuple(machine.GpuFacts(index, values) for index, values in enumerate(gpus))
)


def gpu(index, values):
    known = {
        name: "?" if isinstance(values[name], Unavailable) else values[name] for name in ("name", "uuid", "serial")
    }
    processes = tuple(state.processes.get(index, ()))
    return Gpu(index, pci_bus_id=f"00000000:00:{index + 6:02X}.0", memory_bytes=1 << 37, processes=processes, **known)


@contextmanager
def open_source(wanted=None):
    links = tuple(tuple("X" if i == j else "NV18" for j in range(len(gpus))) for i in range(len(gpus)))
    topology = GpuTopology(
        tuple(gpu(i, values) for i, values in enumerate(gpus)),
        links,
        "nvswitch" if len(gpus) > 1 else "none",
        *(state.driver, state.cuda_driver, "13.0", "9.19.0", "2.28.9", "2.11.0"),
        tuple(state.problems),
    )
    yield machine.Recorded(recorded), topology if wanted is None else topology.first(wanted)


facts.open_source = open_source
locks.FOLDER = Path("locks")  # these GPUs exist once for each run of the tests
host.read = lambda: dict(host_facts)
log = Path("kernel-log")
log.write_text(state.log)
KernelLog.__init__.__defaults__ = (str(log),)
