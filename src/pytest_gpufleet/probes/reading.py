"""The metrics there are, and what a probe hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Condition = str | int | float | bool
WORLD = "world"

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30


@dataclass(frozen=True)
class Metric:
    """One quantity that can be measured and judged.

    `peer_tolerance` is the fraction by which a GPU may be worse than the median of its peers (same model, same run);
    None where ranks wait for each other, so that every rank shows the same figure.
    """

    name: str
    unit: str
    better: str  # "higher" or "lower"
    title: str
    peer_tolerance: float | None = None


METRICS = {
    metric.name: metric
    for metric in (
        Metric("busbw", "GB/s", "higher", "bus bandwidth"),
        Metric("train_throughput", "images/s", "higher", "training throughput"),
        # 22 healthy 8-GPU H100 machines differed by 0.12 %, and one GPU in 39 was 3.8 % slow (gpu-fryer): 3 % finds it.
        Metric("solo_train_throughput", "images/s", "higher", "training throughput, each GPU alone", 0.03),
        Metric("scaling_efficiency", "ratio", "higher", "scaling efficiency"),
    )
}


@dataclass(frozen=True)
class Reading:
    """What a probe measured on one rank.

    `value` is in the metric's unit; `samples` are the repetitions it is the median of. `place` is None for this
    rank's own GPU, or "world" where all ranks measured one thing together: then the worst rank's value counts.
    """

    metric: str
    value: float
    conditions: Mapping[str, Condition]
    samples: tuple[float, ...] = ()
    place: str | None = None
    details: Mapping[str, Condition] = field(default_factory=dict)  # shown, never matched against limits
