"""What a figure is held against."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.metric import Noise, SpreadRow

# How much a limit is worth: what was agreed; what machines known to be good reach; what somebody published, a gate of
# theirs or a part of a healthy machine's figure; the judgement of this project, or of whoever gives a profile; what
# physics allows, which finds what is broken and not what is a tenth slow.
Grade = Literal["contract", "calibrated", "published", "project", "physical"]
GRADES: tuple[Grade, ...] = get_args(Grade)  # the best first
# As people read them; files and options have the grade itself.
IN_WORDS: dict[Grade, str] = {**dict(zip(GRADES, GRADES, strict=True)), "physical": "theoretical"}


@dataclass(frozen=True)
class Reference:
    """What healthy machines reach: the mean of so many, measured or published on `date`. `noise`: what the line below
    it follows from, once it is held against a machine."""

    value: Finite
    machines: int = 1
    date: str = ""
    nccl: str = ""
    driver: str = ""
    noise: Noise | None = None


@dataclass(frozen=True)
class Limit:
    """A minimum or maximum (`sense`) of a metric, in its unit, where every one of `conditions` holds.

    With a `reference` it is the line that this machine's mean is held against, and before it is held against one, the
    reference itself; else a floor, which each place is held against.
    `measured`: the healthy figure that a floor was made from, in the same unit, if it was made from one. `given`: it
    comes from a profile that the customer gave, and not from one of the shipped ones.
    """

    metric: str
    sense: Literal["min", "max"]
    value: Finite
    unit: str
    grade: Grade
    source: str
    conditions: Mapping[str, Condition]
    profile: str  # the file it stands in, by its name
    measured: Finite | None = None
    given: bool = False
    reference: Reference | None = None
    date: str = ""  # of a floor

    @property
    def healthy(self) -> float | None:
        """The healthy figure that it comes from, if it comes from one."""
        return self.reference.value if self.reference else self.measured

    @property
    def precedence(self) -> int:
        """Among limits for the same figure: the least one decides."""
        return GRADES.index(self.grade)

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
        if not self.measured:
            return self.source
        return f"{self.source}: {self.value / self.measured:.0%} of {self.measured:,g} {self.unit}"

    def met_by(self, value: float) -> bool:
        # Written so that NaN meets no limit.
        return value >= self.value if self.sense == "min" else value <= self.value

    def __str__(self) -> str:
        sign = "≥" if self.sense == "min" else "≤"
        return f"{sign} {self.value:,{'.4g' if self.reference else 'g'}} {self.unit}"


@dataclass(frozen=True)
class Change:
    """A fact of a GPU model that a profile sets otherwise than the shipped one; `given` is None if it leaves it out."""

    file: str
    fact: str
    shipped: Finite
    given: Finite | None

    def __str__(self) -> str:
        whose = f"the customer's profile {self.file}"
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
    """The limits that were given with --fleet-profile, as evidence keeps them: those of the file itself, in its order.
    `facts`: all that hold with it."""

    file: str
    limits: tuple[Limit, ...]
    facts: Mapping[str, Finite]
    changes: tuple[Change, ...] = ()
    calibrated_on: tuple[KnownGood, ...] = ()
    spreads: tuple[SpreadRow, ...] = ()

    def calibrated_among(self, gpus: Iterable[Gpu]) -> list[Gpu]:
        """Those of these GPUs that its limits were measured on."""
        known = {name for run in self.calibrated_on for name in (*run.uuids, *run.serials)}
        return [gpu for gpu in gpus if gpu.uuid in known or gpu.serial in known]
