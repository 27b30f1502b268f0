"""Limits of evidence from before they had grades: what their kinds say, and the figure that stood in the source."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.old_evidence import upgraded

FIGURE = "0.90 x published measurement"


def limit(kind: str, source: str, **more: Any) -> Any:
    of = {"metric": "busbw", "sense": "min", "value": 90.0, "unit": "GB/s", "conditions": {}, "profile": "card.toml"}
    return {**of, "kind": kind, "source": source, **more}


@pytest.mark.parametrize(
    ("kind", "source", "read"),
    [
        ("published gate", "NHC, 8x A100: 228", ("published", "NHC, 8x A100: 228", None)),
        (FIGURE, "nccl-tests, 2026-11-20: 100", ("published", "nccl-tests, 2026-11-20", 100.0)),
        (FIGURE, "somebody: 16,781 to 17,000.5", ("published", "somebody", 16781.0)),
        (FIGURE, "somebody: 833, measured on the 16 GB card", ("published", None, None)),
        ("project gate", "this project", ("project", "this project", None)),
        ("calibrated", "two machines: 0.95 x", ("calibrated", "two machines: 0.95 x", None)),
        ("contract", "order 4711", ("contract", "order 4711", None)),
    ],
)
def test_a_kind_becomes_a_grade(kind: str, source: str, read: tuple[str, str | None, float | None]) -> None:
    measurement = {"metric": "busbw", "values": {"world": 95.0}, "conditions": {}, "definition": {}}
    before = limit(kind, source, contract=True)
    finding = {"check": "a.py::b", "measurement": measurement, "state": "met", "limit": before}
    given = {"file": "card.toml", "limits": [before], "facts": {}}
    events: list[Any] = [{"event": "finding", "finding": finding}, {"event": "profile", "profile": given}]
    for event in map(upgraded, events):
        found = event["finding"]["limit"] if event["event"] == "finding" else event["profile"]["limits"][0]
        now: Limit = codec.typed(found, Limit)
        assert (now.grade, now.source, now.measured) == (read[0], read[1] or source, read[2])
        assert (now.value, now.given) == (90.0, True)


def test_evidence_from_before_there_were_contracts_says_that_the_limit_is_shipped() -> None:
    event = {"event": "profile", "profile": {"limits": [limit("calibrated", "somebody")]}}
    assert codec.typed(upgraded(event)["profile"]["limits"][0], Limit).given is False
