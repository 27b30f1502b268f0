"""The PCIe links between GPUs, network adapters, drives and the processors, and what goes over them."""

from __future__ import annotations

import pytest

from pytest_gpufleet import GpuTopology, LiveMachine, expect_none, not_applicable, not_judged
from pytest_gpufleet.machine import gpudirect, host, pcie
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.plugin import assertions

pytestmark = [
    pytest.mark.chapter("PCIe", "Are all links whole, and can network adapters reach the memory of GPUs?"),
    pytest.mark.proves_sound,
    pytest.mark.needs(gpus=True),
]


def test_links_to_the_root_are_full(machine: LiveMachine) -> None:
    """PCIe width and speed of root ports and switches are full, those of NVMe drives alike

    A riser, retimer or cable that is bad costs lanes or speed above the GPU, where the GPU's own link shows nothing,
    and everything below that switch shares what is left. Reseat riser or cable at the two addresses that are named
    (`lspci -tv` shows where they are); if it stays, the retimer, the switch board or the slot is bad. The links of GPUs
    and of network adapters themselves are judged by `test_pcie_width_is_full` and `test_network_ports_have_full_pcie`.
    """
    devices = assertions.of_host(machine.host.get, pcie.PCI_DEVICES)
    links = pcie.judged_links(devices)
    if not any(link.runs[0] for link in links):
        if not links or pcie.in_virtual_machine(machine.gpus):
            not_applicable("no PCIe switch and no NVMe drive is visible, as in a virtual machine")
        not_judged("the kernel shows the lanes of no PCIe port (current_link_width): compare with `sudo lspci -vv`")
    expect_none(pcie.reduced_links(devices, machine.gpus))


def test_no_uncorrected_pcie_error_is_recorded(machine: LiveMachine) -> None:
    """No uncorrectable PCIe error (AER) of a GPU, network adapter or NVMe drive since boot

    Such an error loses what was sent: a fatal one takes the link down, and the device with it. The kernel counts them
    by device (`aer_dev_fatal`, `aer_dev_nonfatal` in /sys/bus/pci/devices). The two ends of the deepest link with
    errors are named: reseat what is there, look at riser, cable and retimer. A restart of the machine clears the
    counters; if they come back, replace what is between. Requests to absent devices (UnsupReq) do not count: every
    system makes them at boot.
    """
    devices = assertions.of_host(machine.host.get, pcie.PCI_DEVICES)
    require_counters(machine, devices)
    expect_none(pcie.uncorrected_errors(devices, machine.gpus))


@pytest.mark.at_the_end
def test_pcie_paths_stayed_clean(machine: LiveMachine) -> None:
    """PCIe errors (AER) of GPUs, network adapters and NVMe drives during the run

    NVML counts only errors of the GPU's own link. A riser, retimer or switch above it degrades unseen until everything
    below it fails. One uncorrected error is too many; corrected ones are limited to the rate that the PCIe
    specification allows a link, one wrong bit in 10^12. The two ends of the link are named (`lspci -tv`): reseat what
    is there, look at riser, cable and retimer; errors that come back in another slot belong to the device.
    """
    before = assertions.of_host(machine.host.get, pcie.PCI_DEVICES)
    now = assertions.of_host(machine.now, pcie.PCI_DEVICES, read_before=True)
    require_counters(machine, before if pcie.counts_errors(before) else now)
    expect_none(pcie.path_errors(before, now, machine.gpus, machine.seconds_ago))


def test_adapters_are_next_to_gpus(machine: LiveMachine) -> None:
    """Network adapters are next to their GPUs: same PCIe switch, same NUMA node

    A GPU whose adapter is elsewhere sends its data over the processor, perhaps to the other socket, and its rail is
    slow. Where most GPUs of this machine have an adapter under their switch, all should; where there is one for each
    GPU, no switch or NUMA node should have more of them and another one fewer. The adapter is in the wrong slot, has no
    link, or is gone: compare `nvidia-smi topo -m` (PIX or PXB is near) with another machine of this kind.
    """
    devices, ports = assertions.of_host(machine.host.get, pcie.PCI_DEVICES), assertions.ports_in_use(machine)
    expect_none(gpudirect.misplaced_adapters(machine.gpus, devices, ports))
    pairs(machine, devices, ports)
    expect_none(gpudirect.without_adapter(machine.gpus, devices, ports))


def test_gpudirect_rdma_can_work(machine: LiveMachine) -> None:
    """GPUDirect RDMA can work: network adapters can read and write the memory of GPUs

    Without it everything between nodes goes through host memory, at a fraction of the speed, and each rail looks as if
    its adapter were bad. Load the module (`modprobe nvidia_peermem`; NVIDIA's open driver with kernel 5.12 or newer
    needs none), and boot with `iommu=pt`: an IOMMU that translates the addresses of a GPU and its adapter makes them
    meet at the processor instead of at the switch.
    """
    ports, devices = assertions.ports_in_use(machine), assertions.of_host(machine.host.get, pcie.PCI_DEVICES)
    if not gpudirect.built_for_gpudirect(machine.gpus, devices, ports):
        not_applicable("no GPU shares a PCIe switch with a network adapter in use here, and there are fewer than GPUs")
    ways = assertions.of_host(machine.host.get, gpudirect.GPUDIRECT)
    kernel = assertions.of_host(machine.host.get, host.KERNEL)
    expect_none(gpudirect.blocked(machine.gpus, devices, ports, ways, kernel))


@pytest.mark.level("standard")
def test_switches_let_adapters_reach_gpus(machine: LiveMachine) -> None:
    """ACS does not redirect GPU-NIC traffic

    Access Control Services (ACS) of a switch's ports redirect what a GPU and its network adapter send each other to the
    root, for the sake of virtual machines: GPUDirect RDMA becomes slow or hangs. `lspci -vvv` shows ReqRedir+ at the
    ports that are named. Turn ACS off in the BIOS, or at every boot: `setpci -s ADDRESS ECAP_ACS+0x6.w=0000`. On a host
    of virtual machines it has to stay on, with address translation by the adapters (ATS) and DirectTrans+ at the ports.
    """
    ports, devices = assertions.ports_in_use(machine), assertions.of_host(machine.host.get, pcie.PCI_DEVICES)
    pairs(machine, devices, ports)
    control = assertions.of_host(machine.now, gpudirect.PCIE_ACS)
    expect_none(gpudirect.acs_between_gpus_and_adapters(machine.gpus, devices, ports, control))


@pytest.mark.level("standard")
def test_switches_let_gpus_reach_each_other(machine: LiveMachine, gpu_topology: GpuTopology) -> None:
    """ACS does not redirect traffic between GPUs that reach each other over PCIe

    The same for GPUs below one switch that no NVLink connects: what they send each other (P2P) goes up to the processor
    and back, so that pairs are slow or hang. Turn ACS off as for `test_switches_let_adapters_reach_gpus`.
    """
    devices = assertions.of_host(machine.host.get, pcie.PCI_DEVICES)
    if not gpudirect.pairs_over_pcie(gpu_topology, devices):
        not_applicable("no two GPUs without NVLink between them share a PCIe switch")
    expect_none(gpudirect.acs_between_gpus(gpu_topology, devices, assertions.of_host(machine.now, gpudirect.PCIE_ACS)))


def pairs(machine: LiveMachine, devices: pcie.Devices, ports: list[Port]) -> None:
    """End the check where no GPU has an adapter under its switch."""
    if not any(gpudirect.adapters_by_gpu(machine.gpus, devices, ports).values()):
        not_applicable("no GPU shares a PCIe switch with a network adapter in use here, as in a virtual machine")


def require_counters(machine: LiveMachine, devices: pcie.Devices) -> None:
    """End the check where nobody counts errors."""
    if not pcie.counts_errors(devices):
        if pcie.in_virtual_machine(machine.gpus) or not devices:
            not_applicable("a virtual machine hides the errors of PCIe links")
        not_judged(
            "errors of PCIe links are not counted: the firmware keeps them to itself; boot with `pcie_ports=native`, "
            "or hand AER to the system in the BIOS"
        )
