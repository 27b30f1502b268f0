"""Limits, and measurements judged by them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal, get_args

from pytest_gpufleet.model.codec import Finite, about
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.language import Said, rounded
from pytest_gpufleet.model.metric import Measurement, Noise, SpreadRow, Tolerance
from pytest_gpufleet.model.place import Where, called, where

# How much a limit is worth: what was agreed; what machines known to be good reach; what somebody published, a gate of
# theirs or a part of a healthy machine's figure; the judgement of this project, or of the author of a profile; what
# physics allows, which finds what is broken and not what is a tenth slow.
Grade = Literal["contract", "calibrated", "published", "project", "physical"]
GRADES: tuple[Grade, ...] = get_args(Grade)  # the best first
IN_WORDS: dict[Grade, str] = {**dict(zip(GRADES, GRADES, strict=True)), "physical": "theoretical"}


@dataclass(frozen=True)
class Reference:
    """What healthy machines reach: the mean of so many. `noise`: what its line follows from, once it has one."""

    value: Finite
    machines: int = 1
    date: str = ""
    nccl: str = ""
    driver: str = ""
    noise: Noise | None = None


@dataclass(frozen=True)
class Limit:
    """A minimum or maximum (`sense`) of a metric, in its unit, where every one of `conditions` holds. With a
    `reference` it is the line that this machine's mean is held against, and before it is held against one, the
    reference itself; else a floor, which each place is held against."""

    metric: str
    sense: Literal["min", "max"]
    value: Annotated[Finite, about("In the unit of the finding.")]
    unit: str
    grade: Grade
    source: str
    conditions: Mapping[str, Condition]
    profile: str  # the file it stands in, by its name
    measured: Annotated[Finite | None, about("The healthy value that it was made from, in the same unit.")] = None
    given: Annotated[bool, about("Whether it is the customer's and not a shipped one.")] = False
    reference: Reference | None = None
    date: str = ""  # of a floor

    @property
    def healthy(self) -> float | None:
        return self.reference.value if self.reference else self.measured

    @property
    def origin(self) -> str:
        """How far it can be trusted, and whose it is if it is the customer's."""
        grade = IN_WORDS[self.grade]
        return f"{grade}, customer's limit from {self.profile}" if self.given else grade

    @property
    def full_source(self) -> str:
        """The source, and what part of which figure there the limit is."""
        if of := self.reference:
            machines = f"{of.machines} machine{'s' * (of.machines > 1)}"
            return f"{self.source}: {of.value:,g} {self.unit} is the mean of {machines}"
        part = f": {self.value / self.measured:.0%} of {self.measured:,g} {self.unit}" if self.measured else ""
        return self.source + part

    def met_by(self, value: float) -> bool:
        # Written so that NaN meets no limit.
        return value >= self.value if self.sense == "min" else value <= self.value

    def __str__(self) -> str:
        sign = "≥" if self.sense == "min" else "≤"
        return f"{sign} {rounded(self.value) if self.reference else f'{self.value:,g}'} {self.unit}"


@dataclass(frozen=True)
class Change:
    """A fact of a GPU model that a profile sets otherwise than the shipped one; `given` is None if it leaves it out."""

    file: str
    fact: str
    shipped: Finite
    given: Finite | None

    def __str__(self) -> str:
        whose = f"the given profile {self.file}"
        if self.given is None:
            return f"{whose} leaves out {self.fact} ({self.shipped:g})"
        verb = "lowers" if self.given < self.shipped else "raises"
        return f"{whose} {verb} {self.fact} from {self.shipped:g} to {self.given:g}"


@dataclass(frozen=True)
class KnownGood:
    """A run that limits were calibrated on, and the GPUs that it ran on."""

    run: str
    host: str
    utc: str
    uuids: tuple[str, ...]
    serials: tuple[str, ...]
    evidence_sha256: str

    def __str__(self) -> str:
        serials = ", ".join(self.serials) or "unknown"
        return f"{self.run} of {self.host}, {self.utc}, GPUs {serials}; SHA-256 of its evidence {self.evidence_sha256}"


@dataclass(frozen=True)
class GivenLimits:
    """What --fleet-profile gave, as evidence keeps it: the limits of that file; `facts`: all that hold with it."""

    file: str
    limits: tuple[Limit, ...]
    facts: Mapping[str, Finite]
    changes: tuple[Change, ...] = ()
    calibrated_on: tuple[KnownGood, ...] = ()
    spreads: tuple[SpreadRow, ...] = ()


State = Literal["met", "missed", "not judged", "for information"]


@dataclass(frozen=True)
class Finding:
    """A measurement and what it is held against. All else follows by verdict.judgement.held, and is not recorded:
    `missed` names the places that missed `limit`; `slower_than_peers` those that are worse than their peers by more
    than one of `tolerances` allows, with that fraction, and is None where none had peers enough. `reason` says in one
    sentence why it was not judged, or what missed. `required`: without a limit the verdict is incomplete."""

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

    def why(self) -> dict[Where, Said]:
        """Of each place that missed, how far it is off, and from what the line follows that it is held against."""
        measurement, limit, slow = self.measurement, self.limit, self.slower_than_peers or {}
        found: dict[Where, Said] = {}
        if limit and limit.value and (of := limit.reference) and of.noise:
            alike = [value for at, value in measurement.values.items() if at not in slow and math.isfinite(value)]
            mean, scale = fmean(alike) if alike else math.nan, 1.0 if limit.unit == "ratio" else abs(of.value)
            off, line = (abs(each - of.value) / scale for each in (mean, limit.value))
            machines = Said(MEAN_OF_ONE if of.machines == 1 else MEAN_OF, machines=of.machines)
            text = _words(Said("the mean of this machine"), off, machines, of.noise, line, limit.sense == "max")
            found = dict.fromkeys(self.missed, text) if alike and not limit.met_by(mean) else {}
        nodes = {part.node: f"node {part.node}" for at in measurement.values for part in at.parts}
        for place, share in slow.items():
            first = next((each for each in self.tolerances if each.noise and each.worse < share), None)
            if first and first.noise:
                higher = measurement.definition.better == "lower"
                found[place] = _words(called(place, nodes), share, Said("the others"), first.noise, first.worse, higher)
        return found

    def properties(self) -> list[tuple[str, str]]:
        metric, unit = self.measurement.metric, self.measurement.unit
        figures = [(f"{metric} {place}", f"{value:g} {unit}") for place, value in self.measurement.values.items()]
        limit = f"{self.limit} ({self.limit.origin}: {self.limit.full_source})" if self.limit else "none"
        conditions = ", ".join(f"{name}={value}" for name, value in self.measurement.conditions.items())
        state = f"{self.state}: {self.reason}" if self.reason else self.state
        named = {"conditions": conditions, "limit": limit, "state": state}
        return [*figures, *((f"{metric} {name}", text) for name, text in named.items())]


MEAN_OF, MEAN_OF_ONE = "what {machines} machines reach", "what one machine reached"
OFF = (
    "{place} is {share} % {side} {others}; healthy ones differ by {sd} % ({seen}); this run makes {count} such "
    "comparisons, so the line is at {line} %"
)


def _words(place: str, share: float, others: Said, noise: Noise, line: float, higher: bool) -> Said:
    seen = Said("{gpus} GPUs, {machines} machines", gpus=noise.gpus, machines=noise.machines)
    seen = seen if noise.gpus else Said("{machines} machines", machines=noise.machines)
    return Said(
        OFF, place=place, share=f"{100 * share:.1f}", side=Said("above" if higher else "below"), others=others,
        line=f"{100 * line:.1f}", sd=f"{100 * noise.sd:.2g}", seen=seen if noise.machines else Said("a default"),
        count=noise.comparisons,
    )  # fmt: skip


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without those whose figures another check has shown already: they were measured once."""
    first: dict[object, Finding] = {}
    for each in findings:
        of = each.measurement
        told_by = of.metric, each.state, frozenset(of.conditions.items()), frozenset(of.values.items())
        first.setdefault(told_by, each)
    return list(first.values())


def that_count(findings: Iterable[Finding]) -> list[Finding]:
    """Without how far samples spread, which is no figure itself, and without what was measured again."""
    return [finding for finding in findings if finding.measurement.metric != "spread" and not finding.again]
