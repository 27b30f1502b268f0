"""Whether hosts, or runs, are alike and were run alike: who differs from most of them."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

from pytest_gpufleet.machine.gpudirect import GPUDIRECT
from pytest_gpufleet.machine.host import DMI
from pytest_gpufleet.machine.network_ports import NETWORK_PORTS, active, fastest_ports, ports_of
from pytest_gpufleet.machine.pcie import PCI_DEVICES
from pytest_gpufleet.machine.processors import PROCESSOR_SETUP
from pytest_gpufleet.model.events import Fingerprint
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import Listed, Said, some
from pytest_gpufleet.model.place import SOFTWARE, Gpu, Missing, Place, Where, grouped
from pytest_gpufleet.model.record import Record

UNKNOWN, NOT_SET = "unknown", "not set"
# Facts of GPUs that one model can have in several ways: firmware, memory, settings. Of a host all that its GPUs have.
OF_GPUS = {
    "VBIOS": "vbios", "GSP firmware": "gsp_firmware", "InfoROM": "inforom_version", "GPU memory": "memory_bytes",
    "power limit": "power_limit_watts", "power smoothing": "power_smoothing", "ECC": "ecc_mode", "MIG": "mig_mode",
    "compute mode": "compute_mode", "persistence mode": "persistence_mode",
    "PCIe generation": "pcie_generation_max", "PCIe lanes": "pcie_width_max",
}  # fmt: skip
OF_HOST = {
    "kernel": "kernel", "system": "system", "processors": "processors", "NUMA nodes": "numa_nodes",
    "processor governor": "cpu_governor", "fabric manager": "fabric_manager",
    "network plugin of NCCL": "nccl_net_plugin", "locked memory": "locked_memory_limit",
    "open files": "open_files_hard_limit",
}  # fmt: skip
OF_PROCESSORS = {
    "sockets": "sockets", "clock source": "clock_source", "second threads (SMT)": "smt",
    "NUMA balancing": "numa_balancing", "transparent hugepages": "transparent_hugepages",
}  # fmt: skip
# Of network ports at the highest rate: one of an MTU of 9000 sends what another one of 1500 drops, and jobs name the
# rest alike on all nodes (NCCL_IB_HCA, NCCL_SOCKET_IFNAME, NCCL_IB_GID_INDEX, NCCL_IB_PKEY).
OF_PORTS = {
    "rate": ("rate", "network_port_unlike_others"), "MTU": ("mtu", "mtu_mismatch"),
    "network interface": ("interface", "port_set_up_otherwise"), "GID index": ("gid_index", "port_set_up_otherwise"),
    "partitions (PKeys)": ("pkeys", "port_set_up_otherwise"),
}  # fmt: skip
# Variables whose values name what is on one host.
OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_COMM_ID")
MOST_NAMES = 4  # of hosts that have the same value
MOST_PARTS = 3  # that are named
SHOWN = 12  # digits of a hash: who wants all of them has the evidence
Records = Mapping[str, Record]  # by the name of the host, or of the run


@dataclass(frozen=True)
class Difference:
    """A fact in which hosts differ."""

    fact: str
    usual: str | None  # what more than half of them have, None if no value has so many
    others: Mapping[str, tuple[str, ...]]  # the hosts that have another value, by that; all of them if nothing is usual
    code: str = "host_unlike_others"  # what kind of fault it is

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for hosts in self.others.values() for host in hosts)

    @property
    def text(self) -> Said:
        """ "driver: 575.57 (node-9); most have 580.95" """
        of_value = ((Said(value), some(hosts, MOST_NAMES)) for value, hosts in self.others.items())
        named = [Said("{value} ({hosts})", value=value, hosts=hosts) for value, hosts in of_value]
        text = "{fact}: {others}" if self.usual is None else "{fact}: {others}; most have {usual}"
        return Said(text, fact=Said(self.fact), others=Listed(named), usual=Said(self.usual or ""))


def unlike(records: Records) -> list[Difference]:
    """In which facts of machine and software they differ; those of GPUs among machines of one GPU model."""
    return compared(records, _machine) + _within_models(records, _of_gpus)


def other_boards(records: Records) -> list[Difference]:
    """Which hosts have boards with other part numbers: no fault, as within a machine."""
    what = "board part number"
    return _within_models(records, lambda record: {what: _of_gpus(record, {what: "board_part_number"})[what]})


def faults(differences: Iterable[Difference], nodes: Mapping[str, int], all_if_none: bool = False) -> list[Fault]:
    """Each host that differs, by its number; each fact of which nobody can say who does: of none, or `all_if_none`."""
    found = []
    for each in differences:
        at = {name: Place(nodes[name], "node") for name in each.hosts}
        if each.usual is None:
            found.append(Fault(each.code, tuple(at.values()) if all_if_none else (), str(each.text)))
        for value, names in each.others.items() if each.usual is not None else ():
            what = f"{each.fact} is {value}, of most hosts {each.usual}"
            found += [Fault(each.code, (at[name],), what) for name in names]
    return found


def ports_unlike(nodes: Mapping[int, tuple[Sequence[Gpu], Mapping[str, Any]]]) -> list[Fault]:
    """Network ports that are set up, or stand next to GPUs, otherwise than on most nodes; where none is that of most,
    all nodes in one fault. `nodes`: GPUs and host of each. Names may differ between models of machines."""
    values: dict[tuple[object, str, str], dict[str, str]] = defaultdict(dict)
    fastest = {port.port for _, host in nodes.values() for port in fastest_ports(ports_of(host))}
    for node, (gpus, host) in nodes.items():
        ports, dmi = [port for port in active(ports_of(host)) if port.port in fastest], DMI.of(host)
        product = None if isinstance(dmi, Missing) else (dmi.vendor, dmi.product)
        model = (product, *(gpu.name for gpu in gpus), *sorted({str(port.adapter) for port in ports}))
        for gpu in gpus:
            if near := gpu.get("network_adapters"):
                values[model, f"the adapter next to GPU {gpu.index}", "nic_misplaced"][str(node)] = " ".join(near)
        for port, (what, (fact, code)) in itertools.product(ports, OF_PORTS.items()):
            if (value := getattr(port, fact)) not in (None, ()):
                shown = " ".join(value) if fact == "pkeys" else str(value)
                values[port.rate if fact == "mtu" else model, f"{port.port}: its {what}", code][str(node)] = shown
    found = (difference(what, each, code) for (_, what, code), each in values.items())
    return faults(filter(None, found), {str(node): node for node in nodes}, all_if_none=True)


def _within_models(records: Records, facts_of: Callable[[Record], dict[str, str]]) -> list[Difference]:
    by_model = grouped((models(record), (name, record)) for name, record in records.items())
    return [each for same in by_model.values() for each in compared(dict(same), facts_of)]


def compared(records: Records, facts_of: Callable[[Record], dict[str, str]]) -> list[Difference]:
    every = {name: facts_of(record) for name, record in records.items()}
    names = dict.fromkeys(name for facts in every.values() for name in facts)
    found = (difference(name, {host: facts.get(name, NOT_SET) for host, facts in every.items()}) for name in names)
    return [each for each in found if each]


def difference(fact: str, values: Mapping[str, str], code: str = "host_unlike_others") -> Difference | None:
    """In what hosts differ, by the value of each; None if they do not. One that is not known differs from nothing."""
    values = {host: value for host, value in values.items() if value != UNKNOWN}
    if len({*values.values()}) < 2:
        return None
    usual = majority(values.values())
    others = grouped((value, host) for host, value in values.items() if value != usual)
    return Difference(fact, usual, {value: tuple(hosts) for value, hosts in others.items()}, code)


def majority(values: Iterable[str]) -> str | None:
    """What more than half of them are, None if there is no such."""
    counts = Counter(values)
    return next((most for most, count in counts.items() if 2 * count > counts.total()), None)


def models(record: Record) -> str:
    """The GPU model of a run; several if it has several."""
    names = sorted({gpu.name for gpu in record.topology.gpus})
    return " and ".join(names) or ("CPU ranks (rehearsal)" if record.run.rehearsal else "no GPU")


def _machine(record: Record) -> dict[str, str]:
    topology, host, environment = record.topology, record.machine, record.run.environment
    setup, ports = PROCESSOR_SETUP.of(host.host), NETWORK_PORTS.of(host.host)
    devices = PCI_DEVICES.of(host.host)
    adapters = iommu = UNKNOWN
    if not isinstance(ports, Missing):
        kinds = Counter(" ".join(map(_text, (port.adapter, port.firmware, port.rate, port.state))) for port in ports)
        adapters = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none"
    if not isinstance(devices, Missing):  # how addresses of GPUs are translated: "none" is no IOMMU
        modes = {device.iommu or "none" for device in devices.values() if device.kind == "gpu"}
        iommu = " and ".join(sorted(modes)) or "none"
    given: dict[str, str] = {_variable(name): value for name, value in environment.items() if name not in OF_ONE_HOST}
    return {
        "GPU model": models(record), "number of GPUs": str(len(topology.gpus)), "fabric": topology.fabric,
        **{what: getattr(topology, fact) or UNKNOWN for fact, what in SOFTWARE.items()},
        "Python": record.run.python or UNKNOWN, **{what: _text(host.get(fact)) for what, fact in OF_HOST.items()},
        **{what: _text(getattr(setup, fact, None)) for what, fact in OF_PROCESSORS.items()},
        "network ports": adapters, "IOMMU of the GPUs": iommu,
        "open NVIDIA driver": _text(getattr(GPUDIRECT.of(host.host), "open_modules", None)), **given,
    }  # fmt: skip


@cache
def _variable(name: str) -> Said:
    return Said("variable {name}", name=name)


def _of_gpus(record: Record, facts: Mapping[str, str] = OF_GPUS) -> dict[str, str]:
    every = {what: {_text(gpu.get(fact)) for gpu in record.topology.gpus} for what, fact in facts.items()}
    every["NVLinks that are up"] = {str(gpu.nvlinks_active) for gpu in record.topology.gpus}
    return {what: " and ".join(sorted(values - {UNKNOWN})) or UNKNOWN for what, values in every.items()}


def of_run(record: Record) -> dict[str, str]:
    """What decides what a verdict means."""
    run, files = record.run, repr(sorted(record.suite.files.items()))

    def state(name: str | None, digest: str | None, otherwise: str) -> str:
        return " ".join(filter(None, (name, (digest or "")[:12]))) or otherwise

    return {
        "version of pytest-gpufleet": state(run.plugin, run.code, UNKNOWN),  # one in development has many states
        "suite": f"{record.suite.version} ({sha256(files.encode()).hexdigest()[:12]})",
        "level": f"{run.level}{' (back in service)' if record.before else ''}",
        "limits in use": state(run.profile, run.profile_sha256, "none"),
        "order": state(run.order, run.order_sha256, "none"),
        "grade asked for": run.basis,
    }


def _text(value: Any) -> str:
    """A list of modes as its words; what is not known as such."""
    if isinstance(value, list):
        return "/".join(map(_text, value))
    return UNKNOWN if value is None or value == "" else str(value)


class Work(NamedTuple):
    """What must be the same for the same bits to come out: the device, its libraries, and what it is to do."""

    kind: str
    software: tuple[tuple[str, str], ...]
    part: str


def computed(fingerprints: Iterable[Fingerprint]) -> dict[Work, dict[Where, str]]:
    """The hashes of what each place computed, by the work that places have in common; "" of what did not repeat. Before
    them those of the data that it began with, which its host made."""
    found: dict[Work, dict[Where, str]] = defaultdict(dict)
    for each in fingerprints:
        software = tuple(sorted(each.software.items()))
        for name, part in each.parts.items():
            found[Work(each.kind, software, f"the data of {name}")][each.place] = part.inputs
            found[Work(each.kind, software, name)][each.place] = part.output
    return found


def gpus_apart(fingerprints: Sequence[Fingerprint]) -> list[Fault]:
    """GPUs that differ from more than half of those of their kind; where there is no such majority, one fault of all
    that differ, since nobody can say which are wrong. What repeats on less than half of them is not held against
    anybody: it is the software that does not repeat it."""
    wrong, unclear = defaultdict[Where, list[str]](list), defaultdict[tuple[Where, ...], list[str]](list)
    for (*_, part), hashes in computed(fingerprints).items():
        steady = {place: each for place, each in hashes.items() if each}
        if 2 * len(steady) < len(hashes):
            continue
        most = majority(steady.values())
        if most is None and steady:
            unclear[tuple(sorted(steady))].append(part)
        for place, each in hashes.items():
            if not each or most not in (None, each):
                wrong[place].append(part if each else f"{part} (other bits each time)")
    found: dict[tuple[Where, ...], str] = {}
    for place, parts in sorted(wrong.items()):
        found[(place,)] = f"other bits than most: {some(parts, MOST_PARTS, '; ')}"
    for places, parts in unclear.items():
        found[places] = f"they differ, and nobody can say which is wrong: {some(parts, MOST_PARTS, '; ')}"
    return [Fault("gpu_bits_differ", places, what) for places, what in found.items()]


def nothing_repeats(fingerprints: Iterable[Fingerprint]) -> bool:
    return not any(part.output for each in fingerprints for part in each.parts.values())


def other_bits(records: Records) -> list[Difference]:
    """In which parts of their fingerprints machines differ that have the same GPUs, libraries and branch of the driver;
    parts in which the same ones differ are one difference, with the hashes of the first. Each machine counts once, with
    what most of its GPUs compute: what spoils all is one cause. Of one whose GPUs do not agree its own run says so."""
    split = grouped(
        ((work.kind, work.software, found.usual is None, frozenset(found.others.values())), found)
        for (_, work), of_machines in by_work(records).items()
        if (found := difference(work.part, of_machines, "machine_bits_differ"))
    )
    merged = []
    for (kind, *_), (first, *more) in split.items():
        parts = some([each.fact for each in (first, *more)], MOST_PARTS, "; ")
        what, usual = Said("fingerprint of {kind}: {parts}", kind=kind, parts=parts), first.usual
        others = {value[:SHOWN]: machines for value, machines in first.others.items()}
        merged.append(replace(first, fact=what, usual=usual and usual[:SHOWN], others=others))
    return merged


def by_work(records: Records) -> dict[tuple[str, Work], dict[str, str]]:
    """What most GPUs of each machine computed."""
    found: dict[tuple[str, Work], dict[str, str]] = defaultdict(dict)
    for name, record in records.items():
        for work, hashes in _computed(record).items():
            if most := majority(filter(None, hashes.values())):
                found[_branch(record), work][name] = most
    return found


def not_compared(records: Records) -> list[str]:
    """Why fingerprints of some machines are not held against those of others; nothing where there is only one kind."""
    found = []
    for name, record in records.items():
        driver = f"driver {_branch(record) or 'none'}"
        kinds = dict.fromkeys((work.kind, driver, *map(" ".join, work.software)) for work in _computed(record))
        found += [(", ".join(kind), name) for kind in kinds or [("none",)]]
    setups = grouped(found)
    if len(setups) < 2:
        return []
    text = "fingerprints are compared only where GPU model, libraries and driver branch are the same: {setups}"
    return [Said(text, setups="; ".join(f"{setup} ({', '.join(names)})" for setup, names in setups.items()))]


def _computed(record: Record) -> Mapping[Work, Mapping[Where, str]]:
    return computed(each for taken in record.fingerprints.values() for each in taken)


def _branch(record: Record) -> str:
    """Of the driver, which compiles for a GPU what libraries have no code for."""
    return (record.topology.driver or "").partition(".")[0]
