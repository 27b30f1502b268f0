"""The metrics there are, and what a probe hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Condition = str | int | float | bool
WORLD = "world"

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30


@dataclass(frozen=True)
class Metric:
    """One quantity that can be measured and judged.

    `peer_tolerance` is the fraction by which a place may be worse than the median of its peers (GPUs of the same model,
    pairs with the same link, in the same run); None where ranks wait for each other, so that all show one figure.
    `steady`: whether samples of a healthy machine agree within 5 %, so that a judged figure fails if they do not.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    title: str
    peer_tolerance: float | None = None
    steady: bool = True


METRICS = {
    metric.name: metric
    for metric in (
        Metric("busbw", "GB/s", "higher", "bus bandwidth"),
        Metric("collective_latency", "us", "lower", "latency of a collective", steady=False),
        # Eight healthy H200 at their power limit were up to 4 % off their median.
        Metric("gemm", "TFLOP/s", "higher", "matrix product", 0.08),
        Metric("memory_bandwidth", "GB/s", "higher", "memory bandwidth", 0.03),
        Metric("host_bandwidth", "GB/s", "higher", "bandwidth between host and GPU", 0.10),
        Metric("pair_bandwidth", "GB/s", "higher", "bandwidth between two GPUs", 0.03),
        Metric("pair_latency", "us", "lower", "latency between two GPUs"),
        Metric("train_throughput", "images/s", "higher", "training throughput"),
        # 22 healthy 8-GPU H100 machines differed by 0.12 %, and one GPU in 39 was 3.8 % slow (gpu-fryer): 3 % finds it.
        Metric("solo_train_throughput", "images/s", "higher", "training throughput, each GPU alone", 0.03),
        Metric("train_memory", "GiB", "lower", "GPU memory that training takes"),
        Metric("scaling_efficiency", "ratio", "higher", "scaling efficiency"),
        # Of 0.4 %, a few thousandths of a step are a lot.
        Metric(
            "communication_share",
            "ratio",
            "lower",
            "share of a training step that waits for communication",
            steady=False,
        ),
        Metric("loader_throughput", "images/s", "higher", "training throughput fed by a data loader"),
        Metric("burn_peak_power", "ratio", "higher", "highest power under load, of the power limit"),
        Metric("burn_retention", "ratio", "higher", "throughput at the end of the burn-in, of that at its beginning"),
        Metric("spread", "ratio", "lower", "spread of the samples behind a figure"),
    )
}


@dataclass(frozen=True)
class Reading:
    """What a probe measured on one rank.

    `metric` is the name of one of METRICS, or a Metric of your own. `value` is in the metric's unit; `samples` are the
    repetitions it is the median of. `place` is None for this rank's own GPU, "world" where all ranks measured one thing
    together (then the worst rank's value counts), or what else was measured, like the pair "gpu0-gpu5".
    """

    metric: str | Metric
    value: float
    conditions: Mapping[str, Condition]
    samples: tuple[float, ...] = ()
    place: str | None = None
    details: Mapping[str, Condition] = field(default_factory=dict)  # shown, never matched against limits
