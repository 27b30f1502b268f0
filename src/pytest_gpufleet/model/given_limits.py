"""The limits that were given with --fleet-profile, as evidence keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.verdict.profiles.profile import holds
from pytest_gpufleet.verdict.profiles.profile_file import KnownGood

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Change:
    """A fact of a GPU model that a profile sets otherwise than the shipped one; `given` is None if it leaves it out."""

    file: str
    fact: str
    shipped: float
    given: float | None

    def __str__(self) -> str:
        whose = f"the customer's profile {self.file}"
        if self.given is None:
            return f"{whose} leaves out {self.fact} ({self.shipped:g})"
        verb = "lowers" if self.given < self.shipped else "raises"
        return f"{whose} {verb} {self.fact} from {self.shipped:g} to {self.given:g}"


@dataclass(frozen=True)
class Given:
    """`limits` are those of the file itself, in its order; `facts` all that hold with it."""

    file: str
    limits: tuple[Limit, ...]
    facts: Mapping[str, float]
    changes: tuple[Change, ...] = ()
    calibrated_on: tuple[KnownGood, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Given:
        """The inverse of `dataclasses.asdict` after a way through JSON."""
        return cls(
            data["file"],
            tuple(Limit(**limit) for limit in data["limits"]),
            data["facts"],
            tuple(Change(**change) for change in data["changes"]),
            tuple(KnownGood.from_json(run) for run in data["calibrated_on"]),
        )

    def unused(self, findings: Iterable[Finding], fabric: str) -> list[tuple[int, Limit]]:
        """The limits under whose conditions nothing was measured, by their number in the file."""
        measured = [finding.measurement for finding in findings if finding.measurement.values]
        return [
            (number, limit)
            for number, limit in enumerate(self.limits, 1)
            if not any(holds(limit, measurement, fabric) for measurement in measured)
        ]

    def calibrated_among(self, gpus: Iterable[Gpu]) -> list[Gpu]:
        """Those of these GPUs that its limits were measured on."""
        known = {name for run in self.calibrated_on for name in (*run.uuids, *run.serials)}
        return [gpu for gpu in gpus if gpu.uuid in known or gpu.serial in known]
