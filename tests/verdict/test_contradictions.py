"""Whoever changes accepted evidence, and restates what it amounts to, does not get past `verify` with less than an
acceptance.

What an acceptance takes is written down here once more, from its definition and on plain JSON, so that the two can be
held against each other.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.levels import case_name, check_name
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import METRICS, metric_under
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.model.suite import Suite, of_version, shipped
from pytest_gpufleet.verdict.contradictions import contradictions
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.profiles import profile
from pytest_gpufleet.verdict.verdict import settled
from tests import edited_evidence, runs
from tests.commands.test_tools import contract
from tests.edited_evidence import Event

RECORDED = Path(__file__).parents[1] / "recorded" / "h200x1-e" / "evidence.jsonl"
EXAMPLES = int(os.environ.get("GPUFLEET_EXAMPLES", "60"))  # of each run


# ---------------------------------------------------------------- runs that were accepted


def of_an_unknown_version(folder: Path) -> list[Event]:
    """Four GPUs, limits of a contract, a suite of its own."""
    return edited_evidence.events(
        runs.record(folder / "run", limits=contract(folder / "contract.toml")) / "evidence.jsonl"
    )


def of_an_earlier_version(folder: Path) -> list[Event]:
    """A real run of version 0.1.0 on one H200. Without telemetry, which takes its time."""
    return [event for event in edited_evidence.events(RECORDED) if event["event"] not in ("telemetry", "progress")]


def as_defined_today(measurement: Measurement, fabric: str) -> Measurement:
    known = measurement.metric in METRICS
    conditions = {"direction": "", "at_once": "", **measurement.conditions}
    return (
        replace(measurement, definition=metric_under(measurement.metric, conditions, fabric)) if known else measurement
    )


def of_this_version(folder: Path) -> list[Event]:
    """Level quick on that H200, and what it measured, by the limits and the suite of today."""
    then = read(RECORDED)
    run, topology, machine = of_an_earlier_version(folder)[:3]
    limits = profile.for_gpu(then.topology.gpus[0].name)
    assert limits is not None
    run |= {
        "plugin": shipped().version,
        "level": "quick",
        "profile": limits.name,
        "profile_sha256": sha256(limits.path.read_bytes()).hexdigest(),
    }
    events = [run, topology, machine, {"event": "suite", "manifest": shipped().to_json()}]
    measured = [
        finding
        for each in then.findings
        for today in [as_defined_today(each.measurement, then.topology.fabric)]
        for finding in [judge(today, limits, then.topology, each.check, rehearsal=False)]
        if finding.state == "met"
    ]
    cases = [case for name in shipped().required("quick") for case in shipped().cases(name)]
    figures = {(check_name(finding.check), finding.measurement.metric) for finding in measured}
    for case in dict.fromkeys([*cases, *(finding.check for finding in measured)]):
        needs = shipped().checks[check_name(case)].metrics(several=False)
        if all((check_name(case), metric) in figures for metric in needs):
            events.append({"event": "check_started", "check": case})
            own = [finding for finding in measured if finding.check == case]
            events += [{"event": "finding", "finding": finding.to_json()} for finding in own]
            events.append({"event": "check_finished", "check": asdict(Check(case, "passed", 1.0))})
    return restated([*events, {"event": "verdict"}])


RUNS = (of_an_unknown_version, of_an_earlier_version, of_this_version)


# ---------------------------------------------------------------- what an acceptance takes


def refused(events: list[Event], before: list[Event]) -> str:
    """Why such evidence is no acceptance; "" if it is one. `before`: what the run really left."""
    run, topology = one(events, "run"), _topology(one(events, "topology"))
    gpus = [f"gpu{gpu['index']}" for gpu in topology["gpus"]]
    checks = {event["check"]["id"]: event["check"]["outcome"] for event in some(events, "check_finished")}
    findings = [event["finding"] for event in some(events, "finding")]
    manifests = [event["manifest"] for event in some(events, "suite") if "manifest" in event]
    suite = codec.typed(manifests[0], Suite) if manifests else of_version(run.get("plugin"))
    required = suite.required(run["level"])
    known = some(events, "profile") or run["plugin"] == shipped().version  # which limits there were
    ended = {case_name(check) for check, outcome in checks.items() if outcome in ("passed", "not applicable")}
    left = {(case_name(finding["check"]), finding["measurement"]["metric"]) for finding in findings}
    passed = [case_name(check) for check, outcome in checks.items() if outcome == "passed"]
    rules = {
        "a rehearsal": run.get("rehearsal"),
        "no GPU": not gpus,
        "a required check is missing": [case for name in required for case in suite.cases(name) if case not in ended],
        "a check failed": "failed" in checks.values(),
        "a check did not end": [event for event in some(events, "check_started") if event["check"] not in checks],
        "a figure is missing": [
            case
            for case in passed
            if check_name(case) in suite.checks
            for metric in suite.checks[check_name(case)].metrics(len(gpus) > 1)
            if (case, metric) not in left
        ],
        "health": [event for event in some(events, "health") if event["problems"]],
        "a fault": some(events, "fault"),
        "spoiled": some(events, "spoiled"),
        "altered": [event for event in some(events, "suite") if event.get("altered")],
        "a short burn-in": run["level"] == "burnin" and run["burn_in_seconds"] < 900,
        "figures": [why for finding in findings if (why := wrong(finding, gpus, suite))],
        "other limits": known and new_limits(events, before),
    }
    return next((what for what, found in rules.items() if found), "")


def _topology(event: Event) -> Any:
    """As schema 1 or 2 has it."""
    return event.get("topology") or event["nodes"][0]


def one(events: list[Event], kind: str) -> Event:
    (event,) = some(events, kind)
    return event


def some(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event.get("event") == kind]


def wrong(finding: Any, gpus: list[str], suite: Suite) -> str:
    """What is wrong with a figure."""
    measurement, limit = finding["measurement"], finding["limit"]
    values, metric = measurement["values"], measurement.get("definition") or {}
    if finding["state"] not in ("met", "for information"):
        return "it is not met"
    if not all(math.isfinite(value) and value >= 0 for value in values.values()):
        return "no figure"
    if finding["state"] == "for information":
        return ""
    if limit is None or not values:
        return "nothing to meet"
    if metric and (limit["unit"], limit["sense"]) != (metric["unit"], "min" if metric["better"] == "higher" else "max"):
        return "a limit for something else"
    if not all(v >= limit["value"] if limit["sense"] == "min" else v <= limit["value"] for v in values.values()):
        return "missed"
    if metric.get("peer_tolerance") and set(values) == set(gpus) and len(gpus) > 2:
        ranked = sorted(values.values(), reverse=True)
        usual = {"best": ranked[0], "better half": fmean(ranked[: len(ranked) // 2]), "median": median(ranked)}
        for tolerance in finding.get("tolerances", [{"worse": metric["peer_tolerance"], "reference": "median"}]):
            if ranked[-1] < usual[tolerance["reference"]] * (1 - tolerance["worse"]) - 1e-9:
                return "slower than its peers"
    if all(place.startswith("gpu") and "-" not in place for place in values) and set(values) != set(gpus):
        return "a GPU is missing"
    spreads = [(max(s) - min(s)) / abs(median(s)) for s in measurement["samples"].values() if len(s) > 1 and median(s)]
    if metric.get("steady") and not all(spread <= 0.05 for spread in spreads):
        return "unsteady"
    return ""


def new_limits(events: list[Event], before: list[Event]) -> list[Any]:
    """Limits by which nothing was judged when it ran, where the profile says that it is the same."""
    same = [
        one(events, "run").get("profile_sha256") == one(before, "run").get("profile_sha256"),
        some(events, "profile") == some(before, "profile"),
    ]
    # Evidence of early versions does not say whose a limit is.
    known, now = (
        [{"given": False, **limit} for event in some(each, "finding") if (limit := event["finding"]["limit"])]
        for each in (before, events)
    )
    return [limit for limit in now if all(same) and limit not in known]


# ---------------------------------------------------------------- somebody changes them

WORDS = (
    "", "met", "missed", "not judged", "for information", "passed", "failed", "skipped", "not applicable", "fine",
    "min", "max", "higher", "lower", "quick", "standard", "burnin", "contract", "calibrated", "spread", "gemm", "gpu0",
    "gpu7", "world", "GB/s", "NVIDIA H200", "0.1.0", "9.9.9", "run", "finding", "telemetry",
    "2026-11-21T01:40:06+00:00",
)  # fmt: skip
FACTORS = (0.0, 0.001, 0.5, 0.96, 1.04, 2.0, 1000.0, -1.0, math.inf, math.nan)
KINDS = (
    "finding",
    "finding",
    "finding",
    "finding",
    "check_finished",
    "check_started",
    "run",
    "topology",
    "profile",
    "suite",
    "verdict",
)
NUMBERS = st.integers(0, 1 << 20)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(("figure", "figure", "figure", "change", "drop", "delete", "repeat", "swap", "everywhere")),
        st.sampled_from(KINDS),
        NUMBERS,
        NUMBERS,
        NUMBERS,
    ),
    min_size=1,
    max_size=3,
)


def edited(events: list[Event], edits: Iterable[tuple[str, str, int, int, int]]) -> list[Event]:
    """The events after each of the edits. Numbers say which event, which place in it, and what comes there."""
    events = [*events]
    for how, kind, which, where, what in edits:
        at = [number for number, event in enumerate(events) if event.get("event") == kind]
        if not at:
            continue
        number = at[which % len(at)]
        for each in at if how == "everywhere" else [number]:
            events[each] = copy.deepcopy(events[each])
        match how:
            case "figure" | "change" | "everywhere":
                paths = places(events[number], numbers=how == "figure")
                path = paths[where % len(paths)] if paths else ()
                for each in at if how == "everywhere" else [number]:
                    put(events[each], path, what)
            case "drop":
                *path, _ = places(events[number])[where % len(places(events[number]))]
                inside: Any = events[number]
                for key in path[: where % (len(path) + 1)]:
                    inside = inside[key]
                if isinstance(inside, dict) and inside:
                    inside.pop(list(inside)[what % len(inside)])
                elif isinstance(inside, list) and inside:
                    inside.pop(what % len(inside))
            case "delete":
                del events[number]
            case "repeat":
                events.insert(where % len(events), copy.deepcopy(events[number]))
            case "swap":
                other = where % len(events)
                events[number], events[other] = events[other], events[number]
    return events


def places(value: Any, path: tuple[Any, ...] = (), numbers: bool = False) -> list[tuple[Any, ...]]:
    """The paths to all texts, numbers, truths and nulls, or to numbers alone."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, each in items for found in places(each, (*path, key), numbers)]
    return [path] if not numbers or type(value) in (int, float) else []


def put(event: Any, path: tuple[Any, ...], what: int) -> None:
    if not path:
        return
    *inside, last = path
    try:
        for key in inside:
            event = event[key]
        before = event[last]
    except (KeyError, IndexError, TypeError):
        return
    if isinstance(before, bool):
        event[last] = not before
    elif isinstance(before, int | float):
        event[last] = before * FACTORS[what % len(FACTORS)]
    else:
        event[last] = (*WORDS, None, 0, 1e9, True, False, {}, [])[what % (len(WORDS) + 7)]


def restated(events: list[Event]) -> list[Event]:
    """With the verdict that all else amounts to, if it is an acceptance."""
    record = Record()
    try:
        for event in events:
            if event.get("event") != "verdict":
                record.add(event)
        record = settled(record, "")
    except Exception:  # which no run would write
        return events
    verdict = {"verdict": "ACCEPTED", "reasons": record.reasons, "broken": "", "exit_status": 0}
    rest = [event for event in events if event.get("event") != "verdict"]
    return [*rest, {"event": "verdict", **verdict}] if record.verdict == "ACCEPTED" else events


def is_verified(events: list[Event], path: Path) -> bool:
    """Whether `verify` takes it for accepted."""
    edited_evidence.write(path, events)
    try:
        record = read(path)
        return record.verdict == "ACCEPTED" and not contradictions(record)
    except ValueError:
        return False  # one sentence, and status 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_no_change_gets_past_verify_with_less_than_an_acceptance(run: Any, folder: Path) -> None:
    (own := folder / run.__name__).mkdir()
    before, path = run(own), own / "changed.jsonl"
    assert is_verified(before, path)
    assert refused(before, before) == ""

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(EDITS, st.booleans())
    def changed(edits: Any, states_again: bool) -> None:
        events = edited(before, edits)
        events = restated(events) if states_again else events
        if is_verified(events, path):
            assert refused(events, before) == ""

    changed()
