"""The links of GPUs: NVLinks, the NVSwitch fabric and PCIe, and what is wrong with them.

Rules after DCGM's health checks (PCIe replay rates, NVLink errors, the fabric's health).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from pytest_gpufleet.machine.pcie import REPLAYS
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu, GpuTopology, Missing
from pytest_gpufleet.model.place import Pair


def gpu_fault(code: str, gpu: Gpu, what: str) -> Fault:
    return Fault(code, (gpu.place,), what)


def fact_unreadable(gpu: Gpu, fact: str, why: Missing) -> Fault:
    return gpu_fault("fact_unreadable", gpu, f"{fact} cannot be read ({why})")


def unreadable(gpu: Gpu, names: Iterable[str]) -> list[Fault]:
    """Facts that a GPU has and that cannot be read, each with the reason."""
    return [
        fact_unreadable(gpu, name, why) for name in names if isinstance(why := gpu[name], Missing) and not why.absent
    ]


def unreadable_now(before: Gpu, now: Gpu, fact: str) -> list[Fault]:
    """A fact that is compared with what it was and cannot be read now, or could not then."""
    missing = [value for value in (now[fact], before[fact]) if isinstance(value, Missing)]
    return [fact_unreadable(before, fact, missing[0])] if missing else []


# Errors of one NVLink that are still healthy, by kind; of any other kind one is too many. DCGM allows CRC errors of
# flits that rate too. But a flit with a wrong CRC has to be sent again, like all that replays and recoveries count, and
# where H200 count thousands of the others, they count none of these.
# What the forward error correction of NVLink 5 could not mend is sent again. NVIDIA calls a link of its networks faulty
# above one such error in 1e14 bits (optics.EFFECTIVE_BER), which are 4e11 a second here; a few at once are one event.
NVLINK_ERRORS_A_SECOND = {"crc_data": 100, "effective": 0.004, "symbol": 0.004}
NVLINK_ERRORS_AT_ONCE = {"effective": 10, "symbol": 10}
# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK: where a part of the mask begins, how many bits it has, and a value of it that is
# bad: in words what that says. DCGM judges the same ones.
FABRIC_HEALTH = {
    (0, 2, 1): "its bandwidth is degraded",
    (2, 2, 1): "a route is being recovered",
    (4, 2, 1): "a route is unhealthy",
    (6, 2, 1): "an access timed out and is being recovered",
    (8, 4, 2): "wrong configuration: system GUID",
    (8, 4, 3): "wrong configuration: serial number of the chassis",
    (8, 4, 4): "wrong configuration: no partition",
    (8, 4, 5): "wrong configuration: too few NVLinks",
    (8, 4, 6): "wrong configuration: firmware of the GPU",
    (8, 4, 7): "wrong configuration: location",
    (8, 4, 8): "wrong configuration: state of the GPU",
}
FABRIC_SINCE, HGX_GPUS = (9, 0), 8
FABRIC_COMPLETED = 3  # nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED


def peer_access(topology: GpuTopology) -> Callable[[Gpu], dict[str, list[int]]]:
    """The nvmlGpuP2PStatus_t that each GPU should have with every other one: 0, which is OK, over NVLinks; over PCIe to
    read and to write where any two GPUs of their models with that kind of way have it; otherwise what it is."""

    def kind(one: Gpu, other: Gpu) -> tuple[str, ...]:
        return topology.kind(Pair(one.place, other.place))

    able = {
        (name, kind(gpu, other))
        for gpu in topology.gpus
        for name, statuses in (gpu.get("p2p") or {}).items()
        for other, status in zip(topology.gpus, statuses, strict=True)
        if gpu is not other and status == 0 and name in ("read", "write")
    }

    def wanted(gpu: Gpu) -> dict[str, list[int]]:
        def status(name: str, other: Gpu, now: int) -> int:
            can = other.place == gpu.place or kind(gpu, other)[-1] == "NV" or (name, kind(gpu, other)) in able
            return 0 if can else now

        return {name: list(map(partial(status, name), topology.gpus, now)) for name, now in gpu["p2p"].items()}

    return wanted


def link_errors(before: Gpu, now: Gpu, seconds: float) -> list[Fault]:
    """NVLinks with errors that must not be, between two readings of nvlink_errors so many seconds apart.

    A replay, a recovery or a flit with a wrong CRC is one too many. Links correct CRC errors in data themselves, and
    healthy ones of an H200 do so about once in ten seconds even when idle: only their rate counts (DCGM: 100 a second),
    and that of the errors which the forward error correction of NVLink 5 could not mend.
    """
    if faults := unreadable_now(before, now, "nvlink_errors"):
        return faults
    then, after, what = before["nvlink_errors"], now["nvlink_errors"], list[str]()
    for kind in {**then, **after}:
        earlier, counts = then.get(kind, []), after.get(kind, [])
        if len(counts) != len(earlier):
            what.append(f"{kind} errors are counted on {len(counts)} NVLinks, at the beginning on {len(earlier)}")
        allowed = max(NVLINK_ERRORS_A_SECOND.get(kind, 0) * seconds, NVLINK_ERRORS_AT_ONCE.get(kind, 0))
        for link, (old, new) in enumerate(zip(earlier, counts, strict=False)):
            if old is None or new is None:
                if old is not new:
                    what.append(f"{kind} errors of NVLink {link} were {old} and are {new}: they cannot always be read")
            elif new - old > allowed:
                what.append(f"NVLink {link} had {new - old} {kind} errors in {seconds:.0f} s")
    return [gpu_fault("nvlink_errors", before, each) for each in what]


def pcie_errors(before: Gpu, now: Gpu, seconds: float) -> list[Fault]:
    """PCIe replays, if there were more than on a healthy link, between two readings so many seconds apart."""
    if faults := unreadable_now(before, now, "pcie_replays"):
        return faults
    grown, allowed = now["pcie_replays"] - before["pcie_replays"], replays_allowed(before, seconds / 60)
    what = f"{grown} PCIe replays in {seconds:.0f} s, a healthy link has at most {allowed:.0f}"
    return [gpu_fault("pcie_replays", before, what)] if grown > allowed else []


class FabricHealth(NamedTuple):
    """nvml.h, nvmlGpuFabricInfo_v2_t: the health mask, and what the GPU belongs to."""

    mask: int
    clique: int
    cluster: str


def fabric_faults(gpus: Sequence[Gpu]) -> list[Fault]:
    """What is wrong with a fabric that has taken in all its GPUs: what its health mask says, and GPUs that are in
    another clique or cluster than most, which no NVLink then connects with them."""
    members = [gpu for gpu in gpus if (gpu.get("fabric") or {}).get("state") == FABRIC_COMPLETED]
    known = [(gpu, FabricHealth(**health)) for gpu in members if (health := gpu.get("fabric_health")) is not None]
    faults = [fault for gpu in members for fault in unreadable(gpu, ["fabric_health"])]
    faults += [
        gpu_fault("fabric_degraded", gpu, words)
        for gpu, health in known
        for (shift, width, bad), words in FABRIC_HEALTH.items()
        if health.mask >> shift & (1 << width) - 1 == bad
    ]
    for key in ("cluster", "clique"):
        values = [getattr(health, key) for _, health in known]
        usual = max(values, key=values.count, default=None)
        faults += [
            gpu_fault("fabric_split", gpu, f"it is in {key} {value} of the fabric, others are in {usual}")
            for (gpu, _), value in zip(known, values, strict=True)
            if value != usual
        ]
    return faults


def has_nvswitch(gpus: Sequence[Gpu], topology: GpuTopology, links_of_model: int) -> bool:
    """Whether NVSwitches connect these GPUs: a link ends at one, or there are eight GPUs of a model whose NVLinks need
    no bridge, which no board links directly. Without a fabric manager the links of a Hopper are down, so that none
    says where it ends. NVML knows the fabric from Hopper on."""
    hopper = all((gpu.compute_capability or (0, 0)) >= FABRIC_SINCE for gpu in gpus)
    return hopper and (topology.fabric == "nvswitch" or (links_of_model > 0 and len(gpus) >= HGX_GPUS))


def numa_mismatch(gpu: Gpu) -> list[Fault]:
    """A GPU whose CPU affinity, by the driver, has no processor of those next to the root of its PCI bus."""
    near, of_bus = gpu.get("cpu_affinity"), gpu.get("pci_bus_cpus")
    cpus = [n * 64 + bit for n, word in enumerate(near or ()) for bit in range(64) if word >> bit & 1]
    if not cpus or not of_bus or not set(of_bus).isdisjoint(cpus):
        return unreadable(gpu, ["cpu_affinity", "pci_bus_cpus"])
    what = "the driver calls processors {} to {} near, next to its PCI bus are {} to {}"
    return [gpu_fault("gpu_numa_mismatch", gpu, what.format(cpus[0], cpus[-1], min(of_bus), max(of_bus)))]


def pcie_lanes(gpu: Gpu) -> int:
    """With how many lanes the PCIe link of this GPU should run: as many as the GPU itself can use, whatever the slot
    has. NVML's maximum is that of both."""
    return max(int(gpu.get("pcie_width_max") or 0), int((gpu.get("pcie_width_able") or {"gpu": 0})["gpu"]))


def replays_allowed(gpu: Gpu, minutes: float) -> float:
    rate = REPLAYS.get(gpu.get("pcie_generation_max"), min(REPLAYS.values()))
    return rate * (gpu.get("pcie_width") or 1) * max(minutes, 1.0)
