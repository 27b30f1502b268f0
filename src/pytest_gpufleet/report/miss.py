"""What was missed: every limit that a place did not meet, with the GPUs behind that place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpufleet.hardware.topology import Gpu
from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict.evidence import Check, Record
from pytest_gpufleet.verdict.finding import Finding


@dataclass(frozen=True)
class Miss:
    """One place that missed one limit, ready to be shown."""

    metric: str
    conditions: str
    place: str
    gpus: tuple[Gpu, ...]
    value: str
    limit: str
    kind: str
    source: str


def misses(record: Record) -> list[Miss]:
    """Every missed limit of the run, place by place, in the order in which they were found."""
    return [miss for finding in record.findings if finding.state == "missed" for miss in _of(finding, record)]


def failed_checks(record: Record) -> list[Check]:
    return [check for check in record.checks.values() if check.outcome == "failed"]


def _of(finding: Finding, record: Record) -> Iterator[Miss]:
    metric, values, limit = wording.metric(finding), finding.measurement.values, finding.limit
    slower = finding.slower_than_peers or {}
    worst = wording.worst(finding)
    # A missed finding that names no place is still a miss: of the worst place.
    missed = finding.missed or (() if slower or worst is None else (worst[0],))
    for place in missed:
        value = values.get(place, float("nan"))
        texts = wording.beside(value, limit) if limit else (wording.quantity(value, metric.unit), finding.reason)
        kind, source = (limit.kind, limit.source) if limit else ("", "")
        yield _miss(finding, record, place, *texts, kind, source)
    for place, fraction in slower.items():
        text = wording.quantity(values.get(place, float("nan")), metric.unit)
        tolerance = f"at most {wording.percent(metric.peer_tolerance)}" if metric.peer_tolerance else "not"
        yield _miss(
            finding,
            record,
            place,
            f"{text}, {wording.percent(fraction)} worse than its peers",
            f"{tolerance} worse than the median of its peers",
            "peers",
            "the other GPUs of this model in this run",
        )


def _miss(finding: Finding, record: Record, place: str, *texts: str) -> Miss:
    by_place = {gpu.place: gpu for gpu in record.topology.gpus}
    gpus = tuple(by_place[part] for part in place.split("-") if part in by_place)
    conditions = ", ".join(wording.words(finding.measurement.conditions))
    return Miss(wording.metric(finding).title, conditions, wording.place(place), gpus, *texts)
