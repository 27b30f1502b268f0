"""Profiles: what is known of a GPU model, and the limits it is held against."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pytest_gpufleet.probes.reading import METRICS, Condition, GiB, KiB, MiB
from pytest_gpufleet.verdict.finding import Kind, Limit
from pytest_gpufleet.verdict.measurement import Measurement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SHIPPED = Path(__file__).parent / "profiles"

_KEYS = ("name", "match", "facts", "limit")
_LIMIT_KEYS = ("metric", "min", "max", "unit", "kind", "source", "when")

# Data-sheet figures. TFLOP/s are dense, NVLink is one direction, all links of one GPU together.
_FACTS = (
    "memory_gigabytes",
    "power_watts",
    "hbm_terabytes_per_second",
    "nvlinks",
    "nvlink_gigabytes_per_second",
    "peak_tflops_fp32",
    "peak_tflops_tf32",
    "peak_tflops_fp16",
)

# What a limit may depend on: the type of its value, or the values there are.
_CONDITIONS: dict[str, type | tuple[str, ...]] = {
    "collective": (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "all_to_all",
        "sendrecv",
    ),
    "bytes": int,
    "dtype": ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"),
    "ranks": int,
    "nvls": bool,
    "model": ("resnet50",),
    "recipe": ("fp32", "tf32", "amp"),
    "batch": int,  # for each GPU
}
_TYPE_NAMES = {int: "a positive whole number", bool: "true or false"}
_BYTE_UNITS = {"KiB": KiB, "MiB": MiB, "GiB": GiB}

_Sense = Literal["min", "max"]
# The sense that fits a metric, and the one that does not.
_SENSES: dict[str, tuple[_Sense, _Sense]] = {"higher": ("min", "max"), "lower": ("max", "min")}


class ProfileError(ValueError):
    """A profile cannot be used; the message says in one sentence where, what, and what to write instead."""


@dataclass(frozen=True)
class Profile:
    """One GPU model: the exact names NVML gives it (`match`), its data-sheet `facts`, and its `limits`.

    The unit of a fact is in its name. Where nobody published a limit there is none: unknown stays unknown.
    """

    name: str
    match: tuple[str, ...]
    facts: Mapping[str, float | int | str | bool]
    limits: tuple[Limit, ...]
    path: Path

    def limit_for(self, measurement: Measurement) -> Limit | None:
        """The limit that decides: the most specific of those whose every condition was measured so."""
        fitting = (
            limit
            for limit in self.limits
            if limit.metric == measurement.metric
            and all(measurement.conditions.get(key) == value for key, value in limit.conditions.items())
        )
        return max(fitting, key=lambda limit: len(limit.conditions), default=None)


@cache
def shipped() -> tuple[Profile, ...]:
    """The profiles that come with this package."""
    return tuple(load(path) for path in sorted(_SHIPPED.glob("*.toml")))


def for_gpu(name: str) -> Profile | None:
    """The shipped profile for a GPU, by the exact name that NVML gives; None for an unknown model.

    Exact, because limits of one model fail or flatter another: "NVIDIA H100 NVL" has fewer links than
    "NVIDIA H100 80GB HBM3".
    """
    return next((profile for profile in shipped() if name in profile.match), None)


def load(path: Path) -> Profile:
    """Read a profile from a TOML file and check all of it.

    Raises ProfileError for a file that cannot be read, an unknown key, a limit without unit, kind or source,
    a value in the wrong unit or sense, or two limits of which neither is more specific: a typing error in a
    profile must not let a machine pass.
    """
    text, data = _read(path)
    where = str(path)
    _check_keys(data, _KEYS, where)
    limits = _limits(data.get("limit", []), text, path)
    return Profile(_text(data, "name", where), _match(data, where), _facts(data, where), limits, path)


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ProfileError(f"{path}: is not valid TOML: {error}.") from None


def _match(data: Mapping[str, Any], where: str) -> tuple[str, ...]:
    names = data.get("match")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ProfileError(f'{where}: "match" must be a list of the exact names that NVML gives such a GPU.')
    return tuple(names)


def _facts(data: Mapping[str, Any], where: str) -> dict[str, float | int | str | bool]:
    facts = _table(data, "facts", where)
    _check_keys(facts, _FACTS, f"{where}: [facts]")
    for key, value in facts.items():
        # Zero is a fact too: a card without NVLink.
        if not _is_number(value) or not 0 <= value <= sys.float_info.max:
            raise ProfileError(f'{where}: [facts]: "{key}" must be a number, not {value!r}.')
    return facts


def _limits(tables: Any, text: str, path: Path) -> tuple[Limit, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ProfileError(f'{path}: "limit" must be a list; begin each limit with [[limit]] in two brackets.')
    lines = [n for n, line in enumerate(text.split("\n"), 1) if re.match(r"\s*\[\[\s*limit\s*\]\]", line)]
    if len(lines) == len(tables):
        names = [f"limit {n} (line {line})" for n, line in enumerate(lines, 1)]
    else:  # written as an inline array
        names = [f"limit {n}" for n in range(1, len(tables) + 1)]
    limits = [_limit(table, f"{path}: {name}", path.name) for table, name in zip(tables, names, strict=True)]
    for (one, name), (other, other_name) in combinations(zip(limits, names, strict=True), 2):
        if _collide(one, other):
            raise ProfileError(
                f"{path}: {name} and {other_name} can both hold for one {one.metric} "
                f'and neither is more specific; add a condition to the "when" of one of them.'
            )
    return tuple(limits)


def _limit(table: Mapping[str, Any], where: str, profile: str) -> Limit:
    _check_keys(table, _LIMIT_KEYS, where)
    metric = METRICS[_choice(table, "metric", METRICS, where)]
    sense, wrong = _SENSES[metric.better]
    if wrong in table:
        raise ProfileError(
            f'{where}: "{wrong}" does not fit {metric.name}, where {metric.better} is better; write only "{sense}".'
        )
    value = _required(table, sense, where)
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise ProfileError(f'{where}: "{sense}" must be a positive number of {metric.unit}, not {value!r}.')
    if metric.unit == "ratio" and value > 1:
        raise ProfileError(f'{where}: "{sense}" of {metric.name} is a ratio from 0 to 1, not {value!r}; 0.95 is 95 %.')
    return Limit(
        metric=metric.name,
        sense=sense,
        value=float(value),
        unit=_choice(table, "unit", (metric.unit,), where),
        kind=cast(Kind, _choice(table, "kind", get_args(Kind), where)),
        source=_text(table, "source", where),
        conditions=_when(table, where),
        profile=profile,
    )


def _when(table: Mapping[str, Any], where: str) -> dict[str, Condition]:
    when = _table(table, "when", where)
    _check_keys(when, _CONDITIONS, f'{where}: "when"')
    return {key: _condition(when, key, f'{where}: "when"') for key in when}


def _condition(when: Mapping[str, Any], key: str, where: str) -> Condition:
    value: Any = when[key]
    expected = _CONDITIONS[key]
    if isinstance(expected, tuple):
        return _choice(when, key, expected, where)
    if key == "bytes" and isinstance(value, str):
        value = _byte_count(value, where)
    fits = type(value) is expected  # isinstance would let True pass for 1
    if not fits or (expected is int and value < 1):
        raise ProfileError(f'{where}: "{key}" must be {_TYPE_NAMES[expected]}, not {value!r}.')
    return cast(Condition, value)


def _byte_count(text: str, where: str) -> int:
    parts = re.fullmatch(r"([0-9]+) ?(KiB|MiB|GiB)", text)
    if not parts:
        raise ProfileError(
            f'{where}: "bytes" must be a whole number of bytes, KiB, MiB or GiB, like "8 GiB", not "{text}".'
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


def _check_keys(table: Iterable[str], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            raise ProfileError(f'{where}: unknown key "{key}"; {_hint(key, known)}')


def _table(data: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise ProfileError(f'{where}: "{key}" must be a table of keys and values, not {value!r}.')
    return value


def _required(table: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in table:
        raise ProfileError(f'{where}: "{key}" is missing; add it.')
    return table[key]


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = _required(table, key, where)
    if not isinstance(value, str) or not value.strip():
        raise ProfileError(f'{where}: "{key}" must be a text that is not empty, not {value!r}.')
    return value


def _choice(table: Mapping[str, Any], key: str, choices: Iterable[str], where: str) -> str:
    value, choices = _text(table, key, where), tuple(choices)
    if value not in choices:
        raise ProfileError(f'{where}: "{key}" cannot be "{value}"; {_hint(value, choices)}')
    return value


def _hint(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f'did you mean "{near[0]}"?' if near else f"write {' or '.join(known)}."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
