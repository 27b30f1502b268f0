"""What is in the machine, and whether it fits together. Cheap and disqualifying, so it comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from pytest_gpufleet import (
    THIS_NODE,
    Fault,
    GiB,
    Gpu,
    GpuTopology,
    LiveMachine,
    Profile,
    Rank,
    World,
    at_least,
    expect,
    expect_none,
    not_applicable,
    not_judged,
)
from pytest_gpufleet.machine import health, network_ports, nvlink_domain, processors, software, tools
from pytest_gpufleet.machine.gpu_facts import for_servers
from pytest_gpufleet.model.events import NO_NETWORK, Order
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.probes.links.copies import pcie_generation_under_load
from pytest_gpufleet.probes.memory import clocks_under_load
from pytest_gpufleet.verdict import orders

pytestmark = [
    pytest.mark.chapter("Inventory", "Is everything there that was ordered, and set up as it should be?"),
    pytest.mark.proves_sound,
]
needs_gpus = pytest.mark.needs(gpus=True)
Notice = Callable[[Iterable[Fault]], None]

# Data sheets and NVML round the speed of an NVLink, each in its own way.
ROUNDED = 0.99
# What NVML gives as a GPU's memory is more than the data sheet's billions of bytes, less where error correction takes
# a part of it.
MEMORY = 0.93
OPEN_FILES = 16_384
# Hints by which a processor runs at full clock under load although its governor is "powersave".
ENERGY_PREFERENCES = ("performance", "balance_performance")


@needs_gpus
def test_gpu_count(machine: LiveMachine, gpu_topology: GpuTopology, pytestconfig: pytest.Config) -> None:
    """As many GPUs as ordered

    A GPU that is missing has failed, is not seated, fell off the bus (XID 79 in the kernel log) or is hidden from this
    container. Compare `nvidia-smi -L` and `lspci | grep -i nvidia` with the serial numbers on the delivery note; reseat
    or replace the one that is not listed.
    """
    asked, here = pytestconfig.getoption("gpus"), len(machine.gpus)
    if not isinstance(asked, int):
        not_applicable(f"--gpus {asked} asks for no number, --gpus N does")
    visible = machine.host["environment"].get("CUDA_VISIBLE_DEVICES")
    why = [
        *gpu_topology.problems,
        *([f"CUDA_VISIBLE_DEVICES={visible!r} hides those that it does not name"] if visible is not None else []),
        "`lspci | grep -i nvidia` shows whether a card that is missing is still on the bus",
    ]
    if here != asked:
        expect_none([Fault("gpu_missing", (THIS_NODE,), f"{here} of {asked} GPUs are here: {'; '.join(why)}")])


@needs_gpus
def test_software_fits_driver(gpu_topology: GpuTopology) -> None:
    """Driver, CUDA, cuDNN, NCCL and torch are installed and compatible

    A driver older than the CUDA that torch was built for runs nothing; a missing NCCL leaves GPUs unable to talk to
    each other. Update the driver, or install a torch that was built for it.
    """
    names = ("driver", "cuda_driver", "cuda", "cudnn", "nccl", "torch")
    missing = [f"{name} is missing" for name in names if getattr(gpu_topology, name) is None]
    expect_none(Fault("software_mismatch", (THIS_NODE,), problem) for problem in (*gpu_topology.problems, *missing))


@needs_gpus
def test_versions_have_no_known_defect(machine: LiveMachine, gpu_topology: GpuTopology, notice: Notice) -> None:
    """Driver and firmware of network adapters have no known defect

    Some versions compute wrong results or crash, and NVIDIA has named the version that fixes it: the failure names
    version, defect and source. Update to that version, or to a newer one of the same train. A security update that is
    missing is named beside the verdict: it breaks no machine. Versions of which nothing is known here pass.
    """
    ports = network_ports.NETWORK_PORTS.of(machine.host)
    wrong, shown = software.known_defects(gpu_topology.driver or "", () if isinstance(ports, Missing) else ports)
    notice(shown)
    expect_none(wrong)
    if gpu_topology.driver is None:
        not_judged("the driver does not say its version")
    if isinstance(ports, Missing) and not ports.absent:
        not_judged(str(ports))


@needs_gpus
@pytest.mark.parametrize(
    "fact",
    ["name", "vbios", "gsp_firmware", "memory_bytes", "inforom_version", "pcie_generation_max", "power_smoothing"],
)
def test_gpus_are_alike(machine: LiveMachine, fact: str) -> None:
    """All GPUs are of one model, firmware, memory size and slot generation

    One that differs was swapped, updated alone, has lost memory or smooths its power by another profile. It runs at its
    own pace, and every collective at the pace of the slowest. Replace it or bring its firmware to the others' version.
    Of two that differ, or of half and half, all are named.
    """
    known = [value for gpu in machine.gpus if not isinstance(value := gpu[fact], Missing)]
    most = [value for value in known if known.count(value) == max(map(known.count, known))]
    clear = bool(most) and most.count(most[0]) == len(most)
    wanted = most[0] if clear else assertions.Wanted("that of most GPUs, which differ", lambda value: False)
    code = f"{fact}_differs" if fact in ("gsp_firmware", "power_smoothing") else "gpu_unlike_others"
    expect(machine.gpus, fact, wanted, code=code)


@needs_gpus
def test_bar1_is_as_large_as_of_others(machine: LiveMachine) -> None:
    """BAR1 size is the same on all GPUs

    The host and network adapters reach a GPU's memory through this window. Where the BIOS gave one GPU a smaller one,
    GPUDirect RDMA and large pinned buffers fail or crawl on it alone. `nvidia-smi -q -d MEMORY` shows it. Turn on
    "Above 4G Decoding" and "Resizable BAR" in the BIOS, update it, and look at the slot.
    """
    sizes = [size for gpu in machine.gpus if isinstance(size := gpu["bar1_bytes"], int)]
    if len(sizes) == 1:
        not_applicable("there is no other GPU to compare it with")
    expect(machine.gpus, "bar1_bytes", at_least(max(sizes, default=0)), code="bar1_small")


@needs_gpus
def test_memory_is_complete(machine: LiveMachine, gpu_profile: Profile | None) -> None:
    """GPU memory size is that of the model

    A GPU that shows less has lost a part of its memory, is a lesser model under the same name, or only a share of one
    (a virtual GPU). Compare `nvidia-smi --query-gpu=name,memory.total --format=csv` with the order.
    """
    rated = gpu_profile.facts.get("memory_gigabytes") if gpu_profile else None
    if rated is None:
        not_applicable("no profile says how much memory this model has")
    expect(machine.gpus, "memory_bytes", at_least(int(MEMORY * rated * 1e9)), code="memory_incomplete")


@needs_gpus
def test_no_foreign_process(gpu_topology: GpuTopology) -> None:
    """No other process is using the GPUs

    A process from before this run shares the GPU with every test, lowers measurements and makes the verdict worthless.
    End it (`nvidia-smi` lists it), or ask its owner; in a container it may belong to another one.
    """
    expect_none(
        Fault("foreign_process", (gpu.place,), ", ".join(gpu.processes)) for gpu in gpu_topology.gpus if gpu.processes
    )


def test_no_harmful_variable(machine: LiveMachine, gpu_topology: GpuTopology) -> None:
    """No environment variable slows down NCCL or CUDA

    Left from debugging or baked into an image, they turn links or algorithms off for every program. Unset those that
    are named; the report lists all others that steer NCCL, CUDA and torch.
    """
    expect_none(software.harmful_variables(machine.host["environment"], gpu_topology))


@needs_gpus
def test_topology_file_fits(machine: LiveMachine) -> None:
    """NCCL's topology file can be read, and has the GPUs of this machine

    A virtual machine does not show its PCIe switches, so clouds give NCCL a file of them (NCCL_TOPO_FILE). If the file
    is not in the container, or belongs to another machine type, NCCL continues without a message and takes wrong paths:
    half the bandwidth, or less. Mount it, take that of this machine type, or unset the variable.
    """
    file = assertions.of_host(machine.host.get, software.TOPOLOGY_FILE)
    expect_none(software.unfit_topology_file(file, machine.gpus))


@needs_gpus
def test_pcie_width_is_full(machine: LiveMachine, gpu_profile: Profile | None) -> None:
    """PCIe link width of every GPU is full

    A link with fewer lanes halves the speed to the host. If it trained with fewer than the slot has, reseat the GPU or
    riser and clean the contacts; if it stays, the board or the slot is bad. If the slot itself has fewer, the GPU is in
    the wrong slot, or riser or cable lack lanes. If the machine was ordered like this, put pcie_width into the facts of
    a profile.
    """
    ordered = int(gpu_profile.facts.get("pcie_width", 0)) if gpu_profile else 0
    expect(
        machine.gpus, "pcie_width", lambda gpu: at_least(ordered or gpu["pcie_width_max"]), code="pcie_width_reduced"
    )
    expect(machine.gpus, "pcie_width", lambda gpu: at_least(ordered or health.pcie_lanes(gpu)), code="pcie_slot_narrow")


@needs_gpus
def test_pcie_generation_is_full_under_load(world: World, gpu_profile: Profile | None) -> None:
    """PCIe link speed of every GPU under load is that of its model

    Read under load, since an idle link saves power at a lower speed. A lower generation: BIOS setting of the slot,
    riser or retimer, or a slot that is older than the GPU. If the machine was ordered with such slots, put
    pcie_generation into the facts of a profile.
    """
    generations = world.run(pcie_generation_under_load)
    if not any(generations):
        not_applicable("NVML does not show the generation of these links")
    rated = int(gpu_profile.facts.get("pcie_generation", 0)) if gpu_profile else 0

    def slow(now: int, best: int) -> str:
        wanted = max(rated, best)
        return "" if now and now >= wanted else f"generation {now or 'unknown'} of {wanted or 'unknown'}"

    expect_none(world.faults("pcie_generation_reduced", [slow(*(each or (0, 0))) for each in generations]))


@needs_gpus
def test_nvlinks_are_up(machine: LiveMachine, gpu_profile: Profile | None, gpu_topology: GpuTopology) -> None:
    """All NVLinks of the model are active

    A link that is down or missing takes its share of the bandwidth of every collective. `nvidia-smi nvlink -s` shows
    them; reset the GPU and look at the kernel log for XID 74; if it stays, the GPU, the bridge or the switch board is
    bad. Of models whose links need a bridge, a GPU may have none.
    """
    gpus = machine.gpus
    count = int(gpu_profile.facts.get("nvlinks", 0)) if gpu_profile else 0
    most = max((sum(gpu["nvlink_states"]) for gpu in gpus if isinstance(gpu["nvlink_states"], list)), default=None)
    bridged = not count and gpu_topology.fabric != "nvswitch"
    if bridged and most == 0:
        not_applicable("no bridge connects the NVLinks of these GPUs")
    # Of those that need a bridge some may lead nowhere, as on the H100 NVL, and nobody can say which.
    as_others = assertions.Wanted(f"{most} active links, as others have", lambda states: sum(states) in (0, most))

    def wanted(gpu: Gpu) -> Any:
        return as_others if bridged else [1] * (count or len(gpu["nvlink_states"]))

    # A virtual machine with a single GPU may have none: they would lead nowhere.
    expect(gpus, "nvlink_states", wanted, code="nvlink_down", must_exist=count > 0 and len(gpus) > 1)


@needs_gpus
def test_nvlinks_are_equally_fast(machine: LiveMachine, gpu_profile: Profile | None) -> None:
    """NVLink speed is that of the model on all links

    A slower link was trained down after errors. `nvidia-smi nvlink -s` names it; reset the GPU, then replace it.
    """
    gpus = machine.gpus
    speeds = [speed for gpu in gpus if isinstance(gpu["nvlink_speeds"], list) for speed in gpu["nvlink_speeds"]]
    # A link that leads nowhere has no speed.
    expect(
        gpus, "nvlink_speeds", lambda gpu: [speed and max(speeds) for speed in gpu["nvlink_speeds"]], code="nvlink_slow"
    )
    facts = gpu_profile.facts if gpu_profile else {}
    links = facts.get("nvlinks") or max(1, *(len(gpu["nvlink_speeds"]) for gpu in gpus))
    rated = facts.get("nvlink_gigabytes_per_second", 0) / links
    as_rated = assertions.Wanted(
        f"{rated:g} GB/s a link, as of this model",
        lambda speeds: all(not 0 < speed < ROUNDED * rated for speed in speeds),
    )
    expect(gpus, "nvlink_speeds", as_rated, code="nvlink_slow")


@needs_gpus
def test_fabric_is_ready(machine: LiveMachine, gpu_profile: Profile | None, gpu_topology: GpuTopology) -> None:
    """All GPUs are registered in the NVSwitch fabric, and its state is healthy

    State 3 is completed, status 0 success. Otherwise start nvidia-fabricmanager (of exactly the driver's version; on
    the host of a virtual machine or container) and read its log; without it GPUs with NVSwitch cannot talk to each
    other. A fabric that is complete can still be degraded, have lost a route, be configured wrongly, or be divided, so
    that some GPUs of this machine do not reach others: its log says why. State 0 says nothing, so on a machine with
    NVSwitches the fabric is not judged then.
    """
    if all(gpu["fabric"] == {"state": 0, "status": 0} for gpu in machine.gpus):
        count = int(gpu_profile.facts.get("nvlinks", 0)) if gpu_profile else 0
        if health.has_nvswitch(machine.gpus, gpu_topology, count):
            not_judged("the driver has not started the fabric (state 0): `systemctl status nvidia-fabricmanager`")
        not_applicable("these GPUs are in no NVSwitch fabric")
    expect(machine.gpus, "fabric", {"state": 3, "status": 0}, code="fabric_not_ready")
    expect_none(health.fabric_faults(machine.gpus))


@needs_gpus
def test_imex_is_ready(machine: LiveMachine) -> None:
    """IMEX is configured and ready for multi-node NVLink

    The trays of a rack (GB200 and GB300 NVL72) share memory over NVLink only if the daemon of each is ready, has a list
    of all nodes, and gives programs a channel; else NCCL fails, or takes the network. `systemctl status nvidia-imex`,
    `nvidia-imex-ctl -N`, /etc/nvidia-imex/nodes_config.cfg, /dev/nvidia-caps-imex-channels. A daemon that waits for
    those of other trays is not judged here: look at theirs.
    """
    if not any(gpu.of_rack for gpu in machine.gpus):
        not_applicable("no GPU of this machine has NVLinks to other machines")
    imex = nvlink_domain.IMEX.of(machine.host)
    if isinstance(imex, Missing):
        remedy = "set IMEX up (its guide), or run in a job that has a channel (a ComputeDomain)" if imex.absent else ""
        not_judged(f"{imex}{remedy and f': {remedy}'}")
    expect_none(nvlink_domain.imex_faults(imex))
    if imex.waits:
        not_judged(f"its daemon waits for those of other machines ({imex.daemon}): `nvidia-imex-ctl -N` names them")


@needs_gpus
def test_every_pair_reaches_each_other(machine: LiveMachine, gpu_topology: GpuTopology) -> None:
    """P2P access works over NVLink, and over PCIe for all pairs alike

    Without it data goes through host memory. GPUs without NVLinks need not have it; if one pair has it, all pairs with
    the same kind of PCIe path must. Look at `nvidia-smi topo -p2p r`; usual causes are IOMMU or ACS settings and a
    fabric that is not ready.
    """
    if len(machine.gpus) < 2:
        not_applicable("there is only one GPU, and no pair")
    expect(machine.gpus, "p2p", health.peer_access(gpu_topology), code="no_peer_access")


@needs_gpus
def test_ecc_is_on(machine: LiveMachine) -> None:
    """ECC is on, now and after the next boot

    Without it a flipped bit in memory goes unseen. Turn it on: `nvidia-smi -e 1`, then reboot. Models that are sold
    with it off, and can have it for a part of their memory and speed, are left as they are.
    """
    if all(gpu["ecc_mode_default"] == 0 for gpu in machine.gpus):
        not_applicable("this model has error correction off unless somebody turns it on")
    expect(machine.gpus, "ecc_mode", [1, 1], code="ecc_off")


@needs_gpus
def test_mig_is_off(machine: LiveMachine) -> None:
    """MIG is off

    A GPU in MIG mode gives a program only a part of itself: `nvidia-smi -mig 0`.
    """
    expect(machine.gpus, "mig_mode", [0, 0], code="mig_on")


@needs_gpus
def test_compute_mode_is_default(machine: LiveMachine) -> None:
    """Compute mode is Default (0)

    Exclusive or prohibited mode makes programs fail with "all CUDA-capable devices are busy": `nvidia-smi -c 0`.
    """
    expect(machine.gpus, "compute_mode", 0, code="compute_mode_limited")


@needs_gpus
def test_persistence_mode_is_on(machine: LiveMachine) -> None:
    """Persistence mode is on

    Without it the driver is unloaded between programs: every start takes seconds and settings are lost. Enable
    nvidia-persistenced. It is required on data centre boards; on GeForce and workstation boards drivers leave it off.
    """
    boards = [gpu for gpu in machine.gpus if for_servers(gpu)]
    if not boards:
        not_applicable("no GPU here is a board for data centres")
    expect(boards, "persistence_mode", 1, code="persistence_mode_off")


@needs_gpus
def test_power_limit_is_default(machine: LiveMachine) -> None:
    """Power limit is at its default

    A lowered limit slows the GPU under load: `nvidia-smi -pl` with the default that is named, or ask who set it.
    """
    expect(
        machine.gpus,
        "power_limit_watts",
        lambda gpu: at_least(gpu["power_limit_default_watts"]),
        code="power_limit_lowered",
    )


@needs_gpus
def test_default_power_limit_is_of_the_model(machine: LiveMachine, gpu_profile: Profile | None) -> None:
    """Default power limit is that of the model's data sheet

    A board that was made for less power, or got such firmware, is slower under load by design, and `nvidia-smi -pl`
    cannot give it more. Compare part number and VBIOS with the order (`nvidia-smi -q`). If the model is sold with other
    limits, put power_watts into the facts of a profile. Boards of GeForce have the limit of their maker.
    """
    rated = gpu_profile.facts.get("power_watts") if gpu_profile else None
    boards = [gpu for gpu in machine.gpus if for_servers(gpu)]
    if not boards:
        not_applicable("no GPU here is a board for data centres")
    if not rated:
        not_applicable("no profile says which power limit this model has")
    assertions.require_any(boards, "power_limit_default_watts")
    expect_none(fault for gpu in boards for fault in health.low_default_power(gpu, rated))


@needs_gpus
def test_application_clocks_are_default(machine: LiveMachine) -> None:
    """Application clocks are at their default

    Reset them: `nvidia-smi -rac`.
    """
    expect(
        machine.gpus, "application_clock_mhz", lambda gpu: gpu["application_clock_default_mhz"], code="clocks_pinned"
    )


@needs_gpus
def test_clocks_are_full_under_load(machine: LiveMachine, world: World) -> None:
    """GPU clocks are not locked below their maximum

    Locked clocks (`nvidia-smi -lgc`, `-lmc`) and some management software make a GPU slower than it is, and no setting
    that NVML has shows them. While its memory is copied a GPU reaches its highest clocks, unless heat or its power
    limit holds it back at that moment. Reset them: `nvidia-smi -rgc` and `nvidia-smi -rmc`.
    """
    seen = world.run(clocks_under_load)
    if not any(seen):
        not_applicable("NVML does not show the clocks of these GPUs")
    expect_none(
        world.faults("fact_unreadable", ["" if each else "its clocks under load cannot be read" for each in seen])
    )
    expect_none(fault for gpu, each in zip(machine.gpus, seen, strict=True) for fault in health.held_clocks(gpu, each))


@needs_gpus
def test_no_recovery_is_pending(machine: LiveMachine) -> None:
    """No GPU has a pending recovery action

    1 is a reset, 2 a reboot, 3 and 4 draining it first: do that, then run again.
    """
    expect(machine.gpus, "recovery_action", 0, code="recovery_pending")


@needs_gpus
def test_inforom_is_valid(machine: LiveMachine) -> None:
    """InfoROM is valid

    A corrupted InfoROM loses serial numbers and error history, or returns garbage: replace the GPU.
    """
    expect_none(fault for gpu in machine.gpus for fault in health.unreadable(gpu, ("serial", "uuid", "pci_bus_id")))
    expect(machine.gpus, "inforom_valid", True, code="inforom_invalid")


@needs_gpus
def test_shared_memory_is_large_enough(machine: LiveMachine) -> None:
    """/dev/shm has at least 8 GiB

    NCCL and data loaders exchange data through it; with the 64 MiB that containers get by default they fail or crawl.
    Start containers with --ipc=host or --shm-size=16g.
    """
    assertions.expect_host(machine, tools.SHARED_MEMORY, at_least(8 * GiB), code="shared_memory_small")


@needs_gpus
def test_memory_may_be_locked(machine: LiveMachine) -> None:
    """memlock limit is unlimited

    RDMA and pinned buffers fail under a limit: --ulimit memlock=-1 for containers, limits.conf on the host.
    """
    assertions.expect_host(machine, tools.LOCKED_MEMORY, "unlimited", code="locked_memory_limited")


@needs_gpus
def test_files_may_be_opened(machine: LiveMachine) -> None:
    """nofile limit (open files, hard) is at least 16,384

    Data loaders and NCCL pass memory and connections along as open files. Raise `ulimit -Hn`: --ulimit nofile=1048576
    for containers, limits.conf on the host.
    """
    enough = assertions.Wanted(f"at least {OPEN_FILES:,}", lambda limit: limit == "unlimited" or limit >= OPEN_FILES)
    assertions.expect_host(machine, tools.MOST_OPEN_FILES, enough, code="open_files_limited")


@needs_gpus
def test_processors_run_at_full_clock(machine: LiveMachine) -> None:
    """CPU governor is performance

    The processors launch every GPU kernel: at a low clock the GPUs wait for them. Set the governor "performance":
    `cpupower frequency-set -g performance`. Drivers that choose the clock by themselves (intel_pstate, amd_pstate) may
    say "powersave" if their energy preference is performance or balance_performance.
    """
    preference = processors.CPU_ENERGY_PREFERENCE.of(machine.host)
    fast = assertions.Wanted(
        "performance", lambda governor: governor == "performance" or preference in ENERGY_PREFERENCES
    )
    assertions.expect_host(machine, processors.CPU_GOVERNOR, fast, code="cpu_governor")


@needs_gpus
def test_processors_near_each_gpu_may_be_used(machine: LiveMachine) -> None:
    """CPU affinity allows the CPUs next to every GPU

    A container or job that was given processors on the other side of the machine only sends everything over the link
    between the sockets. Give it the processors that `nvidia-smi topo -m` lists under CPU affinity.
    """
    allowed = machine.host["processor_set"]

    def usable(words: list[int]) -> bool:
        return any(words[n // 64] >> n % 64 & 1 for n in allowed if n // 64 < len(words))

    near = assertions.Wanted(f"a set with one of the processors {allowed}, which this process may use", usable)
    expect(machine.gpus, "cpu_affinity", near, code="cpu_affinity")


@needs_gpus
def test_cpu_affinity_fits_the_pci_bus(machine: LiveMachine) -> None:
    """CPU affinity of every GPU is that of its PCI bus

    Ranks run on the processors that the driver calls near their GPU. Where firmware has that wrong for some GPUs, as
    two that are swapped, all of their data crosses the link between the sockets. Compare `nvidia-smi topo -m` with
    `cat /sys/class/pci_bus/*/cpulistaffinity`; update the BIOS, and look at its NUMA settings.
    """
    assertions.require_any(machine.gpus, "pci_bus_cpus")
    expect_none(fault for gpu in machine.gpus for fault in health.numa_mismatch(gpu))


@needs_gpus
def test_network_ports_are_active(machine: LiveMachine, fleet_order: Order | None, fleet_network: str) -> None:
    """All InfiniBand and RoCE ports are up, at one speed

    A port that is down or slower than the others takes its share of every transfer between machines. Look at cable,
    transceiver and switch port: `ibstat`. A port is compared with those of its kind: the same adapter model, link layer
    and place on the adapter, next to a GPU or not. A kind that is down as a whole is left out if GPUs have other ports
    that are up, unless the order (--fleet-order) has it in use. If no port of the GPUs is up, all are named: if that is
    intended, give `--fleet-network none`.
    """
    there = assertions.of_host(machine.host.get, network_ports.NETWORK_PORTS)
    expect_none(orders.ports_down(fleet_order, there))
    expect_none(network_ports.not_up(there, machine.gpus, needed=fleet_network != NO_NETWORK))
    assertions.ports_in_use(machine)


@needs_gpus
def test_network_ports_have_full_pcie(machine: LiveMachine) -> None:
    """PCIe link of every network adapter in use is at full speed, and fast enough for its port

    An adapter whose link trained with fewer lanes or at a lower speed sends slower than its port, and nothing but the
    transfers between machines shows it. Reseat it and clean its contacts; a slot that has less than the port needs
    is the wrong one. Where all slots of the machine are of a generation too slow for its ports, it was built so.
    """
    ports = assertions.ports_in_use(machine)
    if not any(port.pcie.lanes for port in network_ports.active(ports)):
        not_applicable("no active network port shows its PCIe link, as where a virtual machine hides it")
    expect_none(network_ports.ports_behind_slow_pcie(ports))


@pytest.mark.spmd
def test_every_rank_reaches_its_gpu(rank: Rank) -> None:
    """Every rank computes on its own GPU

    The first real work on the GPU that NVML lists under this number. If it fails, look at the kernel log for XIDs of
    the GPU named, and whether another process holds it (`nvidia-smi`).
    """
    rows = torch.arange(512, dtype=torch.float32, device=rank.device)
    product = rows.expand(512, 512) @ torch.ones(512, 512, device=rank.device)
    assert (product == 512 * 511 / 2).all()
