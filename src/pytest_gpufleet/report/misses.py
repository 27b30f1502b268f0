"""What was missed: every figure that did not reach its limit or its peers, with the places where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.place import Pair, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording

OF_THE_RUN = "the same kind in this run; nobody has measured how much healthy ones differ"


@dataclass(frozen=True)
class Miss:
    """One figure that missed its limit, or its peers, or both, in one place or in several; ready to be shown."""

    check: str
    metric: str
    conditions: str
    place: str
    gpus: tuple[Gpu, ...]  # behind the place if it is one GPU or one pair, else none
    value: str
    peers: str  # how much worse than its peers; empty if it is not
    limit: str
    kind: str
    source: str


def misses(record: Record, say: Say = english) -> list[Miss]:
    """Every figure of the run that missed, in the order in which they were found."""
    return [_miss(finding, record, say) for finding in record.findings if finding.state == "missed"]


def _miss(finding: Finding, record: Record, say: Say) -> Miss:
    metric, values, limit = wording.metric(finding), finding.measurement.values, finding.limit
    slower, worst = finding.slower_than_peers or {}, wording.worst(finding)
    # A missed finding that names no place is still a miss: of the worst place.
    places = tuple(dict.fromkeys((*finding.missed, *slower))) or ((worst[0],) if worst else ())
    given = [values.get(place, math.nan) for place in places]
    value, text, kind, source = wording.span(given, metric.unit, say=say), finding.reason, "", ""
    if limit and finding.missed:
        nearest, text = wording.value_and_limit(given[0], limit)
        value = nearest if len(given) == 1 else value
        kind, source = limit.origin, limit.full_source
    elif slower:
        text = say("at most {worse}", worse=say(" and ").join(say(each.told) for each in finding.tolerances))
        kind, source = "peers", "; ".join(each.source or say(OF_THE_RUN) for each in finding.tolerances)
    by_place = {gpu.place: gpu for gpu in record.topology.gpus}
    return Miss(
        finding.check,
        wording.title(finding, say),
        say(", ").join(wording.conditions(finding, say)),
        _where(places, record.hosts, say),
        tuple(by_place[part] for part in places[0].parts if part in by_place) if len(places) == 1 else (),
        value,
        say("{share} worse than its peers", share=wording.span(slower.values(), "ratio", 3, say)) if slower else "",
        text,
        kind,
        source,
    )


def _where(places: tuple[Where, ...], hosts: wording.Hosts, say: Say) -> str:
    common = set.intersection(*(set(place.parts) for place in places)) if places else set()
    if len(places) > 1 and len(common) == 1 and all(isinstance(place, Pair) for place in places):
        return say("{count} pairs with {place}", count=len(places), place=wording.place(common.pop(), hosts, say))
    return wording.places(places, hosts=hosts, say=say)
