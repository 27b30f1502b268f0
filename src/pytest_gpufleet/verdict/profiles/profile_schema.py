"""The JSON Schema of profiles, made from the words that they are read with.

profile.schema.json beside this file is what this gives: `python -m pytest_gpufleet.verdict.profiles.profile_schema`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_gpufleet.model.conditions import CONDITIONS
from pytest_gpufleet.model.metric import METRICS, Metric
from pytest_gpufleet.model.vocabulary import FACTS, KINDS, KNOWN_GOOD_KEYS, MEASURED_UNDER
from pytest_gpufleet.verdict.profiles.profile import shipped
from pytest_gpufleet.verdict.profiles.profile_file import SENSES

FILE = Path(__file__).parent / "profile.schema.json"

_LISTS = ("uuids", "serials")
_TEXT = {"type": "string", "pattern": r"\S"}
_NUMBER = {"type": "number", "minimum": 0, "maximum": sys.float_info.max}
_WHOLE = {"type": "integer", "minimum": 1}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0, "maximum": sys.float_info.max}
_RATIO = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_BYTES = {"anyOf": [_WHOLE, {"type": "string", "pattern": "^0*[1-9][0-9]* ?(KiB|MiB|GiB)$"}]}


def profile_schema() -> dict[str, Any]:
    """The schema, of the 2020-12 draft. It cannot say that two limits contradict each other: only the loader can."""
    own_metric = {"required": ["metric"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Profile of pytest-gpufleet: facts and limits of a GPU model",
        **_object(
            {
                "name": {**_TEXT, "description": "shown in the report"},
                "match": {
                    "type": "array",
                    "items": _TEXT,
                    "minItems": 1,
                    "description": "the names that NVML gives such GPUs, exactly; as those of the base if it has one",
                },
                "extends": {"enum": [profile.name for profile in shipped()], "description": "a shipped profile"},
                "facts": _object({name: {**_NUMBER, "description": what} for name, what in FACTS.items()}),
                "metric": {
                    "type": "object",
                    "propertyNames": {"not": {"enum": list(METRICS)}},
                    "additionalProperties": _object(
                        {"unit": _TEXT, "better": {"enum": list(SENSES)}, "title": _TEXT}, ("unit", "better", "title")
                    ),
                    "description": "metrics of checks of your own",
                },
                "limit": {"type": "array", "items": _limit()},
                "calibrated_on": {
                    "type": "array",
                    "items": _object(
                        {key: {"type": "array", "items": _TEXT} if key in _LISTS else _TEXT for key in KNOWN_GOOD_KEYS},
                        KNOWN_GOOD_KEYS,
                    ),
                    "description": "the runs that calibrate made the limits of, and their GPUs",
                },
            },
            ("name",),
        ),
        "anyOf": [{"required": ["extends"]}, {"required": ["match"]}],
        # Whether a limit's metric is one that the file declares, a schema cannot say; that it declares any, it can.
        "if": {"not": own_metric},
        "then": {"properties": {"limit": {"items": {"properties": {"metric": {"enum": list(MEASURED_UNDER)}}}}}},
    }


def _limit() -> dict[str, Any]:
    return {
        **_object(
            {
                "metric": _TEXT,
                "min": _POSITIVE,
                "max": _POSITIVE,
                "unit": _TEXT,
                "kind": {"enum": list(KINDS)},
                "source": {**_TEXT, "description": "where the value can be looked up, and what was measured there"},
                "when": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            },
            ("metric", "unit", "kind", "source"),
        ),
        "oneOf": [{"required": ["min"]}, {"required": ["max"]}],
        "allOf": [_of_metric(METRICS[name], under) for name, under in MEASURED_UNDER.items()],
    }


def _of_metric(metric: Metric, under: Iterable[str]) -> dict[str, Any]:
    """What a limit of one of the suite's own metrics looks like."""
    sense, wrong = SENSES[metric.better]
    return {
        "if": {"properties": {"metric": {"const": metric.name}}, "required": ["metric"]},
        "then": {
            "properties": {
                sense: _RATIO if metric.unit == "ratio" else _POSITIVE,
                wrong: False,
                "unit": {"const": metric.unit},
                "when": _object({key: _condition(key) for key in under}),
            },
            "required": [sense],
        },
    }


def _condition(key: str) -> dict[str, Any]:
    expected = CONDITIONS[key].values
    if isinstance(expected, tuple):
        return {"enum": list(expected)}
    if expected is bool:
        return {"type": "boolean"}
    return _BYTES if key == "bytes" else _WHOLE


def _object(properties: dict[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }


def text() -> str:
    return json.dumps(profile_schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
