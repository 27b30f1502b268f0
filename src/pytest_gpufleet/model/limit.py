"""What a figure is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_gpufleet.model.metric import Condition

Kind = Literal["published gate", "0.90 x published measurement", "data sheet", "calibrated", "project gate", "contract"]


@dataclass(frozen=True)
class Limit:
    """A minimum or maximum (`sense`) of a metric, in its unit, where every one of `conditions` holds.

    `contract`: it comes from a profile that the customer gave, and not from one of the shipped ones.
    """

    metric: str
    sense: Literal["min", "max"]
    value: float
    unit: str
    kind: Kind
    source: str
    conditions: Mapping[str, Condition]
    profile: str  # the file it stands in, by its name
    contract: bool = False

    @property
    def origin(self) -> str:
        """How far it can be trusted, and whose it is if it is the customer's."""
        return f"{self.kind}, customer's limit from {self.profile}" if self.contract else self.kind

    def met_by(self, value: float) -> bool:
        # Written so that NaN meets no limit.
        return value >= self.value if self.sense == "min" else value <= self.value

    def __str__(self) -> str:
        sign = "≥" if self.sense == "min" else "≤"
        return f"{sign} {self.value:,g} {self.unit}"
