"""Limits, and measurements held against them."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Tolerance
from pytest_gpufleet.model.place import Where, where

State = Literal["met", "missed", "not judged", "for information"]


@dataclass(frozen=True)
class Finding:
    """A measurement and what it is held against. All else follows by verdict.judgement.held, and is not recorded.

    `missed` names the places that missed `limit`; `slower_than_peers` those that are worse than their peers by more
    than one of `tolerances` allows, with that fraction, and is None where none had peers enough. `reason` says in one
    sentence why it was not judged, or what missed. `required`: without a limit the verdict is incomplete.
    """

    check: str  # the node id of the test
    measurement: Measurement
    state: State = "not judged"
    limit: Limit | None = None
    missed: tuple[Where, ...] = ()
    slower_than_peers: Mapping[Where, Finite] | None = None
    reason: str = ""
    required: bool = True
    again: str = ""  # why it was measured once more: only that finding counts
    tolerances: tuple[Tolerance, ...] = ()  # what may differ among peers; none where places are no peers

    def __post_init__(self) -> None:
        """msgspec leaves the keys of a dict as they are."""
        if self.slower_than_peers:
            slower = {where(at): fraction for at, fraction in self.slower_than_peers.items()}
            object.__setattr__(self, "slower_than_peers", slower)

    @cached_property
    def shown(self) -> tuple[Hashable, ...]:
        """By what a reader tells it from others."""
        of = self.measurement
        return of.metric, self.state, frozenset(of.conditions.items()), frozenset(of.values.items())

    def properties(self) -> list[tuple[str, str]]:
        """The figures as names and values, for junit.xml."""
        metric, unit = self.measurement.metric, self.measurement.unit
        figures = [(f"{metric} {place}", f"{value:g} {unit}") for place, value in self.measurement.values.items()]
        limit = f"{self.limit} ({self.limit.origin}: {self.limit.full_source})" if self.limit else "none"
        conditions = ", ".join(f"{name}={value}" for name, value in self.measurement.conditions.items())
        return [
            *figures,
            (f"{metric} conditions", conditions),
            (f"{metric} limit", limit),
            (f"{metric} state", f"{self.state}: {self.reason}" if self.reason else self.state),
        ]


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without those whose figures another check has shown already: they were measured once."""
    first: dict[object, Finding] = {}
    for finding in findings:
        first.setdefault(finding.shown, finding)
    return list(first.values())


def that_count(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without how far samples spread, which says how good a figure is and is none itself, and without
    what was measured again, since heavy load had held its GPU back."""
    return [finding for finding in findings if finding.measurement.metric != "spread" and not finding.again]


def by_check(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """The findings of each check."""
    return grouped((finding.check, finding) for finding in findings)
