"""By which way network adapters reach the memory of GPUs without the host in between (GPUDirect RDMA), and what is in
the way.

The place of all these faults is the rail of a GPU, its way to other nodes: they explain why it is slow, and nothing
that the GPU does by itself.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.gpu_facts import consumer
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.network_ports import OF_MANAGEMENT, Port, active, fastest_ports
from pytest_gpufleet.machine.pcie import Devices, gpus_by_address, ports_above, shared_port
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.place import Place

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
    """`peer_module`: the one of MODULES that is loaded, None if none is. `open_modules`: whether NVIDIA's driver is the
    open one, which alone gives memory away as a DMA-BUF; None where no driver is loaded."""

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
    """The addresses of the InfiniBand and RoCE adapters that have an active port."""
    names = {port.device for port in active(ports)}
    return [address for address, each in devices.items() if each.kind == "adapter" and each.name in names]


def adapters_by_gpu(gpus: Iterable[Gpu], devices: Devices, ports: Iterable[Port]) -> dict[str, list[str]]:
    """Of each GPU that /sys has the adapters in use under the same PCIe switch, by addresses. Consumer boards let no
    adapter reach their memory."""
    used, able = adapters_in_use(devices, ports), (gpu for gpu in gpus if not consumer(gpu))
    here = (address for address in gpus_by_address(able) if address in devices)
    return {gpu: [adapter for adapter in used if shared_port(devices, gpu, adapter)] for gpu in here}


def built_for_gpudirect(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> bool:
    """Whether adapters are there for the GPUs: one is under a GPU's switch, or there are as many as GPUs and several,
    as where a virtual machine shows no switch. Adapters for management are slower, and RoCE ports too."""
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
    """What keeps adapters from GPUs' memory, of all: no module that lends it; or slows them down, of those under one
    switch: an IOMMU that translates their addresses, so that what they send each other goes over the root."""
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
    spare = [
        f"{devices[each].name} (NUMA node {_node(devices[each].numa_node)})"
        for each in adapters_in_use(devices, ports)
        if each not in taken
    ]
    elsewhere = f"under no GPU's switch are: {', '.join(spare)}" if spare else "every adapter in use is next to another"
    text = "no adapter in use is under its switch (NUMA node {}); {}"
    return [
        Fault("nic_not_local", (rail(known[gpu]),), text.format(_node(devices[gpu].numa_node), elsewhere))
        for gpu in alone
    ]


def misplaced_adapters(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> list[Fault]:
    """GPUs that share a PCIe switch or a NUMA node with fewer adapters than GPUs, while another one has more of them:
    in a machine with at least one adapter for each GPU, most of which are beside each other.

    Only adapters at the highest rate count: others are for storage and management. A GPU without any adapter under its
    switch, where others have one, is found by `without_adapter`."""
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
            text = "{} has {} adapters in use for {} GPUs, and {} has more than GPUs"
            return [
                Fault("nic_misplaced", tuple(map(rail, each)),
                      text.format(words.format(group), there[group], len(each), ", ".join(more)))
                for group, each in fewer.items()
            ]  # fmt: skip
    return []


def rail(gpu: Gpu) -> Place:
    return Place(gpu.node, "rail", gpu.index)


def _node(number: float | None) -> str:
    return "unknown" if number is None or number < 0 else f"{number:g}"
