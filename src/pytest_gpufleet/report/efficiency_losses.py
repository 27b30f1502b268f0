"""Where efficiency is lost when GPUs train together, computed from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.place import WORLD, Where


@dataclass(frozen=True)
class Losses:
    """Parts of what the GPUs do alone, added up; together 1, or more where the figures do not fit together.

    `delivered`: what they do together, the scaling efficiency. `gradients`: lost to communication, as its share of a
    step says. `imbalance`: what faster GPUs could do beyond the pace of the slowest. `rest`: told apart by nothing that
    is measured: the host, or clocks that are lower when all communicate.
    """

    conditions: Mapping[str, Condition]
    delivered: float
    gradients: float
    imbalance: float
    rest: float
    slowest: Where  # whose pace it is


def efficiency_losses(findings: Sequence[Finding]) -> list[Losses]:
    """Of each way of training whose share of communication was measured, beside each GPU alone."""
    measured = [finding.measurement for finding in findings if finding.measurement.values]
    together = {_key(one, "ranks"): one for one in measured if one.metric == "train_throughput"}
    alone = {_key(one): one for one in measured if one.metric == "solo_train_throughput"}
    found = []
    for share in (one for one in measured if one.metric == "communication_share" and WORLD in one.values):
        many, each = together.get(_key(share, "ranks")), alone.get(_key(share))
        if many is not None and each is not None and len(each.values) == share.conditions.get("ranks"):
            found += _losses(many, each, share)
    return found


def _losses(many: Measurement, each: Measurement, share: Measurement) -> list[Losses]:
    total, waits = sum(each.values.values()), share.values[WORLD]
    if not (total > 0 and 0 <= waits < 1 and many.values.get(WORLD, 0) >= 0):  # NaN is neither
        return []
    slowest, pace = min(each.values.items(), key=lambda item: item[1])
    delivered = many.values[WORLD] / total
    gradients = delivered * waits / (1 - waits)
    imbalance = 1 - len(each.values) * pace / total
    rest = max(0.0, 1 - delivered - gradients - imbalance)
    conditions = {key: value for key, value in many.conditions.items() if key not in ("image", "model")}
    return [Losses(conditions, delivered, gradients, imbalance, rest, slowest)]


def _key(measurement: Measurement, *also: str) -> tuple[object, ...]:
    names = ("model", "recipe", "batch", "image", "optimizer", "workload", *also)
    return tuple(measurement.conditions.get(name) for name in names)
