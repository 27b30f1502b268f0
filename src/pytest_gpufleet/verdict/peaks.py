"""What a GPU can do at best, by what its driver says of it. Physical limits are parts of these peaks.

GB = 10^9 bytes, TFLOP = 10^12 operations, of which a multiplication with its addition is two. Links count in one
direction. A peak that cannot be had is NoPeak, with the reason: a fact that the driver does not give is never
guessed."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import ARCHITECTURES, Architecture, Gpu, GpuTopology
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD, Where

# nvml.h: nvmlBrandType_t GEFORCE and GEFORCE_RTX, nvmlGpuVirtualizationMode_t PASSTHROUGH and VGPU.
GEFORCE = (5, 15)
PASSTHROUGH, VGPU = 1, 2

# GB/s of a lane after the encoding of the line, by PCIe generation: 8, 16 and 32 GT/s with 128b/130b. GPUs of later
# ones count as of 5: behind a ConnectX-8 the rest of the way is that (B300 copy 55.6 GB/s: Dell XE9780, nvbandwidth).
PCIE_LANE = {3: 8 * 128 / 130 / 8, 4: 16 * 128 / 130 / 8, 5: 32 * 128 / 130 / 8}


class NoPeak(Exception):
    """Why the driver's facts give no peak."""


@dataclass(frozen=True)
class Peak:
    """`value` in `unit`, and how it comes about, to be read and followed."""

    value: float
    unit: str
    formula: str

    def __str__(self) -> str:
        value = float(f"{self.value:.4g}")  # with ",.4g" 12,940 would read 1.294e+04
        return f"{self.formula}: {value:,g} {self.unit}"


def memory_bandwidth(gpu: Gpu) -> Peak:
    """Of its memory, which moves data twice a clock."""
    clock, bits = _fact(gpu, "memory_clock_max_mhz"), _fact(gpu, "memory_bus_bits")
    return Peak(clock * 1e6 * 2 * bits / 8 / 1e9, "GB/s", f"{clock:,} MHz x 2 x {bits:,} bits")


def pcie(gpu: Gpu) -> tuple[int, int]:
    """The generation and the lanes that GPU and slot can do. A virtual machine does not see the slot, so there it is
    what the link runs at: less than it can if the GPU saves power, but no host with such GPUs is older than PCIe 3."""
    passed_through = gpu.get("virtualization") == PASSTHROUGH
    able = "" if passed_through else "_max"
    generation, lanes = _fact(gpu, f"pcie_generation{able}"), _fact(gpu, f"pcie_width{able}")
    if passed_through:
        generation = max(generation, min(PCIE_LANE))
    if generation < min(PCIE_LANE):
        raise NoPeak(f"nobody has looked up PCIe of generation {generation}")
    return min(generation, max(PCIE_LANE)), lanes


def host_link(gpu: Gpu) -> Peak:
    """Of its PCIe link, in one direction."""
    generation, lanes = pcie(gpu)
    return Peak(PCIE_LANE[generation] * lanes, "GB/s", f"PCIe {generation} x {lanes} lanes")


def nvlinks(gpu: Gpu, count: int) -> Peak:
    """Of so many of its NVLinks, in one direction."""
    if not (each := _architecture(gpu, "NVLinks").nvlink):
        raise NoPeak(f"no GPU of the architecture of GPU {gpu.index} is known to have NVLinks")
    return Peak(count * each, "GB/s", f"{count} NVLinks x {each:g} GB/s")


def product_rate(gpu: Gpu) -> Peak:
    """Of matrix products in 16 bits, all its SMs at its highest clock."""
    known = _architecture(gpu)
    cores, clock = _fact(gpu, "cuda_cores"), _fact(gpu, "sm_clock_max_mhz")
    geforce = known.geforce is not None and _fact(gpu, "brand") in GEFORCE
    board = known.geforce if geforce and known.geforce else known.tensor
    operations, sms = dict(known.named).get(gpu.name, board), cores // known.cores
    formula = f"{sms} SMs x {clock:,} MHz x {operations:,} operations ({known.source})"
    return Peak(sms * clock * 1e6 * operations / 1e12, "TFLOP/s", formula)


def power_bound(gpu: Gpu) -> Peak:
    """What its power limit allows it of the same."""
    watts, per_joule = _fact(gpu, "power_limit_watts"), _architecture(gpu).per_joule
    return Peak(watts * per_joule, "TFLOP/s", f"{watts:g} W x {per_joule:.3g} TFLOP a joule")


def _architecture(gpu: Gpu, what: str = "matrix products") -> Architecture:
    major, minor = _fact(gpu, "compute_capability")
    if (known := ARCHITECTURES.get((major, minor))) is None:
        raise NoPeak(f"nobody has looked up the {what} of compute capability {major}.{minor}")
    return known


def _fact(gpu: Gpu, name: str) -> Any:
    """A fact that must be there, of a GPU that is whole: a part of one shares what the facts say of all of it."""
    if 1 in (gpu.get("mig_mode") or [])[:1]:
        raise NoPeak(f"GPU {gpu.index} is cut by MIG")
    if gpu.get("virtualization") == VGPU:
        raise NoPeak(f"GPU {gpu.index} is a virtual one")
    if not (value := gpu.get(name)):
        raise NoPeak(f"the driver does not give {name} of GPU {gpu.index}")
    return value


# How much of what GPUs can do at best training in 16 bits makes use of.
#
# Model FLOPs utilization (MFU) as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the operations that
# a model needs for the tokens of a second, of those that the GPUs can do in one. Figures are in tokens/s, of one GPU
# or of all that train together.


def model_flops_utilization(
    tokens: Measurement, flop_a_token: float, topology: GpuTopology, data_sheet: float = 0.0
) -> list[Measurement]:
    """The MFU of each figure; none where a peak is not known, as in a rehearsal. Peaks are at a GPU's highest clock;
    people publish MFU by the TFLOP/s of the `data_sheet`, at its boost clock: that of the slowest is shown too."""
    if not (peak := _peaks(tokens, topology)):
        return []
    values = {place: value * flop_a_token / (peak[place] * 1e12) for place, value in tokens.values.items()}
    details: dict[str, Condition] = {"peak": f"{next(iter(peak.values())):,.4g} TFLOP/s"}
    if data_sheet:
        shares = [values[at] * peak[at] / (len(gpus_of([at], topology)) * data_sheet) for at in values]
        details["by the data sheet"] = f"{min(shares):.1%} of {data_sheet:,.4g} TFLOP/s a GPU"
    return [Measurement("model_flops_utilization", values, tokens.conditions, details=details)]


def above_peak(tokens: Measurement, least_flop_a_token: float, topology: GpuTopology) -> list[Fault]:
    """Figures that are above what the GPUs can do, if a token takes so many operations at least."""
    faults = []
    for at, peak in _peaks(tokens, topology).items():
        rate = tokens.values[at] * least_flop_a_token
        if rate > peak * 1e12:
            faults.append(Fault("implausible_value", (at,), f"{rate / 1e12:,.4g} TFLOP/s of at most {peak:,.4g}"))
    return faults


def _peaks(tokens: Measurement, topology: GpuTopology) -> dict[Where, float]:
    """TFLOP/s of the GPUs behind each figure; none where that of any is not known."""
    try:
        return {place: sum(product_rate(gpu).value for gpu in gpus_of([place], topology)) for place in tokens.values}
    except NoPeak:
        return {}


def gpus_of(places: Collection[Where], topology: GpuTopology) -> list[Gpu]:
    gpus = [gpu for gpu in topology.gpus if any(place == WORLD or gpu.place in place.parts for place in places)]
    if not gpus:
        raise NoPeak("it is not of this machine's GPUs")
    return gpus
