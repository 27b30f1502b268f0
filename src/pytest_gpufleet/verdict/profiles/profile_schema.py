"""The JSON Schema of profiles, made from the types that they are read with.

profile.schema.json beside this file is what this gives: `python -m pytest_gpufleet.verdict.profiles.profile_schema`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.vocabulary import MEASURED_UNDER
from pytest_gpufleet.verdict.profiles.profile import shipped
from pytest_gpufleet.verdict.profiles.profile_file import LimitTable, ProfileTable, limit_of

FILE = Path(__file__).parent / "profile.schema.json"


def profile_schema() -> dict[str, Any]:
    """The schema, of the 2020-12 draft. It cannot say that two limits contradict each other: only the loader can."""
    kinds = [ProfileTable, LimitTable, *(limit_of(METRICS[name]) for name in MEASURED_UNDER)]
    (profile, own, *suites), parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    suite, free = {"enum": list(MEASURED_UNDER)}, {"not": {"enum": list(METRICS)}}
    keys = parts["Profile"]["properties"]
    keys["extends"] = {"enum": [one.name for one in shipped()], "description": "a shipped profile"}
    keys["metric"]["description"] = "metrics of checks of your own"
    keys["metric"]["propertyNames"] |= free
    keys["calibrated_on"]["description"] = "the runs that calibrate made the limits of, and their GPUs"
    ifs = [_if_metric({"const": name}, limit) for name, limit in zip(MEASURED_UNDER, suites, strict=True)]
    keys["limit"]["items"] = {"required": ["metric"], "allOf": [*ifs, _if_metric({"not": suite}, own)]}
    # Of an author's own metric. Whether it is one that the file declares, a schema cannot say; that it declares any, it
    # can.
    parts["Limit"]["properties"]["metric"] |= free
    parts["Limit"]["required"] = ["metric", "unit", "grade", "source"]
    parts["Limit"]["oneOf"] = [{"required": ["min"]}, {"required": ["max"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Profile of pytest-gpufleet: facts and limits of a GPU model",
        **profile,
        "anyOf": [{"required": ["extends"]}, {"required": ["match"]}],
        "if": {"not": {"required": ["metric"]}},
        "then": {"properties": {"limit": {"items": {"properties": {"metric": suite}}}}},
        "$defs": parts,
    }


def _if_metric(metric: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {"metric": metric}, "required": ["metric"]}, "then": limit}


def text() -> str:
    return json.dumps(profile_schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
