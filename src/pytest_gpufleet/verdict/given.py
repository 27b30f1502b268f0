"""The profile that somebody gave for a run, as its evidence keeps it, and what is to be told of it beside a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpufleet.hardware.topology import Gpu
from pytest_gpufleet.probes.reading import METRICS
from pytest_gpufleet.verdict.finding import Finding, Limit
from pytest_gpufleet.verdict.profile import Profile, for_gpu, holds
from pytest_gpufleet.verdict.profile_file import KnownGood

if TYPE_CHECKING:
    from pytest_gpufleet.verdict.evidence import Record

NOT_APPLIED = "a limit of the contract was never applied, since no figure was measured under its conditions"


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


def as_given(profile: Profile, models: Iterable[str]) -> Given:
    """What evidence has to keep of a profile that was given for GPUs of these models."""
    shipped = [model.facts for name in sorted(set(models)) if (model := for_gpu(name))]
    if not shipped and profile.base:
        shipped = [profile.base.facts]
    changes = {
        Change(profile.path.name, fact, value, profile.facts.get(fact)): None
        for facts in shipped
        for fact, value in facts.items()
        if profile.facts.get(fact) != value
    }
    return Given(profile.path.name, profile.limits, profile.facts, tuple(changes), profile.calibrated_on)


def instead(new: Given | None, before: Given | None) -> Given | None:
    """What is to be told where recorded figures are held against another profile: the facts that the run's own profile
    changed still stand behind its checks."""
    if new is None or before is None:
        return new or (replace(before, limits=(), calibrated_on=()) if before else None)
    return replace(new, changes=tuple(dict.fromkeys((*new.changes, *before.changes))))


def described(number: int, limit: Limit) -> str:
    """ "limit 3, bus bandwidth ≥ 460 GB/s with collective=all_reduce, ranks=8" """
    title = METRICS[limit.metric].title if limit.metric in METRICS else limit.metric
    when = ", ".join(f"{key}={value}" for key, value in limit.conditions.items())
    return f"limit {number}, {title} {limit}" + (f" with {when}" if when else "")


def unused_limits(record: Record, kind: str = "") -> list[str]:
    """The limits of the given profile that were never applied, in words: those of this kind, or of all others than
    contract."""
    if record.profile is None:
        return []
    unused = record.profile.unused(record.findings, record.topology.fabric)
    return [
        f"{record.profile.file}: {described(number, limit)}"
        for number, limit in unused
        if (limit.kind == kind if kind else limit.kind != "contract")
    ]


def own_limits(record: Record) -> str:
    """Whether a machine is held against what it did itself; empty if it is not."""
    own = record.profile.calibrated_among(record.topology.gpus) if record.profile else []
    if record.profile is None or not own:
        return ""
    gpus = ", ".join(f"GPU {gpu.index} (serial {gpu.serial or 'unknown'})" for gpu in own)
    return (
        f"the limits come from this very machine: {record.profile.file} was calibrated on {gpus}, so meeting them says "
        "nothing about it"
    )


def remarks_on(record: Record) -> list[str]:
    """What a verdict has to tell of the given profile, and what changes nothing about it."""
    if record.profile is None:
        return []
    told = list(map(str, record.profile.changes))
    if others := len(unused_limits(record)):
        limits = "1 limit" if others == 1 else f"{others} limits"
        told.append(f"{limits} of the customer's profile {record.profile.file} held for no figure of this run")
    return told
