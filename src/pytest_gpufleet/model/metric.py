"""The metrics: one row each, with all that holds before a profile is read; and what was measured, on a rank or all."""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Generic, Literal, Protocol, TypeVar

from pytest_gpufleet.model.codec import Amount, Finite
from pytest_gpufleet.model.conditions import COMPARED_WORK, FAR, INSIDE, PCIE_WAYS, Condition
from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.place import Where, where

T = TypeVar("T")


class HasGpus(Protocol):
    @property
    def gpus(self) -> Sequence[object]: ...


@dataclass(frozen=True)
class Size(Generic[T]):
    """Bytes, seconds, a number of files: `Size(8 * GiB, rehearsal=8 * MiB)`. As an argument of a probe it arrives on
    the ranks as the one that holds there; `on` gives it to the check itself."""

    gpus: T
    rehearsal: T

    def on(self, world: HasGpus) -> T:
        return self.gpus if world.gpus else self.rehearsal


STEADY = 0.05
KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Metric:
    """One quantity that can be measured and judged. `peer_tolerance` is the fraction by which a place may be worse than
    the mean of the others among its peers (GPUs of the same model, pairs with the same link, in the same run) where
    nobody knows how much healthy ones differ; None where ranks wait for each other, so that all show one figure.
    `steady`: whether samples of a healthy machine agree within 5 %, so that a judged figure fails if they do not.
    `simultaneous`: the samples of all places are of the same moments, so that what they have in common is the course of
    the work, such as a power controller's, and no unsteadiness of a place."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    title: str = field(compare=False)  # as all that follows, which a later version may say otherwise
    peer_tolerance: Finite | None = field(default=None, compare=False)
    steady: bool = field(default=True, compare=False)
    simultaneous: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for what in ("name", "unit", "title"):
            if not isinstance(text := getattr(self, what), str) or not text.strip():
                raise ValueError(f"the {what} of metric {self.name!r} must be a text that is not blank, not {text!r}")
        if self.better not in ("higher", "lower"):
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
            wrong = f'"{key}" in {what} must be a text, a number, true or false, not {reprlib.repr(value)}'
            raise TypeError(f"{wrong}; write str(...) around it")
    return plain


def _plain(value: Any) -> Any:
    """What stands in a scalar of numpy or in a tensor without dimensions, neither of which is imported here."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


# Who the peers of a place are: those whose boards have its part number; where there is none, all of its model; all of
# its model, whatever the board; those of its model at the same NUMA node.
Peers = Literal["part number", "others of the model", "model", "numa node"]


@dataclass(frozen=True)
class SpreadRow:
    """How much healthy ones differ, for a metric where every one of `conditions` holds: the standard deviations of
    places `within` a machine and of the means of machines `between`, as fractions of the mean, and on how many machines
    with how many GPUs they were seen. None: nobody saw any, or says nothing of it here. `matters`: the smallest fault
    that is looked for, as a fraction; the shipped defaults say it for every metric."""

    metric: str
    within: Finite | None = None
    between: Finite | None = None
    machines: int = 0
    gpus: int = 0
    matters: Finite | None = None
    source: str = ""
    date: str = ""
    conditions: Mapping[str, Condition] = field(default_factory=dict)


@dataclass(frozen=True)
class Noise:
    """What a line follows from: a standard deviation (a fraction), seen on so many (0: a default); comparisons."""

    sd: Finite
    gpus: int
    machines: int
    comparisons: int


@dataclass(frozen=True)
class Tolerance:
    """The fraction `worse` by which a place may be worse than the mean of the others among its peers. `noise`: what it
    follows from; None where it is fixed. `per_kelvin`: the fraction that a healthy GPU loses for each kelvin, taken out
    where the temperatures are known. `source`: the machines whose noise it comes from; "" if nobody measured any."""

    metric: str
    worse: Finite
    peers: Peers = "model"
    per_kelvin: Finite = 0.0
    noise: Noise | None = None
    source: str = ""
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """How many peers it takes. Of two nobody can say which one is off; but if they differ by more than healthy ones
        were seen to, the slower one is: nothing makes a GPU faster than it is."""
        return 2 if self.source else 3

    @property
    def text(self) -> Said:
        """What may be, in words: "3 % worse than the mean of the others"."""
        return Said(_OTHERS[self.peers], percent=f"{100 * self.worse:.2g}")


_OTHERS: dict[Peers, str] = {
    "part number": "{percent} % worse than the others with its part number",
    "others of the model": "{percent} % worse than the others, which have another part number",
    "model": "{percent} % worse than the others",
    "numa node": "{percent} % worse than the others at the same NUMA node",
}


def fits(row: "SpreadRow | Tolerance", measured: Mapping[str, Condition], metric: str) -> bool:
    """Whether it is for this metric, and every one of its conditions was measured so."""
    return row.metric == metric and all(measured.get(key) == value for key, value in row.conditions.items())


@dataclass(frozen=True)
class MetricRow:
    """A metric of the suite, and what holds for it wherever it is measured.

    `under`: of the conditions that its probes give, those that a limit may name, and the fabric of the machine. A limit
    that named another one could never hold, and nobody would notice. `not_peers`: whether its places are no peers under
    these conditions, because some share a path or differ by design. `tolerances`: fixed ones, where no spread says by
    how much peers differ and the metric's own does not hold for all. `per_kelvin`: what a healthy GPU at its power
    limit loses for each kelvin that it is warmer. `theory`: the rule of verdict/physical_limits.py that makes a limit
    from the facts of the hardware; "": none does. `spread`: by how much the samples of a judged figure may differ under
    these conditions. `shared`: whether others than the GPUs of this machine may use the way that is measured.
    `by_chance`: whether a healthy machine may miss a limit by chance. How much work was done is no chance.
    `may_be_zero`: events, shares and skews may; of work, which takes time and memory, 0 would meet every limit."""

    metric: Metric
    under: tuple[str, ...] = ("method",)
    theory: str = ""
    shared: Literal["", "always", "between GPUs"] = ""
    may_be_zero: bool = True
    spread: Callable[[Mapping[str, Condition]], float] = lambda conditions: STEADY
    not_peers: Callable[[Mapping[str, Condition]], bool] = lambda conditions: False
    tolerances: tuple[Tolerance, ...] = ()
    per_kelvin: float = 0.0
    by_chance: bool = True

    def between_nodes(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether it is measured between nodes under these conditions. A rail is nothing else."""
        return "network" in self.under and ("nodes" in conditions or self.metric.name == "rail_bandwidth")


# What is out of the ordinary is measured under these as well, and only a limit that names them holds for it. A metric
# that is measured another way than before gets a `method`, so that limits and comparisons never mix the two.
# What several nodes do together is under `nodes`: limits of one node with as many ranks do not hold for it.
EXTRAORDINARY = ("optimizer", "workload", "method", "nodes")

# Of figures between nodes: Gb/s of the network that each GPU has, what NCCL makes of it, and NVLink domains.
BETWEEN_NODES = ("nodes", "network", "nccl", "algorithm", "domain")
_TRANSFER = ("collective", "bytes", "dtype", "ranks", "in_place", "nvls", "fabric", "part", "method", *BETWEEN_NODES)
_TRAINING = ("model", "recipe", "ranks", "batch", "part", *EXTRAORDINARY)
_DECODING = (*_TRAINING, "bytes")
_UNDER_LOAD = ("collective", "precision", "bytes", "ranks", "nvls", "method")


# One at a time both ways, and all together unless they are lined up (since 0.3).
def _shares_a_path(conditions: Mapping[str, Condition]) -> bool:
    return "both" in str(conditions["direction"]) if conditions["at_once"] == "one" else "method" not in conditions


# NCCL by itself, without this package, gave samples of all_gather and reduce_scatter of 8 GiB that differ by up to 7 %
# on two healthy H200, whatever allocated the buffers; here they once did by 5.8 and 5.4 % in a row (docs/results).
UNSTEADY_IN_NCCL, UNSTEADY_FROM, AS_NCCL_IS = ("all_gather", "reduce_scatter"), GiB, 0.10


def _as_nccl_is(conditions: Mapping[str, Condition]) -> float:
    nbytes = conditions.get("bytes")
    large = isinstance(nbytes, int) and nbytes >= UNSTEADY_FROM
    return AS_NCCL_IS if large and conditions.get("collective") in UNSTEADY_IN_NCCL else STEADY


# What goes through the host's memory and PCIe, or over a network, is shared with others: other programs,
# other virtual machines of the host, other jobs. Of two healthy H100 in virtual machines it dipped by up to a third for
# 0.1 to 0.5 s about once a second, also without this suite: samples of 80 ms differed by up to 39 %, and up to 14 % of
# the time was lost. That is shown and is no fault; a way that stalls for half of the time loses half of it.
# fmt: off
ROWS = (
    MetricRow(Metric("busbw", "GB/s", "higher", "bus bandwidth"), _TRANSFER, "collective", shared="between GPUs",
              spread=_as_nccl_is),
    # Pairs of 8x H100 with 448 to 450 GB/s are healthy (oci-hpc); below 400 of 450, 11 %, a warning is due (Azure).
    MetricRow(Metric("node_group_busbw", "GB/s", "higher", "bus bandwidth of nodes, beside other groups of them", 0.10),
              _TRANSFER, shared="always", spread=_as_nccl_is),
    # Of an adapter with 400 Gb/s each way, 384 are asked for one way (oci-hpc), and 720 of 800 both ways (Imbue).
    MetricRow(Metric("rail_bandwidth", "GB/s", "higher", "bandwidth of a rail, both ways busy", 0.10),
              ("at_once", "bytes", "method", *BETWEEN_NODES[1:]), "rail", shared="always"),
    # The same in loopback, of ports of one rate beside each other.
    MetricRow(Metric("nic_bandwidth", "GB/s", "higher", "bandwidth of a network adapter to itself", 0.10),
              ("bytes", "port_rate", "method"), "port", shared="always"),
    # The same to another node, one way. Whether one switch or three lie between decides how long it takes.
    MetricRow(Metric("rdma_bandwidth", "GB/s", "higher", "RDMA write bandwidth between nodes", 0.10),
              ("bytes", "port_rate"), "port", shared="always"),
    MetricRow(Metric("rdma_latency", "us", "lower", "RDMA write latency between nodes", steady=False), ("bytes",),
              may_be_zero=False),
    MetricRow(Metric("collective_latency", "us", "lower", "latency of a collective", steady=False), _TRANSFER,
              may_be_zero=False),
    # Hosts of two healthy H200 needed 36.4 and 50.5 us (samples: 30.6 to 53.7). A shared core or half the clock: twice.
    MetricRow(Metric("launch_time", "us", "lower", "time to launch a collective", 0.9, steady=False),
              ("collective", "bytes", "ranks", "method"), may_be_zero=False),
    MetricRow(Metric("port_events", "events", "lower", "events of network ports", steady=False), ()),
    # Eight healthy H200 at their power limit were up to 4 % off their median.
    MetricRow(Metric("gemm", "TFLOP/s", "higher", "matmul", 0.08, simultaneous=True),
              ("precision", "at_once", "work", "part", "method"), "products", per_kelvin=0.0015),
    MetricRow(Metric("gemm_relative", "ratio", "higher", "matmuls of all precisions, against the fastest GPU",
                     0.08), ("at_once", "part", "method"), per_kelvin=0.0015),
    # Below the power limit the clock is fixed, and chips do not differ. At the limit they do, as in other matmuls.
    MetricRow(Metric("gemm_full_clock", "TFLOP/s", "higher", "matmuls at full clock", 0.08),
              ("precision", "at_once", "at_power_limit", "part", "method")),
    MetricRow(Metric("memory_bandwidth", "GB/s", "higher", "memory bandwidth", 0.03),
              ("operation", "at_once", "part", "method"), "memory"),
    MetricRow(Metric("host_bandwidth", "GB/s", "higher", "bandwidth between host and GPU", 0.10),
              ("direction", "at_once", "method"), "host", shared="always", not_peers=_shares_a_path, tolerances=(
        # GPUs that copy at the same time share the way out of their socket, and not alike: of a healthy 8x H200 those
        # at one node gave 29, 30, 43 and 30 GB/s: 18 % below the mean of the others. Half the lanes give half.
        Tolerance("host_bandwidth", 0.30, "numa node", conditions={"at_once": "all"}),
        # One after the other, half of them at another socket: a healthy 8x H200 gave 53.1 to 55.5 GB/s, which is 4.3 %.
        # Links do not differ with the board.
        Tolerance("host_bandwidth", 0.045, conditions={"at_once": "one", "fabric": "nvswitch"},
                  source="three machines of 4x NVIDIA H200, 2026-11-21: at most 0.11 %; two of 8x: at most 4.3 %"),
        *(Tolerance("host_bandwidth", 0.10, source="8x RTX 4090: 23.9 to 26.4 GB/s (NVIDIA/nvbandwidth issue 15)",
                    conditions={"at_once": "one", "fabric": fabric}) for fabric in ("nvlink", "pcie")),
    )),
    MetricRow(Metric("host_memory_bandwidth", "GB/s", "higher", "bandwidth of host memory", 0.06),
              ("operation", "method"), shared="always",
              not_peers=lambda conditions: conditions.get("operation") == FAR, tolerances=(
        # Two sockets are enough: nothing makes memory faster than its channels are.
        Tolerance("host_memory_bandwidth", 0.06, source="one memory channel of twelve is 8 %, one of eight 12 %"),
    )),
    # Of the one drive that a folder was named on: what another machine's gives depends on its make, on how full it
    # is and on the file system, so these have no peers.
    MetricRow(Metric("drive_bandwidth", "GB/s", "higher", "reading a drive in order", steady=False),
              ("bytes", "queue_depth")),
    MetricRow(Metric("drive_iops", "reads/s", "higher", "reading a drive at random", steady=False),
              ("bytes", "queue_depth")),
    MetricRow(Metric("pair_bandwidth", "GB/s", "higher", "bandwidth between two GPUs", 0.03),
              ("direction", "link", "links", "fabric", "part", "method"), "pair", tolerances=tuple(
        # Of one kind of way some are longer: 39 to 41 GB/s between the sockets of a healthy 8x A40 (NVIDIA/nccl-tests
        # issue 74), 51 to 56 of 6 Blackwell boards (voipmonitor/rtx6kpro), 20 to 22 of 6 RTX 4090 (NVIDIA/nccl issue
        # 814). Half the lanes, or a way that is not direct, give half.
        Tolerance("pair_bandwidth", 0.25, conditions={"link": link}) for link in PCIE_WAYS
    )),
    # Hops share a way, and which ones differs from machine to machine.
    MetricRow(Metric("ring_bandwidth", "GB/s", "higher", "bandwidth to the next GPU of a ring, all at once"),
              ("link", "links", "fabric", "method"), shared="always"),
    MetricRow(Metric("pair_latency", "us", "lower", "latency between two GPUs"), ("link", "links", "fabric", "method"),
              may_be_zero=False),
    MetricRow(Metric("train_throughput", "images/s", "higher", "training throughput"), _TRAINING, "training",
              shared="between GPUs"),
    # 22 healthy 8-GPU H100 machines differed by 0.12 %, and one GPU in 39 was 3.8 % slow (gpu-fryer): 3 % finds it.
    # Small batches wait for the host, and hosts need not serve all GPUs alike.
    MetricRow(Metric("solo_train_throughput", "images/s", "higher", "training throughput, each GPU alone", 0.03),
              _TRAINING, "training", per_kelvin=0.001,
              not_peers=lambda conditions: conditions.get("workload") in COMPARED_WORK),
    MetricRow(Metric("train_memory", "GiB", "lower", "GPU memory that training takes"), _TRAINING, may_be_zero=False),
    MetricRow(Metric("scaling_efficiency", "ratio", "higher", "scaling efficiency"), _TRAINING, shared="between GPUs"),
    # Of 0.4 %, a few thousandths of a step are a lot.
    MetricRow(Metric("communication_share", "ratio", "lower",
                     "share of a step that waits for communication", steady=False), _TRAINING),
    # Of the last lap as NVML's sample period happens to fall.
    MetricRow(Metric("train_utilization", "ratio", "higher",
                     "share of the time that a GPU is busy in training", steady=False), _TRAINING),
    MetricRow(Metric("loader_throughput", "images/s", "higher", "training throughput fed by a data loader"), _TRAINING,
              shared="always"),
    # As of matrix products, of which it mostly consists: at the power limit, healthy GPUs differ.
    MetricRow(Metric("solo_token_throughput", "tokens/s", "higher",
                     "training of a transformer, each GPU alone", 0.08, simultaneous=True), _TRAINING),
    MetricRow(Metric("token_throughput", "tokens/s", "higher", "training of a transformer"), _TRAINING,
              shared="between GPUs"),
    # Of batch 1 a GPU reads all weights for each token; what small kernels wait for adds to it.
    MetricRow(Metric("solo_decode_throughput", "tokens/s", "higher",
                     "decoding of a language model, each GPU alone", 0.03, simultaneous=True), _DECODING, "decoding"),
    MetricRow(Metric("decode_throughput", "tokens/s", "higher", "decoding of a language model, tensor parallel"),
              _DECODING, "decoding", shared="between GPUs"),
    MetricRow(Metric("model_flops_utilization", "ratio", "higher", "model FLOPs utilization (MFU)"), _TRAINING),
    # Of two rates, of which each may differ as those of products do.
    MetricRow(Metric("product_retention", "ratio", "higher",
                     "matmuls beside an all_reduce, of those alone", 0.16, steady=False), _UNDER_LOAD),
    MetricRow(Metric("reduction_retention", "ratio", "higher",
                     "an all_reduce beside matmuls, of that alone", steady=False), _UNDER_LOAD),
    MetricRow(Metric("corruption_bound", "s", "higher", "lower bound of the GPU time between silent data "
                     "corruptions (95 %)", steady=False), ("precision",), by_chance=False),
    MetricRow(Metric("collective_corruption_bound", "s", "higher", "lower bound of the GPU time between corruptions "
                     "by a collective (95 %)", steady=False), ("collective",), by_chance=False),
    # Rooms, racks and positions differ: what is judged is how much warmer a GPU is than its like.
    MetricRow(Metric("soak_temperature", "C", "lower", "temperature at the end of the soak")),
    MetricRow(Metric("soak_excess", "K", "lower", "temperature above the peers' at equal power, in the soak")),
    # Of such load, on 3 healthy boards of 4x H200: 682 to 702 W, clocks 6 % apart.
    MetricRow(Metric("soak_clock", "MHz", "higher", "SM clock at the end of the soak", 0.10)),
    # Where the load does not reach the power limit, a chip that needs less is none the worse: clocks and
    # matmuls show a fault, and power only where it is far too low.
    MetricRow(Metric("soak_power", "W", "higher", "power at the end of the soak", 0.20), ("at_power_limit", "method"),
              tolerances=(
        Tolerance("soak_power", 0.08, source="at their limit of 700 W three machines of 4x NVIDIA H200 drew 682 to 702",
                  conditions={"at_power_limit": True}),
    )),
    MetricRow(Metric("burn_power", "ratio", "higher", "power while matmuls run, of the power limit")),
    MetricRow(Metric("burn_peak_power", "ratio", "higher", "highest power under load, of the power limit")),  # to 0.2
    MetricRow(Metric("burn_retention", "ratio", "higher",
                     "throughput at the end of the burn-in, of that at its beginning"), ("work", "method")),
    MetricRow(Metric("step_power", "ratio", "higher", "power at the top of power steps, of the power limit")),
    MetricRow(Metric("power_swing", "W", "higher", "power between top and bottom of power steps")),
    # The host's own holdups count too.
    MetricRow(Metric("step_skew", "ms", "lower", "how far loads begin and end off the steps of all GPUs",
                     steady=False)),
    MetricRow(Metric("step_retention", "ratio", "higher", "rate at the last power steps, of that at the first")),
)
# fmt: on
# How far the samples behind a figure differ: the limit of which is the suite's own.
SPREAD = Metric("spread", "ratio", "lower", "spread of the samples behind a measurement")
METRICS = {row.metric.name: row.metric for row in ROWS} | {SPREAD.name: SPREAD}
MEASURED_UNDER = {row.metric.name: row.under for row in ROWS}
_ROWS = {row.metric.name: row for row in ROWS}


def row_of(metric: Metric) -> MetricRow:
    """That of the suite; of an author's own metric one in which nothing is said."""
    return _ROWS.get(metric.name, MetricRow(metric, ()))


def metric_under(name: str, conditions: Mapping[str, Condition]) -> Metric:
    """One of METRICS as it is judged under these conditions."""
    row = _ROWS[name]
    return replace(row.metric, peer_tolerance=None) if row.not_peers(conditions) else row.metric


def over_network(metric: str, conditions: Mapping[str, Condition]) -> bool:
    """Whether it is what the network between nodes carries, and not NVLinks."""
    return metric in _ROWS and _ROWS[metric].between_nodes(conditions) and conditions.get("domain") != INSIDE


@dataclass(frozen=True)
class Sample:
    """The readings of all GPUs at `time` (seconds since the epoch): reading -> value, None where it cannot be had."""

    time: Amount
    gpus: tuple[dict[str, Amount | None], ...]


KNOWN = Metric("known", "of METRICS", "higher", "the one of METRICS that has the name of the measurement")


@dataclass(frozen=True)
class GpuState:
    """What a GPU was like while a figure was measured on it: means, and the energy it took; None: NVML has none."""

    temperature_c: Finite | None = None
    sm_clock_mhz: Finite | None = None
    power_watts: Finite | None = None
    energy_joules: Finite | None = None


@dataclass(frozen=True)
class Reading:
    """What a probe measured on one rank. `metric` is the name of one of METRICS, or a Metric of your own. `value` is in
    the metric's unit; `samples` are the repetitions it is the median of. `place` (or its text, like "gpu0-gpu5") is
    None for this rank's own GPU, WORLD where all ranks measured one thing together (then the worst rank's value
    counts), or what else was measured. `gpu_state`: of the GPU that the figure depends on, while it was measured."""

    metric: str | Metric
    value: float
    conditions: Mapping[str, Condition]
    samples: tuple[float, ...] = ()
    place: Where | None = None
    details: Mapping[str, Condition] = field(default_factory=dict)  # shown, never matched against limits
    gpu_state: GpuState | None = None

    def __post_init__(self) -> None:
        """Checked where it is made, so that a wrong one fails its own check, and the failure shows the line."""
        name = self.metric.name if isinstance(self.metric, Metric) else self.metric
        if not isinstance(name, str):
            raise TypeError(f"the metric of a Reading must be a Metric or the name of one, not {reprlib.repr(name)}")
        place = None if self.place is None else _where(self.place, f"the place of {name}")
        value = number(self.value, f"the value of {name}")
        _settle(self, name, place=place, value=value, samples=numbers(self.samples, f"the samples of {name}"))


@dataclass(frozen=True)
class Measurement:
    """A metric's value for every place, and the conditions it was measured under. `values` maps a place (or its text:
    "gpu3", "gpu0-gpu5", "node", "world") to a value in the metric's unit; `samples` holds the repetitions behind each
    value; `conditions` decide which limit applies; `details` are only shown; `gpu_states` says what each GPU was like
    meanwhile, where that was read. `definition` says what the metric is, so that evidence can be read where nobody
    knows the check that it comes from; left out, it is the one of METRICS. ValueError if there is none."""

    metric: str
    values: Mapping[Where, float]
    conditions: Mapping[str, Condition]
    samples: Mapping[Where, tuple[float, ...]] = field(default_factory=dict)
    details: Mapping[str, Condition] = field(default_factory=dict)
    definition: Metric = KNOWN
    gpu_states: Mapping[Where, GpuState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.definition is KNOWN:
            if self.metric not in METRICS:
                use = f"use one of {', '.join(METRICS)}, or give a Metric of your own"
                raise ValueError(f"there is no metric {self.metric!r}: {use}")
            object.__setattr__(self, "definition", METRICS[self.metric])
        values = _by_place(self.values, float, number, f"the value of {self.metric}")
        samples = _by_place(self.samples, tuple, numbers, f"the samples of {self.metric}")
        states = _by_place(self.gpu_states, GpuState, None, f"the state of the GPUs of {self.metric}")
        _settle(self, self.metric, values=values, samples=samples, gpu_states=states)

    @property
    def unit(self) -> str:
        return self.definition.unit

    @property
    def worst(self) -> tuple[Where, float]:
        """The place that did worst, and its value. NaN is worse than any number."""
        return min(self.values.items(), key=lambda item: goodness(item[1], self.definition))

    @property
    def spread(self) -> dict[Where, float]:
        """(highest - lowest) / median of the samples behind each value, for places with at least two."""
        every = {place: samples for place, samples in self.samples.items() if len(samples) > 1 and median(samples)}
        if self.definition.simultaneous:
            every = _without_common_course(every)
        usual = {place: abs(median(samples)) for place, samples in every.items()}
        return {place: (max(samples) - min(samples)) / usual[place] for place, samples in every.items() if usual[place]}


def _without_common_course(samples: Mapping[Where, tuple[float, ...]]) -> dict[Where, tuple[float, ...]]:
    """Simultaneous samples, each divided by what most places did at that moment, of their own means. Of an even number
    of places the middle is undecided: then that nothing changed has a vote too, so that of two places only one of which
    changed, none is taken to have changed with it."""
    if len(samples) < 2 or len({len(each) for each in samples.values()}) > 1:
        return dict(samples)
    votes = [[sample / fmean(each) for sample in each] for each in samples.values()]
    nothing = [] if len(votes) % 2 else [[1.0] * len(votes[0])]
    common = [median(at_one_moment) for at_one_moment in zip(*votes, *nothing, strict=True)]
    return {
        place: tuple(sample / course if course else sample for sample, course in zip(each, common, strict=True))
        for place, each in samples.items()
    }


def _settle(made: Reading | Measurement, name: str, **checked: Any) -> None:
    """Leave plain Python where an author may have given numbers and texts of other kinds."""
    for attribute in ("conditions", "details"):
        checked[attribute] = conditions(getattr(made, attribute), f"the {attribute} of {name}")
    for attribute, value in checked.items():
        object.__setattr__(made, attribute, value)


def _by_place(given: Mapping[Any, Any], kind: Any, checked: Any, what: str) -> dict[Where, Any]:
    """`kind`: of the values of which nothing is to be checked, as of nearly all; of a tuple all must be floats."""
    if not isinstance(given, Mapping):
        raise TypeError(f'{what} must be given by place, like {{"gpu0": 1.5}}, not {reprlib.repr(given)}')
    where = f"the places of {what}"
    found = {}
    for at, value in given.items():
        fine = type(value) is kind and (kind is not tuple or all(type(each) is float for each in value))
        if not fine and checked is None:
            raise TypeError(f"{what} must be a {kind.__name__}, not {reprlib.repr(value)}")
        found[at if isinstance(at, Where) else _where(at, where)] = value if fine else checked(value, f"{what} at {at}")
    return found


def _where(given: Any, what: str) -> Where:
    if not isinstance(given, Where | str):
        raise TypeError(f'{what} must be a place or its text, like "gpu0" or "world", not {reprlib.repr(given)}')
    return where(given)


def goodness(value: float, metric: Metric) -> float:
    """Higher is better, whatever the metric; NaN is worse than any number."""
    return -math.inf if math.isnan(value) else metric.sign * value
