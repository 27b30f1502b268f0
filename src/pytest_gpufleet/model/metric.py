"""The metrics there are, and what a probe hands back."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.conditions import COMPARED_WORK, Condition

T = TypeVar("T")


class HasGpus(Protocol):
    @property
    def gpus(self) -> Sequence[object]: ...


@dataclass(frozen=True)
class Size(Generic[T]):
    """Bytes, seconds, a number of files: `Size(8 * GiB, rehearsal=8 * MiB)`.

    As an argument of a probe it arrives on the ranks as the one that holds there; `on` gives it to the check itself.
    """

    gpus: T
    rehearsal: T

    def on(self, world: HasGpus) -> T:
        return self.gpus if world.gpus else self.rehearsal


BETTER = ("higher", "lower")

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30


@dataclass(frozen=True)
class Metric:
    """One quantity that can be measured and judged.

    `peer_tolerance` is the fraction by which a place may be worse than the better half of its peers (GPUs of the same
    model, pairs with the same link, in the same run) where no profile says how much healthy ones differ; None where
    ranks wait for each other, so that all show one figure.
    `steady`: whether samples of a healthy machine agree within 5 %, so that a judged figure fails if they do not.
    `simultaneous`: the samples of all places are of the same moments, so that what they have in common is the course of
    the work, such as a power controller's, and no unsteadiness of a place.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    title: str
    peer_tolerance: Finite | None = None
    steady: bool = True
    simultaneous: bool = False

    def __post_init__(self) -> None:
        for what in ("name", "unit", "title"):
            if not isinstance(text := getattr(self, what), str) or not text.strip():
                raise ValueError(f"the {what} of metric {self.name!r} must be a text that is not blank, not {text!r}")
        if self.better not in BETTER:
            raise ValueError(f'metric {self.name}: better must be "higher" or "lower", not {self.better!r}')
        if self.peer_tolerance is not None and not number(self.peer_tolerance, f"peer_tolerance of {self.name}") >= 0:
            raise ValueError(f"metric {self.name}: peer_tolerance must be 0 or more, not {self.peer_tolerance!r}")

    @property
    def sign(self) -> int:
        """Of a difference that is for the better."""
        return 1 if self.better == "higher" else -1


def number(value: Any, what: str) -> float:
    """A number of Python, numpy or a tensor without dimensions as a float. TypeError if `what` is anything else."""
    plain = _plain(value)
    # True and False are int to Python, but nothing that was measured.
    if not isinstance(plain, int | float) or isinstance(plain, bool):
        raise TypeError(f"{what} must be a number, not {reprlib.repr(value)}")
    return float(plain)


def numbers(values: Iterable[Any], what: str) -> tuple[float, ...]:
    """Each as a float. TypeError if `what` is anything else than several numbers."""
    try:
        each = tuple(values)
    except TypeError:  # a number, None or a tensor without dimensions
        raise TypeError(f"{what} must be a tuple of numbers, not {reprlib.repr(values)}") from None
    return tuple(number(value, f"each of {what}") for value in each)


def conditions(given: Mapping[str, Any], what: str) -> dict[str, Condition]:
    """What a figure was measured under as plain Python. TypeError if `what` is anything else than such a table."""
    if not isinstance(given, Mapping):
        raise TypeError(f'{what} must be a dict like {{"bytes": 1024}}, not {reprlib.repr(given)}')
    plain = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"the names in {what} must be texts, not {reprlib.repr(key)}")
        plain[key] = _plain(value)
        if not isinstance(plain[key], str | int | float):  # bool is int
            raise TypeError(
                f'"{key}" in {what} must be a text, a number, true or false, not {reprlib.repr(value)}; '
                "write str(...) around it"
            )
    return plain


def _plain(value: Any) -> Any:
    """What stands in a scalar of numpy or in a tensor without dimensions, neither of which is imported here."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


# fmt: off
METRICS = {
    metric.name: metric
    for metric in (
        Metric("busbw", "GB/s", "higher", "bus bandwidth"),
        # Pairs of 8x H100 with 448 to 450 GB/s are called healthy (oci-hpc), and a warning is due below 400 of 450
        # (Azure): that is 11 %.
        Metric("node_group_busbw", "GB/s", "higher", "bus bandwidth of nodes, beside other groups of them", 0.10),
        # Of an adapter with 400 Gb/s each way, 384 are asked for one way (oci-hpc), and 720 of 800 both ways (Imbue).
        Metric("rail_bandwidth", "GB/s", "higher", "bandwidth of a rail, both ways busy", 0.10),
        # The same in loopback, of ports of one rate beside each other.
        Metric("nic_bandwidth", "GB/s", "higher", "bandwidth of a network adapter to itself", 0.10),
        Metric("collective_latency", "us", "lower", "latency of a collective", steady=False),
        # The hosts of two healthy H200 needed 36.4 and 50.5 us, in samples of 30.6 to 53.7. A shared core doubles it,
        # and so does half the clock.
        Metric("launch_time", "us", "lower", "time to launch a collective", 0.9, steady=False),
        Metric("port_events", "events", "lower", "events of network ports", steady=False),
        # Eight healthy H200 at their power limit were up to 4 % off their median.
        Metric("gemm", "TFLOP/s", "higher", "matrix product", 0.08, simultaneous=True),
        Metric("gemm_relative", "ratio", "higher", "matrix products of all precisions, against the fastest GPU", 0.08),
        Metric("memory_bandwidth", "GB/s", "higher", "memory bandwidth", 0.03),
        Metric("host_bandwidth", "GB/s", "higher", "bandwidth between host and GPU", 0.10),
        Metric("host_memory_bandwidth", "GB/s", "higher", "bandwidth of host memory", 0.06),
        # Of the one drive that a folder was named on: what another machine's gives depends on its make, on how full it
        # is and on the file system, so these have no peers.
        Metric("drive_bandwidth", "GB/s", "higher", "reading a drive in order", steady=False),
        Metric("drive_iops", "reads/s", "higher", "reading a drive at random", steady=False),
        Metric("pair_bandwidth", "GB/s", "higher", "bandwidth between two GPUs", 0.03),
        Metric("pair_latency", "us", "lower", "latency between two GPUs"),
        Metric("train_throughput", "images/s", "higher", "training throughput"),
        # 22 healthy 8-GPU H100 machines differed by 0.12 %, and one GPU in 39 was 3.8 % slow (gpu-fryer): 3 % finds it.
        Metric("solo_train_throughput", "images/s", "higher", "training throughput, each GPU alone", 0.03),
        Metric("train_memory", "GiB", "lower", "GPU memory that training takes"),
        Metric("scaling_efficiency", "ratio", "higher", "scaling efficiency"),
        # Of 0.4 %, a few thousandths of a step are a lot.
        Metric("communication_share", "ratio", "lower",
               "share of a training step that waits for communication", steady=False),
        # Of the last lap as NVML's sample period happens to fall.
        Metric("train_utilization", "ratio", "higher",
               "share of the time that a GPU is busy in training", steady=False),
        Metric("loader_throughput", "images/s", "higher", "training throughput fed by a data loader"),
        # As of matrix products, of which it mostly consists: at the power limit, healthy GPUs differ.
        Metric("solo_token_throughput", "tokens/s", "higher",
               "training of a transformer, each GPU alone", 0.08, simultaneous=True),
        Metric("token_throughput", "tokens/s", "higher", "training of a transformer"),
        Metric("model_flops_utilization", "ratio", "higher", "model FLOPs utilization (MFU)"),
        # Of two rates, of which each may differ as those of products do.
        Metric("product_retention", "ratio", "higher",
               "matrix products beside an all_reduce, of those alone", 0.16, steady=False),
        Metric("reduction_retention", "ratio", "higher",
               "an all_reduce beside matrix products, of that alone", steady=False),
        # Of such load, on 3 healthy boards of 4x H200: 53 to 63 C and up to 9 K apart, 682 to 702 W, clocks 6 % apart.
        Metric("soak_temperature", "C", "lower", "temperature at the end of the soak", 0.30),
        Metric("soak_clock", "MHz", "higher", "SM clock at the end of the soak", 0.10),
        # Where the load does not reach the power limit, a chip that needs less is none the worse: clocks and products
        # tell, and power only where it is far too low.
        Metric("soak_power", "W", "higher", "power at the end of the soak", 0.20),
        Metric("burn_power", "ratio", "higher", "power while matrix products run, of the power limit"),
        Metric("burn_peak_power", "ratio", "higher", "highest power under load, of the power limit"),  # until 0.2
        Metric("burn_retention", "ratio", "higher", "throughput at the end of the burn-in, of that at its beginning"),
        Metric("step_power", "ratio", "higher", "power at the top of power steps, of the power limit"),
        Metric("power_swing", "W", "higher", "power between top and bottom of power steps"),
        # The host's own holdups count too.
        Metric("step_skew", "ms", "lower", "how far loads begin and end off the steps of all GPUs", steady=False),
        Metric("step_retention", "ratio", "higher", "rate at the last power steps, of that at the first"),
        Metric("spread", "ratio", "lower", "spread of the samples behind a figure"),
    )
}
# fmt: on


# When places of a metric are no peers: because some share a path, or because they differ by design.
_NO_PEERS: dict[str, Callable[[Mapping[str, Condition], str], bool]] = {
    # One at a time both ways, and all together unless they are lined up, which only began with version 0.3.
    "host_bandwidth": lambda conditions, fabric: (
        "both" in str(conditions["direction"]) if conditions["at_once"] == "one" else "method" not in conditions
    ),
    # Small batches wait for the host, and hosts need not serve all GPUs alike.
    "solo_train_throughput": lambda conditions, fabric: conditions.get("workload") in COMPARED_WORK,
    "pair_bandwidth": lambda conditions, fabric: fabric != "nvswitch",  # pairs have different numbers of links
}


def metric_under(name: str, conditions: Mapping[str, Condition], fabric: str = "") -> Metric:
    """One of METRICS as it is judged under these conditions, on a machine whose GPUs `fabric` connects."""
    alone = name in _NO_PEERS and _NO_PEERS[name](conditions, fabric)
    return replace(METRICS[name], peer_tolerance=None) if alone else METRICS[name]


# Figures of the data sheet, and what each of them is. A fact is left out where the GPU has no such thing, or where
# nobody says.
FACTS = {
    "memory_gigabytes": "GB",
    "power_watts": "the default power limit",
    "pcie_generation": "of a link with 16 lanes",
    "pcie_width": "lanes, of machines that were ordered with fewer than the GPU has",
    "nvlinks": "0: it has none",
    "nvlink_gigabytes_per_second": "GB/s in one direction, all NVLinks of one GPU together",
    "hbm_terabytes_per_second": "TB/s of its memory, of whatever kind",
    "peak_tflops_fp64": "TFLOP/s; with tensor cores, where they do fp64",
    "peak_tflops_fp32": "TFLOP/s without tensor cores",
    "peak_tflops_tf32": "TFLOP/s, dense",
    "peak_tflops_fp16": "TFLOP/s, dense",
    "peak_tflops_bf16": "TFLOP/s, dense",
    "peak_tflops_fp8": "TFLOP/s, dense",
}

# What is out of the ordinary is measured under these as well, and only a limit that names them holds for it. A metric
# that is measured another way than before gets a `method`, so that limits and comparisons never mix the two.
# What several nodes do together is under `nodes`: limits of one node with as many ranks do not hold for it.
EXTRAORDINARY = ("optimizer", "workload", "method", "nodes")

# Of figures between nodes: Gb/s of the network that each GPU has, and what NCCL makes of it.
BETWEEN_NODES = ("nodes", "network", "nccl", "algorithm")
_TRANSFER = ("collective", "bytes", "dtype", "ranks", "in_place", "nvls", "fabric", "method", *BETWEEN_NODES)
_TRAINING = ("model", "recipe", "ranks", "batch", *EXTRAORDINARY)
_UNDER_LOAD = ("collective", "precision", "bytes", "ranks", "nvls", "method")

# Of the conditions that the probes give with each metric, those that a limit may name, and the fabric of the machine. A
# limit that named one that no probe gives could never hold, and nobody would notice.
_MEASURED_UNDER: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_TRANSFER, ("busbw", "collective_latency", "node_group_busbw")),
    (("at_once", "bytes", "method", *BETWEEN_NODES[1:]), ("rail_bandwidth",)),
    (("bytes", "port_rate", "method"), ("nic_bandwidth",)),
    ((), ("port_events",)),
    (("collective", "bytes", "ranks", "method"), ("launch_time",)),
    (("precision", "at_once", "work", "method"), ("gemm",)),
    (("at_once", "method"), ("gemm_relative",)),
    (("operation", "at_once", "method"), ("memory_bandwidth",)),
    (("direction", "at_once", "method"), ("host_bandwidth",)),
    (("operation", "method"), ("host_memory_bandwidth",)),
    (("bytes", "queue_depth"), ("drive_bandwidth", "drive_iops")),
    (("direction", "link", "fabric", "method"), ("pair_bandwidth",)),
    (("link", "fabric", "method"), ("pair_latency",)),
    (_TRAINING, (
        "train_throughput", "solo_train_throughput", "train_memory", "scaling_efficiency", "communication_share",
        "train_utilization", "loader_throughput", "solo_token_throughput", "token_throughput",
        "model_flops_utilization",
    )),
    (_UNDER_LOAD, ("product_retention", "reduction_retention")),
    (("method",), ("soak_temperature", "soak_clock", "soak_power", "burn_power", "burn_peak_power")),
    (("work", "method"), ("burn_retention",)),
    (("method",), ("step_power", "power_swing", "step_skew", "step_retention")),
)  # fmt: skip
MEASURED_UNDER = {name: under for under, names in _MEASURED_UNDER for name in names}


def over_network(metric: str, conditions: Mapping[str, Condition]) -> bool:
    """Whether it is what the network between nodes carries. A rail is nothing else."""
    return "network" in MEASURED_UNDER.get(metric, ()) and ("nodes" in conditions or metric == "rail_bandwidth")
