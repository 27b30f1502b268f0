"""Machines that are not here: H200 that were recorded, with the one fact changed that a test is about."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine.kernel_log import Logged, behind, of_the_host, parse, summed_up
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import Gpu, GpuTopology

# Facts that the snapshots are too old for: as two H200 had them on 2026-11-22, with driver 580.159.04.
SINCE_THE_SNAPSHOTS = {
    "fabric_health": {"mask": 0, "clique": 0, "cluster": "0" * 32},
    "pcie_width_able": {"gpu": 16, "port": 0},
    "sm_clock_max_mhz": 1980,
    "memory_clock_max_mhz": 3201,
    "memory_unrepairable": False,
    "slowdown_ns": {"sw_thermal": 0, "hw_thermal": 0, "power_brake": 0},
    "ecc_corrected": {"dram": 0, "sram": 0},
    "spare_rows": {"max": 3072, "high": 0, "partial": 0, "low": 0, "none": 0},
}


@dataclass(frozen=True)
class Recorded:
    """A machine as it was recorded, after changes: what the inventory reads, and what its kernel log holds."""

    machine: Machine
    topology: GpuTopology
    log: str


@dataclass
class Draft:
    """A machine while it is changed: the facts of each GPU, of which `count` stay, and those of the host. `hidden`: PCI
    bus ids of GPUs hidden from the run."""

    gpus: list[dict[str, Any]]
    host: dict[str, Any]
    count: int
    processes: dict[int, Sequence[str]]
    problems: Sequence[str]
    links: Sequence[Sequence[str]]
    fabric: str
    log: str = ""
    hidden: Sequence[str] = ()
    driver: str | None = None


def then(*changes):
    return lambda machine: [change(machine) for change in changes]


def set_machine(**state):
    return lambda machine: vars(machine).update(state)


def set_host(**facts):
    return lambda machine: machine.host.update(deepcopy(facts))


def set_gpu(index, **facts):
    return lambda machine: machine.gpus[index].update(deepcopy(facts))


def set_gpus(**facts):
    return lambda machine: [gpu.update(deepcopy(facts)) for gpu in machine.gpus]


def set_port(*indices, **facts):
    """Of these network ports, or of all."""

    def change(machine):
        ports = machine.host["network_ports"]
        for index in indices or range(len(ports)):
            ports[index].update(deepcopy(facts))

    return change


def recorded(*changes):
    """The machine of the snapshot after these changes. `gpufleet snapshot --anonymous` made it, but for the topology,
    which is the one that tests/recorded/h200x4-b has of a machine of the same kind."""
    document = json.loads((Path(__file__).parent / "machine/snapshots/h200x4.json").read_text())
    taken = Machine(codec.typed(document["gpus"], tuple[Gpu, ...]), document["host"], document["taken"])
    gpus = [dict(gpu.facts) for gpu in taken.gpus]
    for values in gpus:  # a snapshot has no readings of telemetry; these are those of an idle H200
        values.update(clock_event_reasons=0x1, temperature_c=30, power_watts=75.0)
        values.update({name: value for name, value in SINCE_THE_SNAPSHOTS.items() if name not in values})
    topology = codec.typed(document["topology"], GpuTopology)
    processes = {gpu.index: gpu.processes for gpu in topology.gpus}
    here = Draft(gpus, dict(taken.host), len(gpus), processes, topology.problems, topology.links, topology.fabric)
    here.driver = topology.driver
    then(*changes)(here)
    gpus = here.gpus[: here.count]
    for index, values in enumerate(gpus):
        values["processes"] = list(here.processes.get(index, ()))
        if isinstance(values["p2p"], dict):
            values["p2p"] = {name: row[: here.count] for name, row in values["p2p"].items()}
    cards, links = tuple(Gpu(index, values) for index, values in enumerate(gpus)), tuple(map(tuple, here.links))
    changed = {"problems": tuple(here.problems), "links": links, "fabric": here.fabric, "driver": here.driver}
    whole = replace(topology, gpus=cards, **changed)
    at = [str(gpu.get("pci_bus_id")) for gpu in whole.gpus]
    said = summed_up(of_the_host(here.log))
    logged = Logged(tuple(parse(here.log)), host=tuple(behind(each, at) for each in said))
    present = (*(gpu.get("pci_bus_id") or "" for gpu in whole.gpus), *here.hidden)
    read = replace(taken, host=here.host, gpus=whole.gpus, logged=logged, present=present)
    return Recorded(read, first_gpus(whole, here.count), here.log)


def first_gpus(topology, count):
    return replace(topology, gpus=topology.gpus[:count], links=tuple(row[:count] for row in topology.links[:count]))
