"""DataParallel, DDP and FSDP side by side: what each makes of the same GPUs and the same global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.conditions import METHODS
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.report import wording

METHOD = "method"
IN_SHORT = "in_short"  # the detail that reads the comparison for a person


@dataclass(frozen=True)
class Method:
    """`rate`: images/s; `share`: of the fastest; `efficiency`: of as many GPUs as one; `memory`: GiB by place."""

    name: str
    rate: float
    share: float
    efficiency: float | None
    memory: Mapping[Where, float]

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Throughput, share of the fastest, efficiency and memory, in words."""
        efficiency = wording.percent(self.efficiency) if self.efficiency is not None else ""
        memory = wording.span(self.memory.values(), "GiB", 3) if self.memory else ""
        uneven = self.memory and max(self.memory.values()) > 1.05 * min(self.memory.values())
        where = f", most on {wording.place(max(self.memory, key=self.memory.__getitem__))}" if uneven else ""
        return f"{wording.number(self.rate)} images/s", wording.percent(self.share), efficiency, memory + where


@dataclass(frozen=True)
class MethodComparison:
    conditions: str
    in_short: str
    methods: tuple[Method, ...]


def compares_methods(finding: Finding) -> bool:
    """Whether a figure belongs to such a comparison: the method of another says how it was measured."""
    return finding.measurement.conditions.get(METHOD) in METHODS


def method_comparison(findings: Sequence[Finding], say: Say = english) -> MethodComparison | None:
    """The comparison on most GPUs that is in the figures of a group; None if there is none of at least two methods."""
    every = [finding.measurement for finding in findings if compares_methods(finding)]
    most = max((count for one in every if isinstance(count := one.conditions.get("ranks"), int)), default=0)
    compared = [one for one in every if one.conditions.get("ranks") == most]  # of fewer GPUs: training_tables
    rates = {_method(one): one for one in compared if one.metric == "train_throughput" and WORLD in one.values}
    if len(rates) < 2:
        return None
    fastest = max(one.values[WORLD] for one in rates.values())
    efficiency = {_method(one): one.values.get(WORLD) for one in compared if one.metric == "scaling_efficiency"}
    memory = {_method(one): one.values for one in compared if one.metric == "train_memory"}
    conditions = {key: value for key, value in next(iter(rates.values())).conditions.items() if key != METHOD}
    in_short = next((str(text) for one in rates.values() if (text := one.details.get(IN_SHORT))), "")
    return MethodComparison(
        say(", ").join(wording.words(conditions, say)),
        in_short,
        tuple(
            Method(
                wording.words({METHOD: name})[0],
                one.values[WORLD],
                one.values[WORLD] / fastest if fastest else math.nan,
                efficiency.get(name),
                memory.get(name, {}),
            )
            for name, one in rates.items()
        ),
    )


def _method(measurement: Measurement) -> str:
    return str(measurement.conditions[METHOD])
