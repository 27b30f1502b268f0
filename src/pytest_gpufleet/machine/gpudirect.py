"""How network adapters (GPUDirect RDMA) and other GPUs (GPUDirect P2P) reach the memory of GPUs without the host in
between, and what is in the way. The place of faults of adapters is the rail of a GPU, its way to other nodes: they
explain why that is slow, and nothing that the GPU does by itself."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.gpu_facts import consumer
from pytest_gpufleet.machine.network_ports import OF_MANAGEMENT, Port, active, fastest_ports
from pytest_gpufleet.machine.pcie import Devices, endpoints, gpus_by_address, ports_above, shared_port
from pytest_gpufleet.machine.tools import HostFact, unreadable_here
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Gpu, GpuTopology, Place, grouped

# Modules by which an adapter's driver asks NVIDIA's for memory: the driver's own, the one before it, and that of EFA.
MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
# The first kernel in which RDMA adapters take memory as a DMA-BUF: drivers/infiniband/core/umem_dmabuf.c is as old.
DMA_BUF_KERNEL = (5, 12)
# Values of /sys/kernel/iommu_groups/*/type for addresses that are translated. GPUDirect RDMA wants an IOMMU off or
# passed through (CUDA's documentation, GPUDirect RDMA, supported systems).
TRANSLATED = ("DMA", "DMA-FQ")
# Where more adapters than one for so many GPUs are elsewhere, the machine was built so.
GPUS_OF_ONE_MISPLACED = 8


class GpuDirect(msgspec.Struct, frozen=True):
    """`peer_module`: of MODULES. `open_modules`: whether NVIDIA's driver is the open one, which alone knows DMA-BUF."""

    peer_module: str | None = None
    open_modules: bool | None = None


def read(root: Path = Path("/")) -> GpuDirect:
    version = tools.text(root / "proc/driver/nvidia/version")
    return GpuDirect(
        peer_module=next((name for name in MODULES if (root / "sys/module" / name).exists()), None),
        open_modules=None if version is None else "Open Kernel Module" in version.splitlines()[0],
    )


GPUDIRECT = HostFact("gpudirect", GpuDirect, read)


def adapters_in_use(devices: Devices, ports: Iterable[Port]) -> list[str]:
    names = {port.device for port in active(ports)}
    return [address for address, each in devices.items() if each.kind == "adapter" and each.name in names]


def adapters_by_gpu(gpus: Iterable[Gpu], devices: Devices, ports: Iterable[Port]) -> dict[str, list[str]]:
    """The adapters in use under the same PCIe switch, by addresses. Consumer boards let none reach their memory."""
    used, able = adapters_in_use(devices, ports), (gpu for gpu in gpus if not consumer(gpu))
    here = (address for address in gpus_by_address(able) if address in devices)
    return {gpu: [adapter for adapter in used if shared_port(devices, gpu, adapter)] for gpu in here}


def built_for_gpudirect(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> bool:
    """An adapter is under a switch of a GPU, or there are as many, as where a virtual machine shows no switches."""
    fast = [port for port in ports if port.link_layer != "Ethernet" or port.gigabits >= OF_MANAGEMENT]
    cards = _cards(adapters_in_use(devices, fast))
    as_many = len(cards) >= max(2, len(gpus)) and not all(map(consumer, gpus))
    return as_many or any(adapters_by_gpu(gpus, devices, ports).values())


def _cards(adapters: Iterable[str]) -> list[str]:
    """One address of each card: its ports are functions of one PCI device."""
    return list({address.rpartition(".")[0]: address for address in adapters}.values())


def blocked(
    gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port], ways: GpuDirect, kernel: str
) -> Iterator[Fault]:
    """No module lends the memory of GPUs; or an IOMMU translates addresses, so that all goes over the root."""
    known, version = gpus_by_address(gpus), tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    if not ways.peer_module and not (ways.open_modules and version >= DMA_BUF_KERNEL):
        driver = "open" if ways.open_modules else "closed"
        what = f"nvidia_peermem is not loaded, and kernel {kernel} with NVIDIA's {driver} driver knows no DMA-BUF"
        yield Fault("gpudirect_module_missing", tuple(map(rail, gpus)), what)
    for address, near in adapters_by_gpu(gpus, devices, ports).items():
        modes = {each: devices[each].iommu for each in (address, *near) if near}
        if translated := [f"{each} is in mode {mode}" for each, mode in modes.items() if mode in TRANSLATED]:
            yield Fault("iommu_not_passthrough", (rail(known[address]),), ", ".join(translated))


def without_adapter(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> list[Fault]:
    """GPUs without an adapter under their PCIe switch, where most of the others have one."""
    known, near = gpus_by_address(gpus), adapters_by_gpu(gpus, devices, ports)
    alone = [gpu for gpu, adapters in near.items() if not adapters]
    if 2 * len(alone) >= len(near):
        return []
    taken = {adapter for adapters in near.values() for adapter in adapters}
    free = [devices[each] for each in adapters_in_use(devices, ports) if each not in taken]
    spare = ", ".join(f"{each.name} (NUMA node {_node(each.numa_node)})" for each in free)
    elsewhere = f"under no GPU's switch are: {spare}" if spare else "every adapter in use is next to another"
    text = f"no adapter in use is under its switch (NUMA node {{}}); {elsewhere}"
    return [Fault("nic_not_local", (rail(known[gpu]),), text.format(_node(devices[gpu].numa_node))) for gpu in alone]


def misplaced_adapters(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> list[Fault]:
    """GPUs that share a PCIe switch or NUMA node with fewer adapters than GPUs while another one has more: in a machine
    with one for each GPU, most of them beside each other. Only adapters at the highest rate count: others are for
    storage and management. Not where `without_adapter` finds one."""
    known = {address: gpu for address, gpu in gpus_by_address(gpus).items() if address in devices}
    cards = _cards(adapters_in_use(devices, fastest_ports(ports)))
    if len(cards) < len(known) or without_adapter(gpus, devices, ports):
        return []
    levels = (
        ("the PCIe switch below {}", {each: (ports_above(devices, each) or [each])[0] for each in devices}),
        ("NUMA node {:g}", {each: devices[each].numa_node for each in devices}),
    )
    for words, group_of in levels:
        here = grouped((group_of[address], gpu) for address, gpu in known.items())
        there = Counter(group_of[card] for card in cards)
        fewer = {group: each for group, each in here.items() if group is not None and there[group] < len(each)}
        missing = sum(len(each) - there[group] for group, each in fewer.items())
        if 0 < missing * GPUS_OF_ONE_MISPLACED <= len(known):
            more = [words.format(group) for group, count in there.items() if count > len(here.get(group, ()))]
            text = f"{{}} has {{}} adapters in use for {{}} GPUs, and {', '.join(more)} has more than GPUs"
            whats = ((each, text.format(words.format(group), there[group], len(each))) for group, each in fewer.items())
            return [Fault("nic_misplaced", tuple(map(rail, each)), what) for each, what in whats]
    return []


def rail(gpu: Gpu) -> Place:
    return Place(gpu.node, "rail", gpu.index)


def _node(number: float | None) -> str:
    return "unknown" if number is None or number < 0 else f"{number:g}"


# Whether switches send what devices below them say to each other over the root. They do it for the sake of virtual
# machines; GPUDirect RDMA, and GPUs that reach each other over PCIe, become slow or hang.

# linux/pci_regs.h: where extended capabilities begin, the number of Access Control Services, and its control register.
EXTENDED, CAPABILITY, CONTROL = 0x100, 0x000D, 6
UNPRIVILEGED = 64  # drivers/pci/pci-sysfs.c: how many bytes of the config space anybody may read
# linux/pci_regs.h: requests, and their answers, are redirected to the root; those that an adapter has had translated
# (ATS) go directly all the same, as virtual machines have it.
REDIRECTED, DIRECT_TRANSLATED = 0x04 | 0x08, 0x40

Controls = Mapping[str, int | None]  # of ports by address; None of one that has no such services


def read_acs(root: Path = Path("/")) -> dict[str, int | None]:
    """The control register of each port between a GPU, adapter or drive and the root. Only root may read it."""
    above = {folder.name: folder for device in endpoints(root) for folder in device.parents}
    return {name: _control(above[name] / "config", root) for name in sorted(filter(tools.PCI_STEP.fullmatch, above))}


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


PCIE_ACS = HostFact("pcie_acs", dict[str, int | None], read_acs, subject="acs", on_request=True)


def pairs_over_pcie(topology: GpuTopology, devices: Devices) -> list[tuple[str, str]]:
    """Of GPUs below one switch, by addresses, those that no NVLink connects. Consumer boards may not reach others."""
    known = gpus_by_address(topology.gpus)
    there = [(topology.gpus.index(gpu), address, gpu) for address, gpu in known.items() if address in devices]
    return [
        (one, other)
        for (i, one, gpu), (j, other, _) in combinations(there, 2)
        if not topology.links[i][j].startswith("NV") and shared_port(devices, one, other)
        if not (consumer(gpu) and (gpu.get("p2p") or {}).get("read", [0] * (j + 1))[j])
    ]


def acs_between_gpus(topology: GpuTopology, devices: Devices, control: Controls) -> Iterator[Fault]:
    """GPUs below a port that redirects what they send to another GPU of their switch."""
    known, pairs = gpus_by_address(topology.gpus), pairs_over_pcie(topology, devices)
    for gpu, there in grouped(each for one, other in pairs for each in ((one, other), (other, one))).items():
        if ports := _redirecting(devices, control, [(gpu, other) for other in there]):
            names = ", ".join(f"GPU {known[each].index}" for each in there)
            what = f"by the ACS control of {ports} what it sends to {names} goes over the root"
            yield Fault("acs_between_gpus", (known[gpu].place,), what)


def acs_between_gpus_and_adapters(
    gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port], control: Controls
) -> Iterator[Fault]:
    """GPUs with an adapter below the same switch, of which a port redirects what they send each other."""
    known = gpus_by_address(gpus)
    for gpu, adapters in adapters_by_gpu(gpus, devices, ports).items():
        if between := _redirecting(devices, control, [end for each in adapters for end in ((gpu, each), (each, gpu))]):
            yield Fault("acs_enabled", (rail(known[gpu]),), f"by the ACS control of {between} requests are redirected")


def _redirecting(devices: Devices, control: Controls, ways: Iterable[tuple[str, str]]) -> str:
    """The ports from devices to a shared switch that redirect: "0000:17:00.0 (0x001d) and 0000:17:01.0 (0x001d)" """
    values: dict[str, int] = {}
    for one, other in ways:
        common = shared_port(devices, one, other)
        below = (each for each in ports_above(devices, one) if common and devices[each].above == common)
        if port := next(below, ""):
            values[port] = control.get(port) or 0
    wrong = {port: value for port, value in values.items() if value & REDIRECTED and not value & DIRECT_TRANSLATED}
    return " and ".join(f"{port} ({value:#06x})" for port, value in wrong.items())
