"""What may stand in the file of a profile, and what it means."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import combinations
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.conditions import CONDITIONS
from pytest_gpufleet.model.limit import Calibration, KnownGood, Limit
from pytest_gpufleet.model.metric import METRICS, Condition, GiB, KiB, Metric, MiB
from pytest_gpufleet.model.tolerance import Reference, Tolerance, Within
from pytest_gpufleet.model.vocabulary import FACTS, MEASURED_UNDER
from pytest_gpufleet.verdict.toml_table import Table, table_type

Sense = Literal["min", "max"]
# The sense that fits a metric, and the one that does not.
SENSES: dict[str, tuple[Sense, Sense]] = {"higher": ("min", "max"), "lower": ("max", "min")}

_BYTE_UNITS = {"KiB": KiB, "MiB": MiB, "GiB": GiB}
_MOST = sys.float_info.max


# What may stand in the file: the loader and the JSON Schema both go by these types. An error says that a value must be
# what the description of its type says.
Text = Annotated[str, Meta(pattern=r"\S", description="a text that is not empty")]
Texts = Annotated[list[Text], Meta(description="a list of texts that are not empty")]
Names = Annotated[
    list[Text],
    Meta(
        min_length=1,
        description="a list of the names that NVML gives such GPUs, exactly, or left out if it extends one",
    ),
]
Source = Annotated[Text, Meta(description="a text that is not empty and says where the value can be looked up")]
Positive = Annotated[float, Meta(gt=0, le=_MOST, description="a positive number")]
NotNegative = Annotated[float, Meta(ge=0, le=_MOST, description="a number that is not negative")]
Ratio = Annotated[float, Meta(gt=0, le=1, description="a ratio from 0 to 1, where 0.95 is 95 %")]
Whole = Annotated[int, Meta(ge=1, description="a positive whole number")]
Switch = Annotated[bool, Meta(description="true or false")]
Bytes = Annotated[
    Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern="^0*[1-9][0-9]* ?(KiB|MiB|GiB)$")],
    Meta(description='a positive whole number of bytes, KiB, MiB or GiB, like "8 GiB"'),
]
AnyCondition = Annotated[str | bool | int | Finite, Meta(description="a text, a number, true or false")]
When = dict[str, AnyCondition]

Written = Literal["contract", "calibrated", "published", "project"]  # nobody writes down what physics allows

# Zero is a fact too: a card without NVLink.
_FACTS = {key: Annotated[float, Meta(ge=0, le=_MOST, description=f"a number ({what})")] for key, what in FACTS.items()}
_RUN = {each.name: Texts if each.name in ("uuids", "serials") else Text for each in fields(KnownGood)}
RunTable = table_type("KnownGood", _RUN)
CalibrationTable = table_type(
    "Calibration", {"runs": Whole, "machines": Whole, "gpus": Whole, "s": NotNegative}, {"k": Positive}
)
MetricTable = table_type("OwnMetric", {"unit": Text, "better": Literal["higher", "lower"], "title": Text})
# Of any metric: which one it is decides what else must stand in it, see limit_of.
LimitTable = table_type(
    "Limit",
    {"metric": Text},
    {
        "min": Positive,
        "max": Positive,
        "unit": Text,
        "grade": Written,
        "source": Source,
        "measured": Positive,
        "weak": Switch,
        "calibration": CalibrationTable,
        "when": When,
    },
)
ToleranceTable = table_type(
    "Tolerance",
    {"metric": Text, "worse": Ratio, "source": Source},
    {"reference": Reference, "within": Within, "per_kelvin": Ratio, "when": When},
)
ProfileTable = table_type(
    "Profile",
    {"name": Annotated[Text, Meta(description="a text that is not empty; the report shows it")]},
    {
        "match": Names,
        "extends": Text,
        "facts": table_type("Facts", {}, _FACTS),
        "metric": dict[Text, MetricTable],  # type: ignore[valid-type]
        "limit": list[LimitTable],  # type: ignore[valid-type]
        "tolerance": list[ToleranceTable],  # type: ignore[valid-type]
        "calibrated_on": list[RunTable],  # type: ignore[valid-type]
    },
)


@cache
def limit_of(metric: Metric) -> type[msgspec.Struct]:
    """The type of a limit for this metric. Authors know themselves what a metric of theirs is measured under."""
    value = Ratio if metric.unit == "ratio" else Positive
    required = {SENSES[metric.better][0]: value, "unit": Literal[metric.unit], "grade": Written, "source": Source}
    optional = {"measured": Positive, "weak": Switch, "calibration": CalibrationTable, "when": _when(metric)}
    return table_type(metric.name, {"metric": Literal[metric.name], **required}, optional)


@cache
def _when(metric: Metric) -> Any:
    if metric.name not in MEASURED_UNDER:
        return When
    return table_type(f"{metric.name}_when", {}, {key: _condition(key) for key in MEASURED_UNDER[metric.name]})


def _condition(key: str) -> Any:
    expected = CONDITIONS[key].values
    if isinstance(expected, tuple):
        return Literal[expected]
    if expected is bool:
        return Switch
    return Bytes if key == "bytes" else Whole


def metrics(top: Table) -> dict[str, Metric]:
    """All that limits of this file may be for: the suite's, and those that it declares for checks of its author's."""
    known = {name: METRICS[name] for name in MEASURED_UNDER}
    for name, own in top.values.get("metric", {}).items():
        if name in METRICS:
            raise top.table("metric").error(f'"{name}" is a metric already; give yours another name.', name)
        known[name] = Metric(name, **own)
    return known


def limits(top: Table, metrics: Mapping[str, Metric], *, given: bool) -> tuple[Limit, ...]:
    tables = top.tables("limit")
    found = [_limit(table, metrics, given) for table in tables]
    for (one, table), (other, other_table) in combinations(zip(found, tables, strict=True), 2):
        if _collide(one, other):
            line = f" (line {table.line()})" if table.line() != other_table.line() else ""
            raise other_table.error(
                f"this one and limit {table.way[-1]}{line} can both hold for one {one.metric} and neither is more "
                'specific; add a condition to the "when" of one of them.'
            )
    return tuple(found)


def _limit(table: Table, metrics: Mapping[str, Metric], given: bool) -> Limit:
    values, when = table.values, table.table("when")
    metric = metrics[table.choice("metric", metrics)]
    sense, wrong = SENSES[metric.better]
    if wrong in values:
        raise table.error(
            f'"{wrong}" does not fit {metric.name}, where {metric.better} is better; write only "{sense}".', wrong
        )
    _check_conditions(metric, when)
    table.check(limit_of(metric))
    return Limit(
        metric=metric.name,
        sense=sense,
        value=float(values[sense]),
        unit=metric.unit,
        grade=values["grade"],
        source=values["source"],
        conditions=_conditions(when),
        profile=table.path.name,
        measured=values.get("measured"),
        weak=values.get("weak", False),
        given=given,
        calibration=Calibration(**values["calibration"]) if "calibration" in values else None,
    )


def tolerances(top: Table, metrics: Mapping[str, Metric]) -> tuple[Tolerance, ...]:
    return tuple(_tolerance(table, metrics) for table in top.tables("tolerance"))


def _tolerance(table: Table, metrics: Mapping[str, Metric]) -> Tolerance:
    metric, when = metrics[table.choice("metric", metrics)], table.table("when")
    _check_conditions(metric, when)
    if metric.name in MEASURED_UNDER:
        when.check(_when(metric))
    given = {key: value for key, value in table.values.items() if key != "when"}
    return Tolerance(**given, conditions=_conditions(when))


def _check_conditions(metric: Metric, when: Table) -> None:
    known = MEASURED_UNDER.get(metric.name, when.values)
    for key in when.values:
        if key in CONDITIONS and key not in known:
            under = " and ".join(known) or "no condition"
            raise when.error(f'{metric.name} is not measured under "{key}", only under {under}; take it out.', key)


def _conditions(when: Table) -> dict[str, Condition]:
    """What a limit holds under, with the count of bytes as a number."""
    if not isinstance(size := when.values.get("bytes"), str):
        return dict(when.values)
    when.check_key("bytes", Bytes)
    size = size.rstrip()  # the pattern lets the end of a line through
    return {**when.values, "bytes": int(size[:-3]) * _BYTE_UNITS[size[-3:]]}


def _collide(one: Limit, other: Limit) -> bool:
    """Whether both could hold for one measurement, with nothing to choose between them."""
    shared = one.conditions.keys() & other.conditions.keys()
    return (
        one.metric == other.metric
        and one.grade == other.grade
        and len(one.conditions) == len(other.conditions)
        and all(one.conditions[key] == other.conditions[key] for key in shared)
    )
