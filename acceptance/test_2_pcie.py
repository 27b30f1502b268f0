"""The PCIe links between GPUs, network adapters, drives and the processors, and what goes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_gpufleet import LiveMachine, expect_none, not_applicable
from pytest_gpufleet.machine import host, pci_devices, rdma
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.verdict.host_rules import gpudirect_rules, pcie_rules

pytestmark = [
    pytest.mark.chapter("PCIe", "Are all links whole, and can network adapters reach the memory of GPUs?"),
    pytest.mark.proves_sound,
    pytest.mark.needs(gpus=True),
]

NO_ERRORS_TOLD = (
    "nobody counts the errors of PCIe links here: a virtual machine hides them, or the firmware keeps them to itself"
)


def test_links_to_the_root_are_full(machine: LiveMachine) -> None:
    """Every PCIe link between processors and switches has all lanes and the full speed, every NVMe drive's as others'

    A riser, retimer or cable that is bad costs lanes or speed above the GPU, where the GPU's own link shows nothing,
    and everything below that switch shares what is left. Reseat riser or cable at the two addresses that are named
    (`lspci -tv` shows where they are); if it stays, the retimer, the switch board or the slot is bad. The links of GPUs
    and of network adapters themselves are judged by `test_pcie_width_is_full` and `test_network_ports_have_full_pcie`.
    """
    devices = assertions.of_host(machine.host.get, pci_devices.PCI_DEVICES)
    if not pcie_rules.tells_links(devices):
        not_applicable("no PCIe switch, drive or port tells its link here, as where a virtual machine hides them")
    expect_none(pcie_rules.reduced_links(devices, machine.gpus))


def test_no_uncorrected_pcie_error_is_recorded(machine: LiveMachine) -> None:
    """No PCIe link to a GPU, network adapter or NVMe drive has had an error since boot that could not be corrected

    Such an error loses what was sent: a fatal one takes the link down, and the device with it. The kernel counts them
    by device (`aer_dev_fatal`, `aer_dev_nonfatal` in /sys/bus/pci/devices). What is named are the two ends of the
    deepest link that counted any: reseat what is there, look at riser, cable and retimer. A restart of the machine
    clears the counters; if they come back, replace what is between. Requests to devices that are not there (UnsupReq)
    are left out, for a system makes them at boot.
    """
    devices = assertions.of_host(machine.host.get, pci_devices.PCI_DEVICES)
    if not pcie_rules.counts_errors(devices):
        not_applicable(NO_ERRORS_TOLD)
    expect_none(pcie_rules.uncorrected_errors(devices, machine.gpus))


@pytest.mark.at_the_end
def test_pcie_paths_stayed_clean(machine: LiveMachine) -> None:
    """No PCIe link between GPUs, network adapters, NVMe drives and the root had more errors than a healthy one

    NVML counts those of the GPU's own link. A riser, retimer or switch above it goes bad unseen until it takes all
    below it down. Of errors that could not be corrected one is too many; corrected ones are held against the rate that
    the PCIe specification allows a link, one wrong bit in 10^12. The two ends of the link are named (`lspci -tv`):
    reseat what is there, look at riser, cable and retimer; errors that come back in another slot belong to the device.
    """
    before, now = (
        assertions.of_host(machine.host.get, pci_devices.PCI_DEVICES),
        assertions.of_host(machine.now, pci_devices.PCI_DEVICES, read_before=True),
    )
    if not pcie_rules.counts_errors(before) and not pcie_rules.counts_errors(now):
        not_applicable(NO_ERRORS_TOLD)
    expect_none(pcie_rules.path_errors(before, now, machine.gpus, machine.seconds_ago))


def test_adapters_are_next_to_gpus(machine: LiveMachine) -> None:
    """Every GPU has a network adapter under its own PCIe switch, if most GPUs of this machine do

    A GPU without one sends its data over the processor to an adapter elsewhere, perhaps on the other socket, and its
    rail is slow. The adapter is in the wrong slot, has no link, or is gone: compare `nvidia-smi topo -m` (PIX or PXB
    is near) with another machine of this kind. Machines that were built without such pairs are left as they are.
    """
    devices, ports = assertions.of_host(machine.host.get, pci_devices.PCI_DEVICES), assertions.ports_in_use(machine)
    pairs(machine, devices, ports)
    expect_none(gpudirect_rules.adapters_far(machine.gpus, devices, ports))


def test_gpudirect_rdma_can_work(machine: LiveMachine) -> None:
    """Network adapters can read and write the memory of GPUs (GPUDirect RDMA)

    Without it everything between nodes goes through the memory of the host, at a part of the speed, and each rail
    looks as if its adapter were bad. Load the module (`modprobe nvidia_peermem`; NVIDIA's open driver with kernel 5.12
    or newer needs none), and boot with `iommu=pt`: an IOMMU that translates the addresses of a GPU and its adapter
    makes them meet at the processor instead of at the switch.
    """
    ports, devices = assertions.ports_in_use(machine), assertions.of_host(machine.host.get, pci_devices.PCI_DEVICES)
    if not gpudirect_rules.built_for_gpudirect(machine.gpus, devices, ports):
        not_applicable("no GPU shares a PCIe switch with a network adapter in use here, and there are fewer than GPUs")
    ways, kernel = (
        assertions.of_host(machine.host.get, rdma.GPUDIRECT),
        assertions.of_host(machine.host.get, host.KERNEL),
    )
    expect_none(gpudirect_rules.gpudirect_ills(machine.gpus, devices, ports, ways, kernel))


@pytest.mark.level("standard")
def test_switches_let_adapters_reach_gpus(machine: LiveMachine) -> None:
    """No PCIe switch sends what a GPU and its network adapter say to each other over the processor

    Access Control Services (ACS) of the switch's ports redirect it to the root, for the sake of virtual machines:
    GPUDirect RDMA becomes slow or hangs. `lspci -vvv` shows ReqRedir+ at the ports that are named. Turn ACS off in the
    BIOS, or at every boot: `setpci -s ADDRESS ECAP_ACS+0x6.w=0000`. On a host of virtual machines it has to stay on,
    with address translation by the adapters (ATS) and DirectTrans+ at the ports.
    """
    ports, devices = assertions.ports_in_use(machine), assertions.of_host(machine.host.get, pci_devices.PCI_DEVICES)
    pairs(machine, devices, ports)
    expect_none(
        gpudirect_rules.redirecting_ports(
            machine.gpus, devices, ports, assertions.of_host(machine.now, pci_devices.PCIE_ACS)
        )
    )


def pairs(machine: LiveMachine, devices: Mapping[str, Any], ports: Sequence[Mapping[str, Any]]) -> None:
    """End the check where no GPU has an adapter under its switch."""
    if not any(gpudirect_rules.adapters_by_gpu(machine.gpus, devices, ports).values()):
        not_applicable("no GPU shares a PCIe switch with a network adapter in use here, as in a virtual machine")
