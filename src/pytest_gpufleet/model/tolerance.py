"""By how much a place may be worse than its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Condition

# What a place is held against, of what its peers reach: the best of them; the mean of the better half, behind which
# half a machine that is slow cannot hide; the median, which half a machine may lie below.
Reference = Literal["best", "better half", "median"]
# Who the peers are: all of one kind in the machine, or those at the same NUMA node.
Within = Literal["machine", "numa node"]


@dataclass(frozen=True)
class Tolerance:
    """The fraction `worse` by which a place may be worse than the `reference` of its peers, for a metric where every
    one of `conditions` holds.

    `per_kelvin`: the fraction that a healthy GPU loses for each kelvin that it is warmer, which is taken out where the
    temperatures are known. `source`: the machines whose noise it comes from; empty if nobody has measured any.
    """

    metric: str
    worse: Finite
    reference: Reference = "better half"
    within: Within = "machine"
    per_kelvin: Finite = 0.0
    source: str = ""
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    def holds(self, measurement: Measurement) -> bool:
        """Whether it is for this metric, and every one of its conditions was measured so."""
        measured = measurement.conditions
        same = all(measured.get(key) == value for key, value in self.conditions.items())
        return self.metric == measurement.metric and same

    @property
    def least(self) -> int:
        """How many peers it takes. With two, nobody can say which one is off; but if they differ by more than healthy
        ones were seen to, the slower one is: nothing makes a GPU faster than it is."""
        return 2 if self.source else 3

    @property
    def told(self) -> Said:
        """What may be, in words: "3 % worse than the better half of its peers"."""
        near = "{percent} % worse than the {reference} of its peers at the same NUMA node"
        text = "{percent} % worse than the {reference} of its peers" if self.within == "machine" else near
        return Said(text, percent=f"{100 * self.worse:g}", reference=Said(self.reference))
