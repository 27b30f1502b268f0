"""What may stand in the file of a profile, and what it means."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, cast

from pytest_gpufleet.model.conditions import CONDITIONS
from pytest_gpufleet.model.limit import Kind, KnownGood, Limit
from pytest_gpufleet.model.metric import METRICS, Condition, GiB, KiB, Metric, MiB
from pytest_gpufleet.model.vocabulary import (
    FACTS,
    KEYS,
    KINDS,
    KNOWN_GOOD_KEYS,
    LIMIT_KEYS,
    MEASURED_UNDER,
    METRIC_KEYS,
)
from pytest_gpufleet.verdict.profiles import profile_table
from pytest_gpufleet.verdict.profiles.profile_table import Table

Sense = Literal["min", "max"]
# The sense that fits a metric, and the one that does not.
SENSES: dict[str, tuple[Sense, Sense]] = {"higher": ("min", "max"), "lower": ("max", "min")}

_TYPE_NAMES = {int: "a positive whole number", bool: "true or false"}
_BYTE_UNITS = {"KiB": KiB, "MiB": MiB, "GiB": GiB}


@dataclass(frozen=True)
class ProfileFile:
    """What one file says, after all of it was checked. `match` and `extends` are empty where they are left out."""

    name: str
    match: tuple[str, ...]
    facts: Mapping[str, float]
    limits: tuple[Limit, ...]
    metrics: Mapping[str, Metric]
    calibrated_on: tuple[KnownGood, ...]
    extends: str


def read(path: Path, bases: Sequence[str], *, contract: bool) -> ProfileFile:
    """Read a profile and check all of it: a typing error must not let a machine pass. ProfileError names the line.

    `bases`: the names of profiles that it may extend. `contract`: its limits are the customer's.
    """
    top = profile_table.read(path)
    top.check_keys(KEYS)
    name = top.text("name")
    extends = top.choice("extends", bases) if "extends" in top.values else ""
    match = _match(top) if "match" in top.values else ()
    metrics = {name: METRICS[name] for name in MEASURED_UNDER} | _metrics(top.table("metric"))
    facts, limits = _facts(top.table("facts")), _limits(top, metrics, contract)
    known_good = tuple(_known_good(table) for table in top.tables("calibrated_on"))
    return ProfileFile(name, match, facts, limits, metrics, known_good, extends)


def _match(top: Table) -> tuple[str, ...]:
    names = top.values["match"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise top.error('"match" must be a list of the exact names that NVML gives such a GPU.', "match")
    return tuple(names)


def _facts(table: Table) -> dict[str, float]:
    table.check_keys(FACTS)
    for key, value in table.values.items():
        # Zero is a fact too: a card without NVLink.
        if not _is_number(value) or not 0 <= value <= sys.float_info.max:
            raise table.error(f'"{key}" must be a number, not {value!r}.', key)
    return dict(table.values)


def _known_good(table: Table) -> KnownGood:
    table.check_keys(KNOWN_GOOD_KEYS)
    texts = {key: table.text(key) for key in ("run", "host", "utc", "evidence_sha256")}
    return KnownGood(uuids=_texts(table, "uuids"), serials=_texts(table, "serials"), **texts)


def _texts(table: Table, key: str) -> tuple[str, ...]:
    values = table.required(key)
    if not isinstance(values, list) or not all(isinstance(value, str) and value.strip() for value in values):
        raise table.error(f'"{key}" must be a list of texts, not {values!r}.', key)
    return tuple(values)


def _metrics(table: Table) -> dict[str, Metric]:
    """The metrics that the file declares, for figures of its author's own checks."""
    metrics = {}
    for name in table.values:
        if name in METRICS:
            raise table.error(f'"{name}" is a metric already; give yours another name.', name)
        one = table.table(name)
        one.check_keys(METRIC_KEYS)
        better = cast(Literal["higher", "lower"], one.choice("better", SENSES))
        metrics[name] = Metric(name, one.text("unit"), better, one.text("title"))
    return metrics


def _limits(top: Table, metrics: Mapping[str, Metric], contract: bool) -> tuple[Limit, ...]:
    tables = top.tables("limit")
    limits = [_limit(table, metrics, contract) for table in tables]
    for (one, table), (other, other_table) in combinations(zip(limits, tables, strict=True), 2):
        if _collide(one, other):
            line = f" (line {table.line()})" if table.line() != other_table.line() else ""
            raise other_table.error(
                f"this one and limit {table.way[-1]}{line} can both hold for one {one.metric} and neither is more "
                'specific; add a condition to the "when" of one of them.'
            )
    return tuple(limits)


def _limit(table: Table, metrics: Mapping[str, Metric], contract: bool) -> Limit:
    table.check_keys(LIMIT_KEYS)
    metric = metrics[table.choice("metric", metrics)]
    sense, wrong = SENSES[metric.better]
    if wrong in table.values:
        raise table.error(
            f'"{wrong}" does not fit {metric.name}, where {metric.better} is better; write only "{sense}".', wrong
        )
    value = table.required(sense)
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise table.error(f'"{sense}" must be a positive number of {metric.unit}, not {value!r}.', sense)
    if metric.unit == "ratio" and value > 1:
        raise table.error(f'"{sense}" of {metric.name} is a ratio from 0 to 1, not {value!r}; 0.95 is 95 %.', sense)
    return Limit(
        metric=metric.name,
        sense=sense,
        value=float(value),
        unit=table.choice("unit", (metric.unit,)),
        kind=cast(Kind, table.choice("kind", KINDS)),
        source=table.text("source"),
        conditions=_when(table.table("when"), metric.name),
        profile=table.path.name,
        contract=contract,
    )


def _when(table: Table, metric: str) -> dict[str, Condition]:
    known = MEASURED_UNDER.get(metric)
    if known is None:  # a metric of the file's author, who knows what it is measured under
        return {key: _any_condition(table, key) for key in table.values}
    for key in table.values:
        if key in CONDITIONS and key not in known:
            under = " and ".join(known) or "no condition"
            raise table.error(f'{metric} is not measured under "{key}", only under {under}; take it out.', key)
    table.check_keys(known)
    return {key: _condition(table, key) for key in table.values}


def _any_condition(table: Table, key: str) -> Condition:
    value: Any = table.values[key]
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise table.error(f'"{key}" must be a text, a number, true or false, not {value!r}.', key)
    return _byte_count(table, value) if key == "bytes" and isinstance(value, str) else value


def _condition(table: Table, key: str) -> Condition:
    value: Any = table.values[key]
    expected = CONDITIONS[key].values
    if isinstance(expected, tuple):
        return table.choice(key, expected)
    if key == "bytes" and isinstance(value, str):
        value = _byte_count(table, value)
    assert expected is not None  # a limit may name it
    fits = type(value) is expected  # isinstance would let True pass for 1
    if not fits or (expected is int and value < 1):
        raise table.error(f'"{key}" must be {_TYPE_NAMES[expected]}, not {value!r}.', key)
    return cast(Condition, value)


def _byte_count(table: Table, text: str) -> int:
    parts = re.fullmatch(r"([0-9]+) ?(KiB|MiB|GiB)", text)
    if not parts:
        raise table.error(
            f'"bytes" must be a whole number of bytes, KiB, MiB or GiB, like "8 GiB", not "{text}".', "bytes"
        )
    return int(parts[1]) * _BYTE_UNITS[parts[2]]


def _collide(one: Limit, other: Limit) -> bool:
    """Whether both could hold for one measurement, with nothing to choose between them."""
    shared = one.conditions.keys() & other.conditions.keys()
    return (
        one.metric == other.metric
        and len(one.conditions) == len(other.conditions)
        and all(one.conditions[key] == other.conditions[key] for key in shared)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
