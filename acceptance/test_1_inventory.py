"""What is in the machine, and whether it fits together. Cheap and disqualifying, so it comes first."""

import pytest
import torch

from pytest_gpufleet import Faults, GiB, expect, not_applicable
from pytest_gpufleet.probes.links.host_copies import pcie_generation_under_load
from pytest_gpufleet.verdict.health_rules import unreadable

# Variables that make NCCL or CUDA slower than the machine is, or other arithmetic than was asked for. NCCL_TOPO_FILE is
# none: images of clouds set it, since a virtual machine does not show its own topology.
HARMFUL = (
    "NCCL_P2P_DISABLE", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO",
    "NCCL_MIN_NRINGS", "NCCL_MAX_NRINGS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_MAX_CTAS", "NCCL_GRAPH_FILE", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip

# Data sheets and NVML round the speed of an NVLink, each in its own way.
ROUNDED = 0.99
# What NVML tells of a GPU's memory is more than the data sheet's billions of bytes, less where error correction takes
# a part of it.
MEMORY = 0.93
# Hints by which a processor runs at full clock under load although its governor is "powersave".
ENERGY_PREFERENCES = ("performance", "balance_performance")


def test_gpu_count(gpus, machine, gpu_topology, pytestconfig):
    """As many GPUs as ordered

    A GPU that is missing has failed, is not seated, fell off the bus (XID 79 in the kernel log) or is hidden from this
    container. Compare `nvidia-smi -L` and `lspci | grep -i nvidia` with the serial numbers on the delivery note; reseat
    or replace the one that is not listed.
    """
    asked = pytestconfig.getoption("gpus")
    if not isinstance(asked, int):
        not_applicable(f"--gpus {asked} asks for no number, --gpus N does")
    visible = machine.host["environment"].get("CUDA_VISIBLE_DEVICES")
    why = [
        *gpu_topology.problems,
        *([f"CUDA_VISIBLE_DEVICES={visible!r} hides those that it does not name"] if visible is not None else []),
        "`lspci | grep -i nvidia` shows whether a card that is missing is still on the bus",
    ]
    assert len(gpus) == asked, f"{len(gpus)} of {asked} GPUs are here: {'; '.join(why)}"


def test_software_fits_driver(gpus, gpu_topology):
    """Driver, CUDA, cuDNN, NCCL and torch are there and fit together

    A driver older than the CUDA that torch was built for runs nothing; a missing NCCL leaves GPUs unable to talk to
    each other. Update the driver, or install a torch that was built for it.
    """
    assert not gpu_topology.problems
    names = ("driver", "cuda_driver", "cuda", "cudnn", "nccl", "torch")
    assert [name for name in names if getattr(gpu_topology, name) is None] == []


@pytest.mark.parametrize(
    "fact",
    ["name", "vbios", "board_part_number", "memory_bytes", "inforom_version", "pcie_generation_max"],
)
def test_gpus_are_alike(gpus, fact):
    """All GPUs are of one model, board, firmware, memory size and slot generation

    One that differs was swapped, updated alone or has lost memory. It runs at its own pace, and every
    collective at the pace of the slowest. Replace it or bring its firmware to the others' version.
    """
    values = [gpu[fact] for gpu in gpus]
    expect(gpus, fact, max(values, key=values.count))


def test_memory_is_complete(gpus, gpu_profile):
    """Every GPU has all the memory of its model

    A GPU that shows less has lost a part of its memory, is a lesser model under the same name, or only a share of one
    (a virtual GPU). Compare `nvidia-smi --query-gpu=name,memory.total --format=csv` with the order.
    """
    rated = gpu_profile.facts.get("memory_gigabytes") if gpu_profile else None
    if rated is None:
        not_applicable("no profile says how much memory this model has")
    least = int(MEMORY * rated * 1e9)
    expect(gpus, "memory_bytes", lambda gpu: max(least, gpu["memory_bytes"]))


def test_no_foreign_process(gpus, gpu_topology):
    """Nobody else computes on these GPUs

    A process that was there before this run shares the GPU with every test: it makes figures low and verdicts
    worthless. End it (`nvidia-smi` lists it), or ask who runs it; in a container it may belong to another one.
    """
    busy = [f"{gpu.identity}: {', '.join(gpu.processes)}" for gpu in gpu_topology.gpus if gpu.processes]
    assert not busy, "\n".join(busy)


def test_no_harmful_variable(machine):
    """No variable in the environment slows NCCL or CUDA down

    Left from debugging or baked into an image, they turn links or algorithms off for every program. Unset those that
    are named; the report lists all others that steer NCCL, CUDA and torch.
    """
    left = {name: machine.host["environment"][name] for name in HARMFUL if name in machine.host["environment"]}
    assert left == {}


def test_pcie_width_is_full(gpus):
    """Every GPU's PCIe link has all its lanes

    A link that trained with fewer lanes halves the speed to the host: reseat the GPU or riser, clean the contacts; if
    it stays, the board or the slot is bad.
    """
    expect(gpus, "pcie_width", lambda gpu: gpu["pcie_width_max"])


def test_pcie_generation_is_full_under_load(gpus, world, gpu_profile):
    """Every GPU's PCIe link runs at the highest speed of its model while data flows

    Read under load, since an idle link saves power at a lower speed. A lower generation: BIOS setting of the slot,
    riser or retimer, or a slot that is older than the GPU. If the machine was ordered with such slots, say so in a
    profile: pcie_generation among its facts.
    """
    generations = world.run(pcie_generation_under_load)
    if not any(generations):
        not_applicable("NVML does not tell the generation of these links")
    rated = int(gpu_profile.facts.get("pcie_generation", 0)) if gpu_profile else 0
    slow = [
        f"{gpu.identity}: generation {now or 'unknown'} of {max(rated, best) or 'unknown'}"
        for gpu, (now, best) in zip(gpus, [told or (0, 0) for told in generations], strict=True)
        if not now or now < max(rated, best)
    ]
    assert not slow, "\n".join(slow)


def test_nvlinks_are_up(gpus, gpu_profile, gpu_topology):
    """Every NVLink is active, and there are as many as this model has

    A link that is down or missing takes its share of the bandwidth of every collective. `nvidia-smi nvlink -s` shows
    them; reset the GPU and look at the kernel log for XID 74; if it stays, the GPU, the bridge or the switch board is
    bad. Of models whose links need a bridge, a GPU may have none.
    """
    count = int(gpu_profile.facts.get("nvlinks", 0)) if gpu_profile else 0
    most = max((sum(gpu["nvlink_states"]) for gpu in gpus if isinstance(gpu["nvlink_states"], list)), default=None)
    bridged = not count and gpu_topology.fabric != "nvswitch"
    if bridged and most == 0:
        not_applicable("no bridge connects the NVLinks of these GPUs")

    def wanted(gpu):
        states = gpu["nvlink_states"]
        if bridged:  # some may lead nowhere, as on the H100 NVL, and nobody can say which: as many as others have
            return states if sum(states) in (0, most) else f"{most} active links, as others have"
        return [1] * (count or len(states))

    # A virtual machine with a single GPU may have none: they would lead nowhere.
    expect(gpus, "nvlink_states", wanted, must_exist=count > 0 and len(gpus) > 1)


def test_nvlinks_are_equally_fast(gpus, gpu_profile):
    """All NVLinks of all GPUs run at one speed, and at that of this model

    A slower link was trained down after errors. `nvidia-smi nvlink -s` names it; reset the GPU, then replace it.
    """
    speeds = [speed for gpu in gpus if isinstance(gpu["nvlink_speeds"], list) for speed in gpu["nvlink_speeds"]]
    # A link that leads nowhere has no speed.
    expect(gpus, "nvlink_speeds", lambda gpu: [speed and max(speeds) for speed in gpu["nvlink_speeds"]])
    facts = gpu_profile.facts if gpu_profile else {}
    links = facts.get("nvlinks") or max(1, *(len(gpu["nvlink_speeds"]) for gpu in gpus))
    rated = facts.get("nvlink_gigabytes_per_second", 0) / links
    slow = [
        f"{gpu.identity}: an NVLink runs at {speed:g} GB/s, those of this model at {rated:g} GB/s"
        for gpu in gpus
        for speed in sorted(set(gpu["nvlink_speeds"]))
        if 0 < speed < ROUNDED * rated
    ]
    assert not slow, "\n".join(slow)


def test_fabric_is_ready(gpus):
    """The NVSwitch fabric has taken in every GPU

    State 3 is completed, status 0 success. Otherwise start nvidia-fabricmanager (of exactly the driver's version; on
    the host of a virtual machine or container) and read its log; without it GPUs with NVSwitch cannot talk to each
    other.
    """
    if all(gpu["fabric"] == {"state": 0, "status": 0} for gpu in gpus):
        not_applicable("these GPUs are in no NVSwitch fabric")
    expect(gpus, "fabric", {"state": 3, "status": 0})


def test_every_pair_reaches_each_other(gpus, gpu_topology):
    """Peer access works between all GPUs that NVLinks connect

    Without it data takes the way through host memory. Look at `nvidia-smi topo -p2p r`; usual causes are IOMMU or ACS
    settings and a fabric that is not ready.
    """
    if gpu_topology.fabric not in ("nvlink", "nvswitch"):
        not_applicable("no NVLinks between these GPUs")
    linked = {
        gpu.index: [link == "X" or link.startswith("NV") for link in row]
        for gpu, row in zip(gpu_topology.gpus, gpu_topology.links, strict=True)
    }

    def wanted(gpu):
        """0 (OK) for the pairs with NVLinks; for the others what it is."""
        return {
            name: [0 if near else told for near, told in zip(linked[gpu.index], statuses, strict=True)]
            for name, statuses in gpu["p2p"].items()
        }

    expect(gpus, "p2p", wanted)


def test_ecc_is_on(gpus):
    """Error correction is on, now and after the next boot

    Without it a flipped bit in memory goes unseen. Turn it on: `nvidia-smi -e 1`, then reboot. Models that are sold
    with it off, and can have it for a part of their memory and speed, are left as they are.
    """
    if all(gpu["ecc_mode_default"] == 0 for gpu in gpus):
        not_applicable("this model has error correction off unless somebody turns it on")
    expect(gpus, "ecc_mode", [1, 1])


def test_mig_is_off(gpus):
    """No GPU is split into instances

    A GPU in MIG mode gives a program only a part of itself: `nvidia-smi -mig 0`.
    """
    expect(gpus, "mig_mode", [0, 0])


def test_compute_mode_is_default(gpus):
    """Any process may use the GPUs (compute mode 0)

    Exclusive or prohibited mode makes programs fail with "all CUDA-capable devices are busy": `nvidia-smi -c 0`.
    """
    expect(gpus, "compute_mode", 0)


def test_persistence_mode_is_on(gpus):
    """The driver stays loaded between programs

    Else every start takes seconds and settings are lost: enable nvidia-persistenced.
    """
    expect(gpus, "persistence_mode", 1)


def test_power_limit_is_default(gpus):
    """No GPU's power limit was lowered

    A lowered limit slows the GPU under load: `nvidia-smi -pl` with the default that is named, or ask who set it.
    """

    def wanted(gpu):
        limit, default = gpu["power_limit_watts"], gpu["power_limit_default_watts"]
        return limit if isinstance(default, float) and limit > default else default

    expect(gpus, "power_limit_watts", wanted)


def test_application_clocks_are_default(gpus):
    """No GPU's clocks are pinned

    Reset them: `nvidia-smi -rac`.
    """
    expect(gpus, "application_clock_mhz", lambda gpu: gpu["application_clock_default_mhz"])


def test_no_recovery_is_pending(gpus):
    """The driver calls for no recovery of any GPU

    1 is a reset, 2 a reboot, 3 and 4 draining it first: do that, then run again.
    """
    expect(gpus, "recovery_action", 0)


def test_inforom_is_valid(gpus):
    """The board's own records are intact

    A corrupted InfoROM loses serial numbers and error history, or gives texts that nobody can read: replace the GPU.
    """
    broken = [line for gpu in gpus for line in unreadable(gpu, ("serial", "uuid", "pci_bus_id"))]
    if broken:
        raise Faults(broken)
    expect(gpus, "inforom_valid", True)


def test_shared_memory_is_large_enough(machine):
    """/dev/shm has at least 8 GiB

    NCCL and data loaders exchange data through it; with the 64 MiB that containers get by default they fail or crawl.
    Start containers with --ipc=host or --shm-size=16g.
    """
    if not machine.gpus:
        not_applicable("a rehearsal needs no shared memory")
    assert machine.host["shared_memory_bytes"] >= 8 * GiB


def test_memory_may_be_locked(machine):
    """Programs may lock as much memory as they need

    RDMA and pinned buffers fail under a limit: --ulimit memlock=-1 for containers, limits.conf on the host.
    """
    if not machine.gpus:
        not_applicable("a rehearsal locks no memory")
    assert machine.host["locked_memory_limit"] == "unlimited"


def test_files_may_be_opened(machine):
    """Programs may open at least 16,384 files at once (hard limit)

    Data loaders and NCCL pass memory and connections along as open files. Raise `ulimit -Hn`: --ulimit nofile=1048576
    for containers, limits.conf on the host.
    """
    if not machine.gpus or (limit := machine.host["open_files_hard_limit"]) is None:
        not_applicable("a rehearsal opens few files" if not machine.gpus else "this system does not tell")
    assert limit == "unlimited" or limit >= 16_384


def test_processors_run_at_full_clock(machine):
    """The host's processors are not slowed down to save power

    The processors launch every GPU kernel: at a low clock the GPUs wait for them. Set the governor "performance":
    `cpupower frequency-set -g performance`. Drivers that choose the clock by themselves (intel_pstate, amd_pstate) may
    say "powersave" if their energy preference is performance or balance_performance.
    """
    if not machine.gpus or (governor := machine.host["cpu_governor"]) is None:
        not_applicable("a rehearsal" if not machine.gpus else "the host (a virtual machine?) has no CPU governor")
    preference = machine.host.get("cpu_energy_preference")
    assert governor == "performance" or preference in ENERGY_PREFERENCES


def test_processors_near_each_gpu_may_be_used(gpus, machine):
    """Programs may run on processors next to every GPU

    A container or job that was given processors on the other side of the machine only sends everything over the link
    between the sockets. Give it the processors that `nvidia-smi topo -m` lists under CPU affinity.
    """
    allowed = machine.host["processor_set"]

    def near(gpu):
        words = gpu["cpu_affinity"]
        usable = isinstance(words, list) and any(words[n // 64] >> n % 64 & 1 for n in allowed if n // 64 < len(words))
        return words if usable else f"a set with one of the processors {allowed}, which this process may use"

    expect(gpus, "cpu_affinity", near)


def test_network_ports_are_active(gpus, machine):
    """All InfiniBand and RoCE ports are up, at one speed

    A port that is down or slower than the others takes its share of every transfer between machines. Look at cable,
    transceiver and switch port: `ibstat`. A port is held against those of its kind: the same adapter model, link layer
    and place on the adapter. Where all of a kind are down, nobody has plugged them in, and they are left out.
    """
    kinds = {}
    for port in machine.host["network_ports"] or ():
        kinds.setdefault(tuple(port.get(key) for key in ("adapter", "link_layer", "function")), []).append(port)
    used = [ports for ports in kinds.values() if any("ACTIVE" in port["state"] for port in ports)]
    if not used:
        not_applicable("no InfiniBand or RoCE port is here, or none has a cable")
    wrong = []
    for ports in used:
        rates = [port["rate"] for port in ports if "ACTIVE" in port["state"]]
        usual = max(rates, key=rates.count)
        wrong += [port for port in ports if "ACTIVE" not in port["state"] or port["rate"] != usual]
    assert not wrong, f"not like the others of their kind: {wrong}"


@pytest.mark.spmd
def test_every_rank_reaches_its_gpu(rank):
    """Each process gets its own device and can compute on it

    The first real work on the GPU that NVML lists under this number. If it fails, look at the kernel log for XIDs of
    the GPU named, and whether another process holds it (`nvidia-smi`).
    """
    rows = torch.arange(512, dtype=torch.float32, device=rank.device)
    product = rows.expand(512, 512) @ torch.ones(512, 512, device=rank.device)
    assert (product == 512 * 511 / 2).all()
