"""Profiles: what is known of a GPU model, and the limits it is held against."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.conditions import CONDITIONS, Condition
from pytest_gpufleet.model.finding import GRADES, KnownGood, Limit, Reference
from pytest_gpufleet.model.metric import EXTRAORDINARY, MEASURED_UNDER, METRICS, Measurement, Metric, SpreadRow, fits
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.noise import Spread, pooled
from pytest_gpufleet.verdict.toml_table import FileError, Table, Text, table_type

Sense = Literal["min", "max"]
# The sense that fits a metric, and the one that does not.
SENSES: dict[str, tuple[Sense, Sense]] = {"higher": ("min", "max"), "lower": ("max", "min")}

EVERY_GPU = "every-gpu.toml"
_BYTE_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MOST = sys.float_info.max

# What may stand in the file.
Texts = Annotated[list[Text], Meta(description="a list of texts that are not empty")]
_EXACT = "a list of the names that NVML gives such GPUs, exactly, or left out if it extends one"
Names = Annotated[list[Text], Meta(min_length=1, description=_EXACT)]
Source = Annotated[Text, Meta(description="a text that is not empty and says where the value can be looked up")]
Positive = Annotated[float, Meta(gt=0, le=_MOST, description="a positive number")]
Fraction = Annotated[float, Meta(ge=0, le=1, description="a fraction from 0 to 1, where 0.005 is 0.5 %")]
Ratio = Annotated[float, Meta(gt=0, le=1, description="a ratio from 0 to 1, where 0.95 is 95 %")]
_DATE = r"^\d{4}(-\d\d(-\d\d)?)?$"
Date = Annotated[str, Meta(pattern=_DATE, description='the date of the measurement or publication, like "2026-11-21"')]
Whole = Annotated[int, Meta(ge=1, description="a positive whole number")]
Switch = Annotated[bool, Meta(description="true or false")]
Bytes = Annotated[
    Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern="^0*[1-9][0-9]* ?(KiB|MiB|GiB)$")],
    Meta(description='a positive whole number of bytes, KiB, MiB or GiB, like "8 GiB"'),
]
AnyCondition = Annotated[str | bool | int | Finite, Meta(description="a text, a number, true or false")]
When = dict[str, AnyCondition]

Written = Literal["contract", "calibrated", "published", "project"]  # nobody writes down what physics allows

# Figures of the data sheet, and what each of them is. A fact is left out where the GPU has no such thing, or where
# nobody says.
FACTS = {
    "memory_gigabytes": "GB",
    "power_watts": "the default power limit",
    "pcie_generation": "of a link with 16 lanes",
    "pcie_width": "lanes, of machines that were ordered with fewer than the GPU has",
    "nvlinks": "0: it has none",
    "nvlink_gigabytes_per_second": "GB/s in one direction, all NVLinks of one GPU together",
    "hbm_terabytes_per_second": "TB/s of its memory, of whatever kind",
    "peak_tflops_fp64": "TFLOP/s; with tensor cores, where they do fp64",
    "peak_tflops_fp32": "TFLOP/s without tensor cores",
    "peak_tflops_tf32": "TFLOP/s, dense",
    "peak_tflops_fp16": "TFLOP/s, dense",
    "peak_tflops_bf16": "TFLOP/s, dense",
    "peak_tflops_fp8": "TFLOP/s, dense",
}
# Zero is a fact too: a card without NVLink.
_FACTS = {key: Annotated[float, Meta(ge=0, le=_MOST, description=f"a number ({what})")] for key, what in FACTS.items()}
_RUN = {each.name: Texts if each.name in ("uuids", "serials") else Text for each in fields(KnownGood)}
RunTable = table_type("KnownGood", _RUN)
MetricTable = table_type("OwnMetric", {"unit": Text, "better": Literal["higher", "lower"], "title": Text})
# What healthy machines reach, in place of a minimum or maximum; and when, by which versions.
_REFERENCE = {"reference": Positive, "machines": Whole, "date": Date, "nccl": Text, "driver": Text}
_STATED = {"min": Positive, "max": Positive, "unit": Text, "grade": Written, "source": Source, "measured": Positive}
# Of any metric: which one it is decides what else must stand in it, see limit_of.
LimitTable = table_type("Limit", {"metric": Text}, {**_STATED, **_REFERENCE, "when": When})
_SEEN = {"within": Fraction, "between": Fraction, "machines": Whole, "gpus": Whole, "matters": Ratio, "date": Date}
SpreadTable = table_type("Spread", {"metric": Text, "source": Source}, {**_SEEN, "when": When})
ProfileTable = table_type(
    "Profile",
    {"name": Annotated[Text, Meta(description="a text that is not empty; the report shows it")]},
    {
        "match": Names,
        "extends": Text,
        "facts": table_type("Facts", {}, _FACTS),
        "metric": dict[Text, MetricTable],  # type: ignore[valid-type]
        "limit": list[LimitTable],  # type: ignore[valid-type]
        "spread": list[SpreadTable],  # type: ignore[valid-type]
        "calibrated_on": list[RunTable],  # type: ignore[valid-type]
    },
)


@cache
def limit_of(metric: Metric) -> type[msgspec.Struct]:
    """The type of a limit for this metric. Authors know themselves what a metric of theirs is measured under."""
    value = Ratio if metric.unit == "ratio" else Positive
    stated = {**_REFERENCE, **dict.fromkeys((SENSES[metric.better][0], "reference"), value)}
    required = {"unit": Literal[metric.unit], "grade": Written, "source": Source}
    stated |= {"measured": Positive, "when": _when(metric)}
    return table_type(metric.name, {"metric": Literal[metric.name], **required}, stated)


@cache
def _when(metric: Metric) -> Any:
    if metric.name not in MEASURED_UNDER:
        return When
    types: dict[str, Any] = {"bytes": Bytes}
    for key in MEASURED_UNDER[metric.name]:
        expected = CONDITIONS[key].values
        of_text = Switch if expected is bool else Text if expected is str else Whole
        types.setdefault(key, Literal[expected] if isinstance(expected, tuple) else of_text)
    return table_type(f"{metric.name}_when", {}, {key: types[key] for key in MEASURED_UNDER[metric.name]})


def limits(top: Table, metrics: Mapping[str, Metric], *, given: bool) -> tuple[Limit, ...]:
    """FileError if two could hold for one measurement, with nothing to choose between them."""
    tables = top.tables("limit")
    found = [_limit(table, metrics, given) for table in tables]
    for (one, table), (other, other_table) in combinations(zip(found, tables, strict=True), 2):
        alike = [(each.metric, each.grade, len(each.conditions)) for each in (one, other)]
        shared = one.conditions.keys() & other.conditions.keys()
        if alike[0] == alike[1] and all(one.conditions[key] == other.conditions[key] for key in shared):
            line = f" (line {table.line()})" if table.line() != other_table.line() else ""
            both = f"this one and limit {table.way[-1]}{line} can both hold for one {one.metric} and neither is more "
            raise other_table.error(f'{both}specific; add a condition to the "when" of one of them.')
    return tuple(found)


def _limit(table: Table, metrics: Mapping[str, Metric], given: bool) -> Limit:
    values, metric = table.values, metrics[table.choice("metric", metrics)]
    sense, wrong = SENSES[metric.better]
    if wrong in values:
        why = f'"{wrong}" does not fit {metric.name}, where {metric.better} is better; write only "{sense}".'
        raise table.error(why, wrong)
    table.check(limit_of(metric))
    stated = [key for key in (sense, "reference") if key in values]
    if not stated:
        raise table.error(f'"{sense}" is missing; add it, or a "reference".')
    if len(stated) > 1:
        raise table.error(f'"{sense}" and "reference" cannot both be; leave out one of them.', "reference")
    value, reference = float(values[stated[0]]), None
    of = {key: values[key] for key in ("machines", "nccl", "driver") if key in values}
    if stated == ["reference"]:
        reference = Reference(value, date=values.get("date", ""), **of)
    elif extra := next(iter(of), ""):
        raise table.error(f'"{extra}" says of what a "reference" is the mean; a limit with "{sense}" has none.', extra)
    return Limit(
        metric.name, sense, value, metric.unit, values["grade"], values["source"], _conditions(table.table("when")),
        table.path.name, values.get("measured"), given, reference, "" if reference else values.get("date", ""),
    )  # fmt: skip


def _spread(table: Table, metrics: Mapping[str, Metric]) -> SpreadRow:
    metric, when = metrics[table.choice("metric", metrics)], table.table("when")
    if metric.name in MEASURED_UNDER:
        when.check(_when(metric))
    seen = {key: value for key, value in table.values.items() if key != "when"}
    row = SpreadRow(**seen, conditions=_conditions(when))
    if table.path.name == EVERY_GPU:  # the defaults, which count as much as so many machines
        return row
    if not any(default.metric == metric.name for default in of_every_gpu().spreads):
        raise table.error(f"{metric.name} has a fixed tolerance, which no spread can change; take it out.")
    if row.within is not None and row.gpus <= row.machines:
        raise table.error('"within" needs "machines" and "gpus", more of these: say on how many it was seen.')
    if row.between is not None and row.machines < 2:
        raise table.error('"between" needs "machines", two or more: say on how many it was seen.')
    return row


def _conditions(when: Table) -> dict[str, Condition]:
    """What a limit holds under, with the count of bytes as a number."""
    if not isinstance(size := when.values.get("bytes"), str):
        return dict(when.values)
    when.check_key("bytes", Bytes)
    size = size.rstrip()  # the pattern lets the end of a line through
    return {**when.values, "bytes": int(size[:-3]) * _BYTE_UNITS[size[-3:]]}


_HERE = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Profile:
    """One GPU model. Where nobody published a limit there is none: unknown stays unknown."""

    name: str
    match: tuple[str, ...]  # the exact names that NVML gives it
    facts: Mapping[str, float]  # of the data sheet; the unit is in the name
    limits: tuple[Limit, ...]
    path: Path
    base: "Profile | None" = None  # whose limits hold where these say nothing
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # all that its limits may be for
    calibrated_on: tuple[KnownGood, ...] = ()  # the runs that they come from, if `gpufleet calibrate` wrote them
    spreads: tuple[SpreadRow, ...] = ()  # by how much healthy ones of it differ

    @property
    def layers(self) -> "list[Profile]":
        """This profile and all that it builds on, itself first."""
        return [self, *(self.base.layers if self.base else ())]

    def limit_for(self, measurement: Measurement, fabric: str = "", part: str = "") -> Limit | None:
        """The limit that decides, of those whose every condition was measured so, on a machine whose GPUs `fabric`
        connects and whose boards all have the number `part`. FileError if the figure is in another unit or better in
        another direction than the profile says, whether a limit holds for it or not: in a rehearsal none may."""
        metric = measurement.definition
        known = self.metrics.get(metric.name, metric)
        if (known.unit, known.better) != (metric.unit, metric.better):
            was = f"{metric.name} was measured in {metric.unit}, where {metric.better} is better"
            has = f"by {self.path.name} it is in {known.unit}, and {known.better} is better"
            raise FileError(f"{was}, but {has}; make the two the same.")
        # The one of the best grade; of several one of the profile's own, however specific; of these the most specific.
        found = [
            (GRADES.index(limit.grade), number, -len(limit.conditions), limit)
            for number, each in enumerate(self.layers)
            for limit in each.limits
            if holds(limit, measurement, fabric, part)
        ]
        return min(found, key=lambda one: one[:3])[-1] if found else self._of_both(measurement, fabric, part)

    def _of_both(self, measurement: Measurement, fabric: str, part: str) -> Limit | None:
        """Of the geometric mean of copy and triad: the mean of their limits, as good as the worse of these. Where one
        is a floor and the other a reference, as with a contract about copy alone, what the base says of both."""
        operation, under = str(measurement.conditions.get("operation")), measurement.conditions
        each = [{**under, "operation": name} for name in operation.split(" and ") if name != operation]
        limits = [self.limit_for(replace(measurement, conditions=one), fabric, part) for one in each]
        of_each = [limit for limit in limits if limit]
        references = [limit.reference for limit in of_each if limit.reference]
        if len(references) not in (0, len(each)):
            return self.base._of_both(measurement, fabric, part) if self.base else None
        if not each or len(of_each) < len(each):
            return None
        worse = max(of_each, key=lambda limit: GRADES.index(limit.grade))
        source = "; ".join(f"{limit.conditions['operation']} {limit}, {limit.full_source}" for limit in of_each)
        conditions = {**worse.conditions, "operation": operation}
        value = geometric_mean(limit.value for limit in of_each)
        of = replace(min(references, key=lambda one: one.machines), value=value) if references else None
        return replace(worse, value=value, source=source, conditions=conditions, measured=None, reference=of)

    def spread_for(self, measurement: Measurement, fabric: str = "", part: str = "") -> Spread:
        """What was seen of this model, pooled with the default. `part`: where the reference is of boards with it."""
        metric, under = measurement.metric, {"fabric": fabric, **measurement.conditions}
        default = _most_specific(of_every_gpu().spreads, metric, {**under, **({"part": SAME} if part else {})})
        if default is None:
            tolerance = measurement.definition.peer_tolerance
            return Spread(0, 0, matters=OF_THE_HOST.get(metric, TOLERANCE) if tolerance is None else tolerance)
        under = {**under, **({"part": part} if part else {})}
        within, between = (self._seen(name, metric, under) for name in ("within", "between"))
        spread = Spread(default.within or 0.0, default.between or 0.0, matters=default.matters or 0.0)
        if within:
            sd, df = pooled(spread.within, within.within or 0.0, within.gpus - within.machines)
            spread = replace(spread, within=sd, within_df=df)
        if between:
            sd, df = pooled(spread.between, between.between or 0.0, between.machines - 1)
            spread = replace(spread, between=sd, between_df=df)
        return replace(spread, seen=(within or default, between or default))

    def _seen(self, which: str, metric: str, under: Mapping[str, Condition]) -> SpreadRow | None:
        """The most specific row of this profile, else of its base, that says so much. A default was seen on none."""
        rows = ([row for row in one.spreads if row.machines and getattr(row, which) is not None] for one in self.layers)
        return next(filter(None, (_most_specific(each, metric, under) for each in rows)), None)


# Where a metric has neither a default spread nor a tolerance of its own.
TOLERANCE = 0.03
# Here hosts have a share: data loaders of three healthy hosts of 4x NVIDIA H200 were 10.6 % apart, latencies
# without a CUDA graph by half; of those from a graph nobody has seen two machines.
OF_THE_HOST = {"collective_latency": 0.2, "loader_throughput": 0.2}
# In a default spread: where the reference is of boards of the same part number as these.
SAME = "same"


def _most_specific(rows: Iterable[SpreadRow], metric: str, under: Mapping[str, Condition]) -> SpreadRow | None:
    return max((row for row in rows if fits(row, under, metric)), key=lambda row: len(row.conditions), default=None)


def holds(limit: Limit, measurement: Measurement, fabric: str, part: str = "") -> bool:
    """Whether a limit is for this metric, and every one of its conditions was measured so."""
    measured = {"fabric": fabric, "part": part, **measurement.conditions}
    return (
        limit.metric == measurement.metric
        and all(measured.get(key) == value for key, value in limit.conditions.items())
        and all(key in limit.conditions for key in EXTRAORDINARY if key in measured)
    )


@cache
def shipped() -> tuple[Profile, ...]:
    """The profiles that come with this package, one a GPU model."""
    return tuple(load(path, given=False) for path in sorted(set(_HERE.glob("*.toml")) - {_HERE / EVERY_GPU}))


@cache
def of_every_gpu() -> Profile:
    """What is asked of GPUs of every model, also of those that no shipped profile is for."""
    return load(_HERE / EVERY_GPU, given=False)


def for_gpu(name: str) -> Profile | None:
    """The shipped profile for a GPU, by the exact name that NVML gives, since limits of one model fail or flatter
    another: "NVIDIA H100 NVL" has fewer links than "NVIDIA H100 80GB HBM3". None for an unknown model."""
    return next((profile for profile in shipped() if name in profile.match), None)


def choose(path: Path | None, gpu_names: Iterable[str]) -> Profile | None:
    """The profile for GPUs of these names: in the file `path`, else the shipped one, which none is for several models,
    else that of every GPU; None without GPUs. FileError if the file is bad or not for all of these GPUs."""
    names = sorted(set(gpu_names))
    if path is None:
        known = for_gpu(names[0]) if len(names) == 1 else None
        return known or (of_every_gpu() if names else None)
    given = load(path)
    if strangers := [name for name in names if name not in given.match]:
        others = f"is for {', '.join(given.match)}, but this machine has {', '.join(strangers)}"
        raise FileError(f'{path}: {others}; add the name to "match", or give the profile of that GPU.')
    return given


def load(path: Path, *, given: bool = True) -> Profile:
    """Read a customer's profile from a TOML file and check all of it. Raises FileError for a file that cannot be read,
    an unknown key, a limit without unit, grade or source, a value in the wrong unit or sense, or two limits of which
    neither is more specific: a typing error in a profile must not let a machine pass."""
    top = toml_table.read(path)
    top.check(ProfileTable)
    values, by_name = top.values, {profile.name: profile for profile in (shipped() if given else ())}
    base = None if path == _HERE / EVERY_GPU else of_every_gpu()
    base = by_name[top.choice("extends", by_name)] if "extends" in values else base
    match = tuple(values.get("match", base.match if base else ()))
    metrics = {name: METRICS[name] for name in MEASURED_UNDER}  # the suite's, and those declared for own checks
    for name, own in values.get("metric", {}).items():
        if name in METRICS:
            raise top.table("metric").error(f'"{name}" is a metric already; give yours another name.', name)
        metrics[name] = Metric(name, **own)
    if given and not match:
        raise FileError(f'{path}: "match" is missing; list the names that NVML gives such GPUs, or extend a profile.')
    return Profile(
        name=values["name"],
        match=match,
        facts={**(base.facts if base else {}), **values.get("facts", {})},
        limits=limits(top, metrics, given=given),
        path=path,
        base=base,
        metrics=metrics,
        spreads=tuple(_spread(table, metrics) for table in top.tables("spread")),
        calibrated_on=tuple(msgspec.convert(run, KnownGood) for run in values.get("calibrated_on", ())),
    )
