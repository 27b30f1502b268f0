"""What counts as healthy of links: those between GPUs and their fabric, and those to the host.

Rules after DCGM's health checks (PCIe replay rates, NVLink errors, the fabric's health).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pytest_gpufleet.machine.pcie import REPLAYS
from pytest_gpufleet.model.conditions import c_number
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import NVLS_SINCE, Gpu, GpuTopology, Missing
from pytest_gpufleet.model.place import THIS_NODE


def gpu_fault(code: str, gpu: Gpu, what: str) -> Fault:
    return Fault(code, (gpu.place,), what)


def fact_unreadable(gpu: Gpu, fact: str, why: Missing) -> Fault:
    return gpu_fault("fact_unreadable", gpu, f"{fact} cannot be read ({why})")


def unreadable(gpu: Gpu, names: Iterable[str]) -> list[Fault]:
    """Facts that a GPU has and does not tell, each with the reason."""
    told = {name: gpu[name] for name in names}
    return [
        fact_unreadable(gpu, name, why) for name, why in told.items() if isinstance(why, Missing) and not why.absent
    ]


# Errors of one NVLink that are still healthy, by kind; of any other kind one is too many. DCGM allows CRC errors of
# flits that rate too. But a flit with a wrong CRC has to be sent again, like all that replays and recoveries count, and
# where H200 count thousands of the others, they count none of these.
# What the forward error correction of NVLink 5 could not mend is sent again. NVIDIA calls a link of its networks faulty
# above one such error in 1e14 bits (port_rules), which are 4e11 a second here; a few at once are one event.
NVLINK_ERRORS_A_SECOND = {"crc_data": 100, "effective": 0.004, "symbol": 0.004}
NVLINK_ERRORS_AT_ONCE = {"effective": 10, "symbol": 10}
# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK: where a part of the mask begins, how many bits it has, and a value of it that is
# ill: in words what that says. DCGM judges the same ones.
FABRIC_ILLS = {
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
FABRIC_COMPLETED = 3  # nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED


def link_errors(before: Gpu, now: Mapping[str, list[int | None]] | Missing, seconds: float) -> list[Fault]:
    """NVLinks with errors that must not be, between two readings of nvlink_errors so many seconds apart.

    A replay, a recovery or a flit with a wrong CRC is one too many. Links correct CRC errors in data themselves, and
    healthy ones of an H200 do so about once in ten seconds even when idle: only their rate counts (DCGM: 100 a second),
    and that of the errors which the forward error correction of NVLink 5 could not mend.
    """
    problems = []
    then = before["nvlink_errors"]
    if isinstance(then, Missing) or isinstance(now, Missing):
        return [fact_unreadable(before, "nvlink_errors", now if isinstance(now, Missing) else then)]
    for kind in {**then, **now}:
        earlier, counts = then.get(kind, []), now.get(kind, [])
        if len(counts) != len(earlier):
            links = f"{len(counts)} NVLinks, at the beginning on {len(earlier)}"
            problems.append(gpu_fault("nvlink_errors", before, f"{kind} errors are counted on {links}"))
        allowed = max(NVLINK_ERRORS_A_SECOND.get(kind, 0) * seconds, NVLINK_ERRORS_AT_ONCE.get(kind, 0))
        for link, (old, new) in enumerate(zip(earlier, counts, strict=False)):
            if old is None or new is None:
                if old is not new:
                    what = f"{kind} errors of NVLink {link} were {old} and are {new}: they cannot always be read"
                    problems.append(gpu_fault("nvlink_errors", before, what))
            elif new - old > allowed:
                what = f"NVLink {link} had {new - old} {kind} errors in {seconds:.0f} s"
                problems.append(gpu_fault("nvlink_errors", before, what))
    return problems


def pcie_errors(before: Gpu, now: int | Missing, seconds: float) -> list[Fault]:
    """PCIe replays, if there were more than on a healthy link, between two readings so many seconds apart."""
    then = before["pcie_replays"]
    if isinstance(then, Missing) or isinstance(now, Missing):
        return [fact_unreadable(before, "pcie_replays", now if isinstance(now, Missing) else then)]
    allowed = replays_allowed(before, seconds / 60)
    told = f"{now - then} PCIe replays in {seconds:.0f} s, a healthy link has at most {allowed:.0f}"
    return [gpu_fault("pcie_replays", before, told)] if now - then > allowed else []


def fabric_ills(gpus: Sequence[Gpu]) -> list[Fault]:
    """What is wrong with a fabric that has taken in all its GPUs: what its health mask says, and GPUs that are in
    another clique or cluster than most, which no NVLink then connects with them."""
    members = [gpu for gpu in gpus if (gpu.get("fabric") or {}).get("state") == FABRIC_COMPLETED]
    told = [(gpu, gpu.get("fabric_health")) for gpu in members]
    known = [(gpu, health) for gpu, health in told if health is not None]
    silent = [fault for gpu in members for fault in unreadable(gpu, ["fabric_health"])]
    ills = [gpu_fault("fabric_degraded", gpu, ill) for gpu, health in known for ill in _ills(health["mask"])]
    return silent + ills + [fault for key in ("cluster", "clique") for fault in _apart(known, key)]


def _ills(mask: int) -> list[str]:
    return [words for (shift, width, ill), words in FABRIC_ILLS.items() if mask >> shift & (1 << width) - 1 == ill]


def _apart(known: Sequence[tuple[Gpu, Mapping[str, Any]]], key: str) -> list[Fault]:
    values = [health[key] for _, health in known]
    usual = max(values, key=values.count, default=None)
    return [
        gpu_fault("fabric_split", gpu, f"it is in {key} {health[key]} of the fabric, others are in {usual}")
        for gpu, health in known
        if health[key] != usual
    ]


def pcie_lanes(gpu: Gpu) -> int:
    """With how many lanes the PCIe link of this GPU should run: as many as the GPU itself can use, whatever the slot
    has. NVML's maximum is that of both."""
    able = gpu["pcie_width_able"]
    of_both = gpu["pcie_width_max"]
    return max(of_both if isinstance(of_both, int) else 0, able["gpu"] if isinstance(able, dict) else 0)


def replays_allowed(gpu: Gpu, minutes: float) -> float:
    generation, width = gpu["pcie_generation_max"], gpu["pcie_width"]
    rate = REPLAYS.get(generation, min(REPLAYS.values())) if isinstance(generation, int) else min(REPLAYS.values())
    lanes = width if isinstance(width, int) else 1
    return rate * lanes * max(minutes, 1.0)


# Variables that make NCCL or CUDA slower than the machine is, or other arithmetic than was asked for, with the values
# that do. NCCL_TOPO_FILE and NCCL_GRAPH_FILE are none: images of clouds set them (Azure's nccl.conf), since a virtual
# machine does not show its own topology. Values by NCCL's source as of 2.30 (graph/paths.cc, connect.cc and tuning.cc,
# init.cc), where what its user guide calls 0 or "not set" is more: -2 is "not set" for some, and 0 channels are 1.
CHANNELS = 32  # as many as NCCL could have before 2.25; it takes no more by itself, but for a few on newer GPUs
HARMFUL_NUMBERS: dict[str, Callable[[int], bool]] = {
    "NCCL_P2P_DISABLE": lambda number: number == 1,
    "NCCL_SHM_DISABLE": lambda number: number == 1,
    "NCCL_P2P_DIRECT_DISABLE": lambda number: number != 0,
    **dict.fromkeys(("NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS"), lambda number: number != -2 and number < CHANNELS),
    **dict.fromkeys(("NCCL_MIN_NRINGS", "NCCL_MIN_NCHANNELS"), lambda number: number > CHANNELS),
    "NCCL_MAX_P2P_NCHANNELS": lambda number: number < CHANNELS,
    "NCCL_MAX_CTAS": lambda number: 0 < number < CHANNELS,
    "NCCL_NTHREADS": lambda number: 0 < number < 512 and number % 32 == 0,
    "NCCL_BUFFSIZE": lambda number: number != -2 and number < 4 << 20,
    "CUDA_LAUNCH_BLOCKING": lambda number: number == 1,  # seen with driver 580 on an H100: 2, -1 and "true" are off
    "NVIDIA_TF32_OVERRIDE": lambda number: number in (0, 1),  # 0: TF32 is off; 1: float32 is TF32, seen there too
}
# How far apart GPUs may be that reach each other's memory, in NCCL's words; before it had words it had numbers.
LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
NUMBERED_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
USUAL_LEVEL = "PXB"


def harmful_variables(environment: Mapping[str, str], topology: GpuTopology) -> list[Fault]:
    """What is set so that it harms this machine. What is empty is not set."""
    gpus, linked = topology.gpus, topology.fabric in ("nvswitch", "nvlink")
    nvls = topology.fabric == "nvswitch" and all((gpu.compute_capability or (0, 0)) >= NVLS_SINCE for gpu in gpus)
    harms: dict[str, Callable[[str], bool]] = {
        "NCCL_P2P_LEVEL": lambda text: _keeps_apart(text, topology),
        "NCCL_ALGO": lambda text: _lacks(text, {"ring", "tree", *(["nvls"] if nvls else [])}),
        "NCCL_PROTO": lambda text: _lacks(text, {"ll", "simple", *(["ll128"] if linked else [])}),
    }
    return [
        Fault("harmful_variable", (THIS_NODE,), f"{name}={text} is set")
        for name, text in environment.items()
        if (name in harms and text and harms[name](text))
        or (name in HARMFUL_NUMBERS and text and HARMFUL_NUMBERS[name](c_number(text)))
    ]


def _keeps_apart(text: str, topology: GpuTopology) -> bool:
    """Whether by this NCCL_P2P_LEVEL any two GPUs do not reach each other that else do (ncclGetLevel)."""
    named = text if text in LEVELS else None
    if named is None and text[0].isdigit():
        named = NUMBERED_LEVELS[min(c_number(text), len(NUMBERED_LEVELS) - 1)]
    if named is None:  # NCCL does not heed it
        return False
    words = {re.sub(r"^NV\d+$", "NVL", link.replace("NODE", "PHB")) for row in topology.links for link in row}
    usual = {LEVELS.index(word) for word in words if word in LEVELS[: LEVELS.index(USUAL_LEVEL) + 1]}
    return named == "LOC" or any(LEVELS.index(named) < distance for distance in usual)


def _lacks(text: str, needed: set[str]) -> bool:
    """Whether a list of algorithms or protocols leaves out one that this machine is faster with, for all functions or
    for some: "ring,tree", "^ll128", "tree;broadcast:ring" (parseList)."""
    for part in text.lower().split(";"):
        names = part.rpartition(":")[2]
        listed = set(names.lstrip("^").split(","))
        if needed & listed if names.startswith("^") else needed - listed:
            return True
    return False
