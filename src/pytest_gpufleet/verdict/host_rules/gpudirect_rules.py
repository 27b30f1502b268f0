"""Whether network adapters can reach the memory of GPUs without the host in between: GPUDirect RDMA.

The place of all these faults is the rail of a GPU, its way to other nodes: they explain why it is slow, and nothing
that the GPU does by itself.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.machine import Port, active
from pytest_gpufleet.model.place import Place, Where
from pytest_gpufleet.verdict.host_rules.pcie_rules import Devices, below, gpus_by_address, shared_port

# The first kernel in which RDMA adapters take memory as a DMA-BUF: drivers/infiniband/core/umem_dmabuf.c is as old.
DMA_BUF_KERNEL = (5, 12)
# Values of /sys/kernel/iommu_groups/*/type for addresses that are translated. GPUDirect RDMA wants an IOMMU off or
# passed through (CUDA's documentation, GPUDirect RDMA, supported systems).
TRANSLATED = ("DMA", "DMA-FQ")
# linux/pci_regs.h: requests, and their answers, are redirected to the root; those that an adapter has had translated
# (ATS) go directly all the same, as virtual machines have it.
REDIRECTED, DIRECT_TRANSLATED = 0x04 | 0x08, 0x40


def adapters_in_use(devices: Devices, ports: Iterable[Port]) -> list[str]:
    """The addresses of the InfiniBand and RoCE adapters that have an active port."""
    names = {port["port"].partition("/")[0] for port in active(ports)}
    return [address for address, each in devices.items() if each["kind"] == "adapter" and each["name"] in names]


def adapters_by_gpu(gpus: Iterable[Gpu], devices: Devices, ports: Iterable[Port]) -> dict[str, list[str]]:
    """Of each GPU that /sys has the adapters in use under the same PCIe switch, by addresses."""
    used = adapters_in_use(devices, ports)
    here = (address for address in gpus_by_address(gpus) if address in devices)
    return {gpu: [adapter for adapter in used if shared_port(devices, gpu, adapter)] for gpu in here}


def built_for_gpudirect(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> bool:
    """Whether adapters are there for the GPUs: one is under a GPU's switch, or there are as many as GPUs and several,
    as where a virtual machine shows no switch. An adapter for management alone is a RoCE port too."""
    cards = {address.rpartition(".")[0] for address in adapters_in_use(devices, ports)}
    return any(adapters_by_gpu(gpus, devices, ports).values()) or len(cards) >= max(2, len(gpus))


def gpudirect_ills(
    gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port], ways: Mapping[str, Any], kernel: str
) -> list[Fault]:
    """What keeps adapters from GPUs' memory, of all: no module that lends it; or slows them down, of those under one
    switch: an IOMMU that translates their addresses, so that what they send each other goes over the root."""
    known, version = gpus_by_address(gpus), tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    faults = []
    if not ways["peer_module"] and not (ways["open_modules"] and version >= DMA_BUF_KERNEL):
        driver = "open" if ways["open_modules"] else "closed"
        what = f"nvidia_peermem is not loaded, and kernel {kernel} with NVIDIA's {driver} driver knows no DMA-BUF"
        faults.append(Fault("gpudirect_module_missing", tuple(map(_rail, gpus)), what))
    for address, near in adapters_by_gpu(gpus, devices, ports).items():
        modes = {each: devices[each]["iommu"] for each in (address, *near) if near}
        if told := [f"{each} is in mode {mode}" for each, mode in modes.items() if mode in TRANSLATED]:
            faults.append(Fault("iommu_not_passthrough", (_rail(known[address]),), ", ".join(told)))
    return faults


def adapters_far(gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port]) -> list[Fault]:
    """GPUs without an adapter under their PCIe switch, where most of the others have one."""
    known, near = gpus_by_address(gpus), adapters_by_gpu(gpus, devices, ports)
    alone = [gpu for gpu, adapters in near.items() if not adapters]
    if 2 * len(alone) >= len(near):
        return []
    taken = {adapter for adapters in near.values() for adapter in adapters}
    spare = [
        f"{devices[each]['name']} (NUMA node {_node(devices[each]['numa_node'])})"
        for each in adapters_in_use(devices, ports)
        if each not in taken
    ]
    elsewhere = f"under no GPU's switch are: {', '.join(spare)}" if spare else "every adapter in use is next to another"
    return [
        Fault(
            "nic_not_local",
            (_rail(known[gpu]),),
            f"no adapter in use is under its switch (NUMA node {_node(devices[gpu]['numa_node'])}); {elsewhere}",
        )
        for gpu in alone
    ]


def redirecting_ports(
    gpus: Sequence[Gpu], devices: Devices, ports: Sequence[Port], control: Mapping[str, int | None]
) -> list[Fault]:
    """Ports of a switch that send what a GPU and an adapter below it say to each other over the root, by their control
    registers of Access Control Services."""
    known = gpus_by_address(gpus)
    faults = []
    for gpu, adapters in adapters_by_gpu(gpus, devices, ports).items():
        between = dict.fromkeys(_between(devices, gpu, adapters))
        told = [
            f"{port} ({value:#06x})"
            for port in between
            if (value := control.get(port) or 0) & REDIRECTED and not value & DIRECT_TRANSLATED
        ]
        if told:
            what = f"by the ACS control of {' and '.join(told)} requests are redirected"
            faults.append(Fault("acs_enabled", (_rail(known[gpu]),), what))
    return faults


def _between(devices: Devices, gpu: str, adapters: Iterable[str]) -> Iterator[str]:
    """The ports of the common switch that lead to the GPU, and to the adapters."""
    for adapter in adapters:
        common = shared_port(devices, gpu, adapter)
        sides = (below(devices, common, each) for each in (gpu, adapter)) if common else ()
        yield from filter(None, sides)


def _rail(gpu: Gpu) -> Where:
    return Place(gpu.node, "rail", gpu.index)


def _node(number: float | None) -> str:
    return "unknown" if number is None or number < 0 else f"{number:g}"
