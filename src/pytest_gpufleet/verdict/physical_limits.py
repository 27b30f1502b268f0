"""What a GPU can do at best, by what its driver says of it; and theoretical limits, which are parts of that, for what
nobody has a limit for: so any NVIDIA machine can be judged.

GB = 10^9 bytes, TFLOP = 10^12 operations, of which a multiplication with its addition is two. Links count in one
direction. A fact that the driver does not give is never guessed. Training is held against what this machine's memory
and matrix products were measured at, and collectives without an NVSwitch against its own hops. Each part lies below the
lowest that a healthy machine was seen at; but for memcpy, PCIe and decoding it lies above what is left of the highest
of the recorded ones after a fault of 30 %. So these limits find what is broken, and not what is a tenth slow. Where no
part would be fair to every healthy machine there is no limit: collectives of few bytes."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from typing import Any

from pytest_gpufleet.model.conditions import INSIDE, Condition
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Limit
from pytest_gpufleet.model.language import rounded
from pytest_gpufleet.model.metric import EXTRAORDINARY, METRICS, GiB, Measurement, over_network, row_of
from pytest_gpufleet.model.place import ARCHITECTURES, WORLD, Architecture, ClusterTopology, Gpu, GpuTopology, Where

# nvml.h: nvmlBrandType_t GEFORCE and GEFORCE_RTX, nvmlGpuVirtualizationMode_t PASSTHROUGH and VGPU.
GEFORCE = (5, 15)
PASSTHROUGH, VGPU = 1, 2

# GB/s of a lane after the encoding of the line, by PCIe generation: 8, 16 and 32 GT/s with 128b/130b. GPUs of later
# ones count as of 5: behind a ConnectX-8 the rest of the way is that (B300 copy 55.6 GB/s: Dell XE9780, nvbandwidth).
PCIE_LANE = {3: 8 * 128 / 130 / 8, 4: 16 * 128 / 130 / 8, 5: 32 * 128 / 130 / 8}


class NoPeak(Exception):
    """Why the driver's facts give no peak."""


@dataclass(frozen=True, order=True)
class Peak:
    """`value` in `unit`, and how it comes about, to be read and followed. Of several GPUs the least able one decides
    for all: none must be asked for too much."""

    value: float
    unit: str
    formula: str

    def __str__(self) -> str:
        return f"{self.formula}: {rounded(self.value)} {self.unit}"


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
    details: dict[str, Condition] = {"peak": f"{rounded(next(iter(peak.values())))} TFLOP/s"}
    if data_sheet:
        shares = [values[at] * peak[at] / (len(gpus_of([at], topology)) * data_sheet) for at in values]
        details["by the data sheet"] = f"{min(shares):.1%} of {data_sheet:,.4g} TFLOP/s a GPU"
    return [Measurement("model_flops_utilization", values, tokens.conditions, details=details)]


def above_peak(tokens: Measurement, least_flop_a_token: float, topology: GpuTopology) -> list[Fault]:
    """Figures that are above what the GPUs can do, if a token takes so many operations at least."""
    peaks, text = _peaks(tokens, topology), "{} TFLOP/s of at most {}"
    rates = {at: tokens.values[at] * least_flop_a_token / 1e12 for at in peaks}
    above = ((at, text.format(rounded(rate), rounded(peaks[at]))) for at, rate in rates.items() if rate > peaks[at])
    return [Fault("implausible_value", (at,), what) for at, what in above]


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


DIGITS = 4

# Recorded: machines of 1, 2, 4 and 8 H200 (tests/recorded, docs/results); in brackets the highest of them less 30 %.
# Published: the sources of the shipped profiles.
# By a triad. Recorded 0.86 to 0.90 (0.63). Published from 0.65 (GB200, by BabelStream in 0.15 ms a pass:
# oracle-quickstart/oci-gpu-quickstarts) and 0.66 (B200, by dcgmproftester) over T4 0.76 to H100 PCIe 0.90.
MEMORY = 0.64
# By cudaMemcpy, which is as fast as the driver makes it on that model. Recorded 0.88 to 0.90. Published from 0.46
# (H20-3e: NVIDIA/nvbandwidth issue 48) to A100 0.85 (FlagOpen/FlagPerf). 78 SMs of an H200, as of an H20, gave 0.80.
MEMCPY = 0.40
OPERATIONS = {"copy": MEMCPY, "triad": MEMORY, "copy and triad": math.sqrt(MEMCPY * MEMORY)}
# In one direction, one GPU at a time. Recorded 0.88 (0.62). Published from 0.67 (a gate for A100, which healthy ones
# pass) and 0.75 (H100). V100 in virtual machines: a gate at 0.57, so less is asked of PCIe 3.
HOST, HOST_PCIE_3 = 0.64, 0.55
# Of the NVLinks between two GPUs. Recorded 0.83 to 0.88 (0.62); published from 0.68 (a gate for GB200).
PAIR = 0.65
# Of PCIe, between two GPUs without NVLinks, directly or through host memory. Published from 0.36 (2x RTX 2080 Ti behind
# a switch, without peer access: Anthony-Hoo/Anthony-Hoo.github.io) over 0.62 (RTX PRO 6000, between sockets) and 0.64
# (RTX 4090: NVIDIA/nccl issue 814) to 0.90. A driver under which RTX 4090 should not reach each other gave 0.31.
PAIR_PCIE = 0.33
# 16 bits. Recorded 0.61 to 0.67 (0.47); published from 0.51 (H100 NVL).
PRODUCTS = 0.50
# Of what the power limit allows, by the slowest healthy board: recorded 1.0 to 1.11 (0.77).
POWER = 0.80
# Of the NVLinks of a GPU, in a machine with an NVSwitch or of two GPUs, from 1 GiB on. Lowest seen and, less 30 %, the
# highest of the recorded machines: all_reduce 0.72 (GB200), 0.58; all_gather and reduce_scatter 0.60 (2 H200), 0.55;
# broadcast 0.79, 0.58; reduce 0.80, 0.58; all_to_all 0.73, 0.56; gather 0.80, 0.58; scatter 0.78, 0.57; sendrecv 0.80,
# 0.57.
COLLECTIVES = {
    "all_reduce": 0.60, "all_gather": 0.57, "reduce_scatter": 0.57, "broadcast": 0.65, "reduce": 0.65,
    "all_to_all": 0.60, "gather": 0.62, "scatter": 0.62, "sendrecv": 0.62,
}  # fmt: skip
# Where not all of a ring is NVLinks: of its slowest hop or host link, all at once. NCCL moves data round the ring by
# peer access or, hop by hop, through host memory, where each GPU writes and reads at once as when all copy both ways.
# Which of the two depends on the model of the processor too, so the slower one decides. Published, of pairs both ways
# or of host links one at a time, which are faster than all at once: all_reduce of 8x RTX PRO 6000 0.80 behind switches,
# on two sockets 0.73 and, with the bandwidths that NCCL assumes of that processor, 0.43 (voipmonitor/rtx6kpro); of RTX
# 5090 through host memory 0.55 (8) and 0.69 (4; NVIDIA/nccl issue 1639, tinygrad/open-gpu-kernel-modules issue 29).
RING = 0.40
# The same where GPUs send to others than the next one: of 8 GPUs on two sockets 16 flows cross where a ring has one.
# Published of all to all 0.11 (8x RTX PRO 6000 on two sockets) to 0.44 (behind switches; the same source).
EACH_TO_EACH, EACH = ("all_to_all", "gather", "scatter"), 0.10
# ResNet-50, an image forward and backward at 224 pixels: operations; by recipe the precision of its products and the
# bytes where all is fused that can be. Of the rate at which both would be done one after the other: recorded 0.47
# (0.33) in TF32 and 0.73 (0.51) in fp16; published in TF32 from 0.44 (B200), in fp16, channels_last, from 0.73 (A100).
FLOP = 24.3e9
TRAINING: Mapping[Condition | None, tuple[float, str, float]] = {
    "tf32": (0.38, "tf32", 662e6),
    "amp": (0.55, "fp16", 331e6),
}
# Decoding, of the rate at which memory would give what a step reads, at the rate of a triad. An H200 and an H100: 0.55
# and 0.64 at batch 1, 0.77 and 0.81 at batch 64, since small kernels wait for each other; of twice the bandwidth of the
# first that would leave 0.38 and 0.62.
DECODING = {1: 0.3}
DECODING_OF_MANY = 0.45
# All GPUs together, of the slowest alone. By NVLink they are faster, since fewer bytes are left for each. Through host
# memory 16 all_reduces may take as long as all else.
DECODING_TOGETHER = {"nvswitch": 1.0, "nvlink": 1.0, "pcie": 0.5}
# Of as many times the figure of one GPU. Recorded 0.98 (0.69); published from 0.84 (8 A100).
TOGETHER = 0.75
# Of the rate of a port that sends to itself. Published: gates of ib_write_bw 0.90 (A100 and H200, Azure) and 0.96
# (oci-hpc); of NCCL in loopback 0.72 (A100, Azure). A port at its full rate that lost 30 % is left with 0.70.
LOOPBACK: Mapping[Condition | None, float] = {"ib_write_bw": 0.71, "nccl": 0.70, "nccl at once": 0.70}
# Between nodes: of what each GPU has of the network, with both directions busy, by a pair of GPUs; or of the rate of a
# port, one way, by ib_write_bw. Published: gates of
# 0.90 both ways (Imbue) and 0.96 one way (oci-hpc); a RoCE bond with one connection 0.92 (DeepEP, pull request 671).
RAIL = 0.85
UNKNOWN_NETWORK = (
    "no active InfiniBand or RoCE port shows what the network between the nodes can do: say it with --fleet-network "
    "GBIT, or none if nothing is asked of it"
)
# Of the rails of a node together, by an all_reduce on all nodes: a ring carries on them what it is worth as bus
# bandwidth, whatever the number of nodes; trees and switches that reduce (NVLSTree, SHARP) may make it more. Published,
# of 8x 400 Gb/s: 0.80 (4 nodes, RoCE, NVIDIA/nccl#1221), 0.86 (2x H20, #1244), 0.89 to 0.97 (8x H100,
# coreweave/nccl-tests), 0.95 (4x B200, EFA, stas00/ml-engineering); 0.92 of 8x 200 (A100, oci-hpc, a gate).
RAILS_TOGETHER = 0.70
# At 400 GB/s from 1 GiB on it is at the speed of the network: from 2.7 ms on.
AT_FULL_SPEED = GiB / 400e9
# The figure of one GPU: each GPU at once but on its own, or, in evidence of before, one GPU with all others idle.
ALONE = ("solo_train_throughput", "train_throughput")


def physical_limit(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Limit:
    """The least that a machine must reach, by its GPUs and all that was `measured`. NoPeak, with the reason."""
    under = measurement.conditions
    known = over_network(measurement.metric, under) or under.get("domain") == INSIDE or "port_rate" in under
    if not (theory := row_of(measurement.definition).theory):
        raise NoPeak(f"nothing is known of what limits {measurement.definition.title}")
    if not known and ("nodes" in under or isinstance(topology, ClusterTopology)):
        raise NoPeak("what lies between nodes is not known")
    fraction, peak = _THEORIES[theory](measurement, topology, measured)
    value = Context(prec=DIGITS, rounding=ROUND_FLOOR).create_decimal(repr(fraction * peak.value))
    source = f"{100 * fraction:.0f} % of what the hardware can do at best, {peak}"
    return Limit(measurement.metric, "min", float(value), measurement.unit, "physical", source, under, "")


Part = tuple[float, Peak]


def _memory(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    part = OPERATIONS.get(str(measurement.conditions.get("operation")), MEMORY)
    return part, min(map(memory_bandwidth, gpus_of(measurement.values, topology)))


def _host(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    under = measurement.conditions
    if under.get("at_once") != "one" or "both" in str(under.get("direction")):
        raise NoPeak("GPUs and directions share a way to the host that nobody knows")
    gpus = gpus_of(measurement.values, topology)
    return (HOST_PCIE_3 if any(pcie(gpu)[0] <= 3 for gpu in gpus) else HOST), min(map(host_link, gpus))


def _products(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    if measurement.conditions.get("precision") not in ("fp16", "bf16") or "work" in measurement.conditions:
        raise NoPeak("only products in 16 bits are looked up")
    gpus = gpus_of(measurement.values, topology)
    parts = (PRODUCTS, min(map(product_rate, gpus))), (POWER, min(map(power_bound, gpus)))
    return min(parts, key=lambda part: part[0] * part[1].value)


def _pair(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    if measurement.conditions.get("link") != "NVLink":
        return PAIR_PCIE, min(map(host_link, gpus_of(measurement.values, topology)))
    links = {where: topology.link(where) for where in measurement.values}
    if not all(links.values()):
        raise NoPeak("it is not of pairs of this machine's GPUs")
    return PAIR, min(nvlinks(topology.of(where)[0], _links(link)) for where, link in links.items())


def _collective(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    under, nbytes = measurement.conditions, _whole(measurement, "bytes")
    collective, inside = str(under.get("collective")), under.get("domain") == INSIDE
    if "nodes" in under and not inside:
        return _of_all_nodes(measurement, topology, measured)
    if nbytes < GiB:
        raise NoPeak("below 1 GiB a collective is not at the speed of its links")
    if (fraction := COLLECTIVES.get(collective)) is None or (inside and collective != "all_reduce"):
        raise NoPeak("nobody has looked up this collective")
    if inside:  # from 1 GiB on 0.76 (18 nodes of GB200, coreweave/nccl-tests) and more
        most = max((gpu.nvlinks_active for gpu in topology.gpus), default=0)
        return fraction, min(nvlinks(gpu, most) for gpu in topology.gpus)
    # Two GPUs with a bridge have one way, like those of a switch: a gate for H100 NVL is 0.69 (Azure).
    if topology.fabric == "nvswitch" or (topology.fabric, len(topology.gpus)) == ("nvlink", 2):
        counts = [max(map(_links, row), default=0) for row in topology.links]
        return fraction, min(map(nvlinks, topology.gpus, counts))
    if peak := _mesh(collective, topology, measured):
        return fraction, peak
    hops = [each for each in map(_hop, measured) if each and each.value > 0]
    if not hops:
        raise NoPeak(f"this run has not measured what it follows from ({METRICS['ring_bandwidth'].title})")
    return (EACH if collective in EACH_TO_EACH else RING), min(hops)


def _hop(measurement: Measurement) -> Peak | None:
    """The slowest hop, of figures in which all GPUs copy at once as in a ring: over PCIe, or through host memory."""
    under = measurement.conditions
    if measurement.metric == "ring_bandwidth" and under.get("link") not in ("NVLink", "host"):
        way = f"over {under['link']}, with all hops of the ring at once"
    elif measurement.metric == "host_bandwidth" and under.get("at_once") == "all" and "both" in str(under["direction"]):
        way = f"{under['direction']}, with all GPUs at once"
    else:
        return None
    at, value = measurement.worst
    return Peak(value, "GB/s", f"the slowest hop, {at} {way}, as measured")


def _mesh(collective: str, topology: GpuTopology, measured: Sequence[Measurement]) -> Peak | None:
    """What NVLinks without a switch carry together, by what each pair reached in this run: rings of NCCL use all links
    of a GPU; all_to_all those to each other GPU alike; sendrecv those to one. None where data go over PCIe too."""
    n, rings = len(topology.gpus), ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
    linked = [[link.startswith("NV") for link in row] for row in topology.links]
    whole = all(linked[i][j] for i in range(n) for j in range(n) if i != j)
    if not (_is_ring(linked, [0]) if collective in rings else whole):
        return None
    under = {"direction": "read", "link": "NVLink"}.items()
    read = [each for each in measured if each.metric == "pair_bandwidth" and each.conditions.items() >= under]
    rates = {at: rate for each in read for at, rate in each.values.items()}
    if len(rates) < sum(map(sum, linked)) or not min(rates.values()) > 0:
        raise NoPeak(f"this run has not measured what it follows from ({METRICS['pair_bandwidth'].title})")
    if collective in rings:
        of_gpu = [(sum(rates[at] for at in rates if at.parts[0] == gpu.place), gpu.place) for gpu in topology.gpus]
        return Peak(min(of_gpu)[0], "GB/s", f"what all NVLinks of {min(of_gpu)[1]} read, as measured pair by pair")
    at = min(rates, key=lambda pair: rates[pair])
    others = n - 1 if collective in EACH_TO_EACH else 1
    return Peak(others * rates[at], "GB/s", f"{others} x what {at} read, the slowest pair, as measured")


def _is_ring(linked: Sequence[Sequence[bool]], path: list[int]) -> bool:
    """Whether a way over all GPUs begins with this one and ends where it began, on NVLinks alone."""
    if len(path) == len(linked):
        return linked[path[-1]][path[0]]
    return any(linked[path[-1]][to] and to not in path and _is_ring(linked, [*path, to]) for to in range(len(linked)))


def _training(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    under = measurement.conditions
    recipe, ranks = under.get("recipe"), _whole(measurement, "ranks")
    if any(name in under for name in EXTRAORDINARY) or not ranks:
        raise NoPeak("the training is not the usual one")
    if ranks > 1:
        alone = _lowest_of(measured, ALONE, {**under, "ranks": 1})
        return TOGETHER, Peak(ranks * alone, "images/s", f"{ranks} x {rounded(alone)} images/s measured on one GPU")
    if under.get("model") != "resnet50" or under.get("image", 224) != 224 or recipe not in TRAINING:
        raise NoPeak("only ResNet-50 in TF32 and fp16 at 224 pixels is looked up")
    fraction, precision, nbytes = TRAINING[recipe]
    rate = _lowest_of(measured, ("gemm",), {"precision": precision})
    bandwidth = _lowest_of(measured, ("memory_bandwidth",), {"operation": "triad"})
    formula = f"1 / ({FLOP / 1e9:g} GFLOP / {rate:,.4g} TFLOP/s + {nbytes / 1e6:g} MB / {bandwidth:,.4g} GB/s)"
    images = 1 / (FLOP / (rate * 1e12) + nbytes / (bandwidth * 1e9))
    return fraction, Peak(images, "images/s", f"{formula}, as measured")


def _decoding(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    nbytes, batch, ranks = (_whole(measurement, name) for name in ("bytes", "batch", "ranks"))
    if not nbytes or not batch:
        raise NoPeak("how much a step reads is not known")
    if ranks > 1:
        alone = _lowest_of(measured, ("solo_decode_throughput",), {"batch": batch})
        peak = Peak(alone, "tokens/s", "measured on the slowest GPU alone")
        return DECODING_TOGETHER.get(topology.fabric, DECODING_TOGETHER["pcie"]), peak
    bandwidth = _lowest_of(measured, ("memory_bandwidth",), {"operation": "triad"})
    formula = f"{batch} x {bandwidth:,.4g} GB/s as measured / {nbytes / 1e9:.4g} GB a step"
    return DECODING.get(batch, DECODING_OF_MANY), Peak(batch * bandwidth * 1e9 / nbytes, "tokens/s", formula)


def _port(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    rate, method = (measurement.conditions.get(name) for name in ("port_rate", "method"))
    fraction = RAIL if measurement.metric == "rdma_bandwidth" else LOOPBACK.get(method)
    if not isinstance(rate, int) or fraction is None:
        raise NoPeak("the rate of the port is not known, or how it was measured")
    return fraction, Peak(rate / 8, "GB/s", f"{rate} Gb/s / 8 bits of its ports")


def _rail(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    rate = measurement.conditions.get("network")
    if not isinstance(rate, int | float):
        raise NoPeak(UNKNOWN_NETWORK)
    return RAIL, Peak(rate / 8, "GB/s", f"{rate:,g} Gbit/s / 8 bits that each GPU has of the network")


def _of_all_nodes(measurement: Measurement, topology: GpuTopology, measured: Sequence[Measurement]) -> Part:
    under = measurement.conditions
    _, rail = _rail(measurement, topology, measured)
    if under.get("collective") != "all_reduce" or not isinstance(topology, ClusterTopology):
        raise NoPeak("of collectives between nodes only all_reduce is looked up")
    gpus = min((len(node.gpus) for node in topology.nodes.values() if node.gpus), default=1)
    peak = Peak(gpus * rail.value, "GB/s", f"{gpus} x {rail.formula}")
    if _whole(measurement, "bytes") < min(GiB, AT_FULL_SPEED * peak.value * 1e9):
        raise NoPeak("with so few bytes a collective is not at the speed of the network")
    if gpus > 1 and topology.fabric != "nvswitch":  # then what lies within a node may be slower than its rails
        of_one_node = [each for each in measured if "nodes" not in each.conditions]
        alone = _lowest_of(of_one_node, ("busbw",), {"collective": "all_reduce", "bytes": under["bytes"]})
        peak = min([peak, Peak(alone, "GB/s", "as measured on one node")])
    return RAILS_TOGETHER, peak


def is_required(measurement: Measurement, measured: Iterable[Measurement]) -> bool:
    """Whether a verdict needs it between nodes: each rail, and the all_reduce on most nodes with most bytes."""
    own = _scale(measurement)
    return measurement.metric == "rail_bandwidth" or bool(own and own >= max(map(_scale, measured), default=()))


def _scale(measurement: Measurement) -> tuple[Condition, ...]:
    under = measurement.conditions
    of_all = measurement.metric == "busbw" and under.get("collective") == "all_reduce" and "nodes" in under
    return (_whole(measurement, "nodes"), _whole(measurement, "bytes")) if of_all else ()


def _whole(measurement: Measurement, name: str) -> int:
    """A condition that is a number; 0 if it is none."""
    return value if isinstance(value := measurement.conditions.get(name), int) else 0


# Named by the rows of model/metric.py.
_THEORIES: dict[str, Callable[[Measurement, GpuTopology, Sequence[Measurement]], Part]] = {
    "memory": _memory, "host": _host, "products": _products, "port": _port, "pair": _pair,
    "collective": _collective, "training": _training, "decoding": _decoding, "rail": _rail,
}  # fmt: skip


def _links(link: str) -> int:
    """ "NV18" is 18 NVLinks; whatever goes over PCIe is none."""
    if link == "X":
        return 0
    if not (link.startswith("NV") and link[2:].isdecimal()):
        raise NoPeak("not all GPUs are linked by NVLink")
    return int(link[2:])


def _lowest_of(measured: Sequence[Measurement], metrics: Sequence[str], under: Mapping[str, Condition]) -> float:
    """The lowest figure of the run in any of these metrics under these conditions, of whichever GPU."""
    alike = (each for each in measured if each.metric in metrics and each.conditions.items() >= under.items())
    if not (lowest := min((value for each in alike for value in each.values.values()), default=0.0)) > 0:
        raise NoPeak(f"this run has not measured what it follows from ({METRICS[metrics[0]].title})")
    return lowest
