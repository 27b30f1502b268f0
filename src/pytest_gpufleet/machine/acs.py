"""Access Control Services of PCIe ports: whether switches send what devices below them say to each other over the root.

They do it for the sake of virtual machines. GPUDirect RDMA, and GPUs that reach each other over PCIe, become slow or
hang."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.container import unreadable_here
from pytest_gpufleet.machine.gpu_facts import consumer
from pytest_gpufleet.machine.gpudirect import adapters_by_gpu, rail
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.pcie import Devices, endpoints, gpus_by_address, ports_above, shared_port
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.grouping import grouped

# linux/pci_regs.h: where extended capabilities begin, the number of Access Control Services, and its control register.
EXTENDED, CAPABILITY, CONTROL = 0x100, 0x000D, 6
UNPRIVILEGED = 64  # drivers/pci/pci-sysfs.c: how many bytes of the config space anybody may read
# linux/pci_regs.h: requests, and their answers, are redirected to the root; those that an adapter has had translated
# (ATS) go directly all the same, as virtual machines have it.
REDIRECTED, DIRECT_TRANSLATED = 0x04 | 0x08, 0x40

Controls = Mapping[str, int | None]  # of ports by address; None of one that has no such services


def read(root: Path = Path("/")) -> dict[str, int | None]:
    """The control register of each port between a GPU, adapter or drive and the root. Raises Unreadable where this user
    may not read it, which only root may."""
    ports = {
        folder.name: folder
        for device, _, _ in endpoints(root)
        for folder in device.parents
        if tools.PCI_STEP.fullmatch(folder.name)
    }
    return {address: _control(folder / "config", root) for address, folder in sorted(ports.items())}


def _control(config: Path, root: Path) -> int | None:
    with config.open("rb", buffering=0) as file:
        if not os.pread(file.fileno(), 1, UNPRIVILEGED):
            raise unreadable_here(root, "only root may read the settings of PCIe ports (Access Control Services)")
        at, seen = EXTENDED, set[int]()
        while at >= EXTENDED and at not in seen:
            seen.add(at)
            header = int.from_bytes(os.pread(file.fileno(), 4, at), "little")
            if header & 0xFFFF == CAPABILITY:
                return int.from_bytes(os.pread(file.fileno(), 2, at + CONTROL), "little")
            at = header >> 20
    return None


PCIE_ACS = HostFact("pcie_acs", dict[str, int | None], read, subject="acs", on_request=True)


def pairs_over_pcie(topology: GpuTopology, devices: Devices) -> list[tuple[str, str]]:
    """Of GPUs below one switch, by addresses, those that no NVLink connects. Consumer boards may not reach others."""
    there = [
        (index, address)
        for index, gpu in enumerate(topology.gpus)
        for address in gpus_by_address([gpu])
        if address in devices
    ]
    return [
        (one, other)
        for (i, one), (j, other) in combinations(there, 2)
        if not topology.links[i][j].startswith("NV") and shared_port(devices, one, other)
        if not (consumer(topology.gpus[i]) and (topology.gpus[i].get("p2p") or {}).get("read", [0] * (j + 1))[j])
    ]


def between_gpus(topology: GpuTopology, devices: Devices, control: Controls) -> list[Fault]:
    """GPUs below a port that redirects what they send to another GPU of their switch."""
    known = gpus_by_address(topology.gpus)
    pairs, faults = pairs_over_pcie(topology, devices), []
    for gpu, there in grouped(each for one, other in pairs for each in ((one, other), (other, one))).items():
        ports = _redirecting(devices, control, {_below(devices, gpu, other) for other in there})
        if ports:
            what = f"by the ACS control of {ports} what it sends to {{}} goes over the root"
            names = ", ".join(f"GPU {known[each].index}" for each in there)
            faults.append(Fault("acs_between_gpus", (known[gpu].place,), what.format(names)))
    return faults


def between_gpus_and_adapters(
    gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port], control: Controls
) -> list[Fault]:
    """GPUs with an adapter below the same switch, of which a port redirects what they send each other."""
    known = gpus_by_address(gpus)
    faults = []
    for gpu, adapters in adapters_by_gpu(gpus, devices, ports).items():
        ends = [end for each in adapters for end in (_below(devices, gpu, each), _below(devices, each, gpu))]
        if between := _redirecting(devices, control, ends):
            what = f"by the ACS control of {between} requests are redirected"
            faults.append(Fault("acs_enabled", (rail(known[gpu]),), what))
    return faults


def _below(devices: Devices, one: str, other: str) -> str:
    """The port by which a device is connected to the switch that it shares with another one; "" if it has none."""
    common = shared_port(devices, one, other)
    return next((each for each in ports_above(devices, one) if devices[each].above == common), "") if common else ""


def _redirecting(devices: Devices, control: Controls, ports: Iterable[str]) -> str:
    """ "0000:17:00.0 (0x001d) and 0000:17:01.0 (0x001d)" """
    values = {port: control.get(port) or 0 for port in ports}
    return " and ".join(
        f"{port} ({value:#06x})"
        for port, value in values.items()
        if value & REDIRECTED and not value & DIRECT_TRANSLATED
    )
