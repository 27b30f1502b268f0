"""What happened in a run: the fold of its evidence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from pytest_gpufleet.model import levels, old_evidence, place
from pytest_gpufleet.model.check import OUTCOMES, Check, FailedBy
from pytest_gpufleet.model.events import finite, moment, number, optional, reading, whole
from pytest_gpufleet.model.events import read as read_events
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, State
from pytest_gpufleet.model.given_limits import Given
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.limit import Kind
from pytest_gpufleet.model.metric import BETTER
from pytest_gpufleet.model.suite import Suite, of_version
from pytest_gpufleet.safe_files import open_regular

SCHEMA = 2  # 1, of versions before 0.3, has no faults: see old_evidence


MOST_SAMPLES = 4096


ONCE = ("run", "profile", "topology", "machine")  # events of which a run has one


VERDICTS = ("ACCEPTED", "REJECTED", "INCOMPLETE", "REHEARSAL")


# What the fields of an event must be, as `events` has it, where they are there: earlier versions had fewer.
_CHECK = {
    **dict.fromkeys(("id", "title", "doc", "message", "run"), str),
    "outcome": frozenset(OUTCOMES),
    "failed_by": frozenset(get_args(FailedBy)),
    "seconds": number,
}


_LIMIT = {
    **dict.fromkeys(("metric", "unit", "source", "profile"), str),
    "sense": frozenset({"min", "max"}),
    "kind": frozenset(get_args(Kind)),
    "value": finite,
    "conditions": dict,
    "contract": bool,
}


_METRIC = {
    **dict.fromkeys(("name", "unit", "title"), str),
    "better": frozenset(BETTER),
    "peer_tolerance": optional(finite),
    "steady": bool,
}


_LEVEL = frozenset(levels.LEVELS)


_SUITE_CHECK = {"level": _LEVEL, "title": str, **{key: [str] for key in ("cases", "figures", "figures_of_several")}}


def _is_place(value: Any) -> bool:
    try:
        return bool(place.read(value))
    except (TypeError, ValueError):
        return False


FIELDS: Mapping[str, Any] = {
    "run": {
        **dict.fromkeys(("host", "command", "gpus", "python", "pytest", "plugin", "rehearsal_because"), str),
        "utc": moment,
        "level": _LEVEL,
        "burn_in_seconds": number,
        "gpus_present": whole,
        "ranks": whole,
        "rehearsal": bool,
        "profile": optional(str),
        "profile_sha256": optional(str),
        "environment": {str: str},
        "resumed": [{"run": str, "utc": moment, "failed": [str]}],
    },
    "topology": {
        "topology": {
            "gpus": [{"name": str, "uuid": str, "index": whole, "compute_capability": optional([whole])}],
            "links": [[str]],
            "absent": str,
        }
    },
    "profile": {
        "profile": {
            "file": str,
            "limits": [_LIMIT],
            "facts": {str: finite},
            "changes": [{"file": str, "fact": str, "shipped": finite, "given": optional(finite)}],
            "calibrated_on": [
                {**dict.fromkeys(("run", "host", "utc", "evidence_sha256"), str), "uuids": [str], "serials": [str]}
            ],
        }
    },
    "machine": {"machine": {"taken": str, "host": dict, "gpus": [{"index": whole, "facts": dict}]}},
    "check_started": {"check": str},
    "progress": {"check": str, "done": number, "of": number},
    "telemetry": {"sample": {"time": number, "gpus": [{str: reading}]}},
    "finding": {
        "finding": {
            **dict.fromkeys(("check", "reason"), str),
            "state": frozenset(get_args(State)),
            "required": bool,
            "missed": [str],
            "slower_than_peers": optional({str: finite}),
            "limit": optional(_LIMIT),
            "measurement": {"metric": str, "definition": optional(_METRIC)},
        }
    },
    "fault": {
        "fault": {
            **dict.fromkeys(("check", "name", "what", "story"), str),
            "code": whole,
            "subjects": [_is_place],
            "watched": bool,
        }
    },
    "health": {"check": str, "problems": [str]},  # of schema 1
    "check_finished": {"check": _CHECK},
    "suite": {"altered": [str], "manifest": {"version": str, "files": {str: str}, "checks": {str: _SUITE_CHECK}}},
    "fresh_world": {"check": str, "after": str},
    "session": {
        **dict.fromkeys(("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "ini_file", "ini_options", "rootdir"), str),
        "plugins": [{"name": str, "version": str, "file": str}],
        "conftests": [{"file": str, "sha256": str}],
        "asked_for": [str],
    },
    "interference": {"found": [{"kind": str, "name": str, "file": str, "checks": [str]}]},
    "spoiled": {"why": str},
    "deselected": {"checks": [str]},
    "verdict": {"verdict": frozenset(VERDICTS), "reasons": [str], "broken": str, "exit_status": whole},
}


@dataclass(frozen=True)
class Interference:
    """A hook around checks of the suite, or a fixture that these use, that is neither pytest's nor this plugin's nor
    the suite's own."""

    kind: str  # hook or fixture
    name: str
    file: str
    checks: tuple[str, ...] = ()  # that use the fixture; a hook stands around all

    def __str__(self) -> str:
        if not self.checks:
            return f"the hook {self.name} of {self.file} stood around the suite's checks and could change their outcome"
        more = f" and {len(self.checks) - 1} more" if len(self.checks) > 1 else ""
        return f"the fixture {self.name} of {self.file} took part in {self.checks[0]}{more}"


@dataclass
class Record:
    """What happened in a run, folded from its events in their order."""

    run: dict[str, Any] = field(default_factory=dict)
    topology: GpuTopology = field(default_factory=GpuTopology)
    machine: dict[str, Any] = field(default_factory=dict)  # the document of hardware.machine
    profile: Given | None = None  # the one that was given, if any was
    worlds: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    deselected: list[str] = field(default_factory=list)
    manifest: Suite | None = None  # of the suite that ran; None in evidence of versions that recorded none
    altered: list[str] = field(default_factory=list)  # files of the suite that are not as they were shipped
    session: dict[str, Any] = field(default_factory=dict)  # what else ran: plugins, conftest files, options
    earlier_sessions: list[dict[str, Any]] = field(default_factory=list)  # of the runs that this one goes on with
    interference: list[Interference] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)  # what keeps the run from being complete, whatever its checks say
    progress: dict[str, tuple[float, float]] = field(default_factory=dict)  # check: seconds done, and of how many
    telemetry: list[dict[str, Any]] = field(default_factory=list)  # samples: "time" and "gpus"
    faults: list[Fault] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # check, begin, end: seconds since the epoch
    _begun: dict[str, float] = field(default_factory=dict)
    _once: set[object] = field(default_factory=set)
    _samples: int = 0
    _stride: int = 1
    verdict: str | None = None
    reasons: list[str] = field(default_factory=list)
    broken: str = ""  # why the run did not come to its end
    exit_status: int | None = None
    contradictions: list[str] = field(default_factory=list)  # what no run says of itself

    @property
    def suite(self) -> Suite:
        """What the suite that made this evidence consists of; one without checks if nobody knows."""
        return self.manifest or of_version(self.run.get("plugin"))

    def add(self, event: Mapping[str, Any]) -> None:
        if self.verdict is not None:
            raise ValueError("it stands after the verdict, which is the last event of a run")
        kind = event.get("event")
        if not self.run and kind != "run":
            self.contradictions.append(f"it begins with an event {kind}, and not with a run")
        if kind in ONCE and kind in self._once:
            self.contradictions.append(f"it has two events {kind}")
        self._once.add(kind)
        match event:
            case {"event": "run", **run}:
                self.run = run
            case {"event": "topology", "topology": topology}:
                self.topology = GpuTopology.from_json(topology)
            case {"event": "profile", "profile": profile}:
                self.profile = Given.from_json(profile)
            case {"event": "machine", "machine": machine}:
                self.machine = machine
            case {"event": "world_started", **world}:
                self.worlds.append(world)
            case {"event": "check_started", "check": check}:
                self.started.append(check)
                self._begun[check] = _seconds(event)
            case {"event": "progress", "check": check, "done": done, "of": whole}:
                self.progress[check] = (done, whole)
            case {"event": "telemetry", "sample": sample}:
                self._keep(sample)
            case {"event": "finding", "finding": finding}:
                self.findings.append(Finding.from_json(finding))
            case {"event": "fault", "fault": fault}:
                found = Fault.from_json(fault)
                self.faults.append(replace(found, what=f"{found.what}{_where(event)}"))
            case {"event": "health", "check": check, "problems": problems}:
                self.faults += [old_evidence.worsened(check, problem) for problem in problems]
            case {"event": "check_finished", "check": check}:
                self._finish(Check(**check))
                if check["id"] in self._begun:
                    self.spans.append((check["id"], self._begun[check["id"]], _seconds(event)))
            case {"event": "suite"}:
                self.altered += [f"{name}{_where(event)}" for name in event.get("altered", [])]
                if "manifest" in event and "in_run" not in event:
                    if self.manifest is not None:
                        self.contradictions.append("it has two manifests of its suite")
                    self.manifest = Suite.from_json(event["manifest"])
            case {"event": "session", "in_run": _, **content}:
                self.earlier_sessions.append({**content, "in_run": event["in_run"]})
            case {"event": "session", **content}:
                self.session = content
            case {"event": "interference", "found": found}:
                self.interference += [
                    Interference(each["kind"], each["name"], f"{each['file']}{_where(event)}", tuple(each["checks"]))
                    for each in found
                ]
            case {"event": "spoiled", "why": why}:
                self.spoiled.append(f"{why}{_where(event)}")
            case {"event": "deselected", "checks": checks}:
                self.deselected += checks
            case {"event": "verdict", "verdict": verdict, "reasons": reasons}:
                self.verdict, self.reasons = verdict, reasons
                self.broken, self.exit_status = event.get("broken", ""), event.get("exit_status")
            case {"event": "fresh_world"}:  # for who reads the file
                pass
            case {"event": kind} if kind in FIELDS:
                raise ValueError(f"an event {kind} that lacks what it is there for")

    def _finish(self, check: Check) -> None:
        before = self.checks.get(check.id)
        if before and before.outcome != check.outcome:
            self.contradictions.append(f"{check.id} finished twice: {before.outcome}, and {check.outcome}")
        # A check that a hook before ours kept from starting may have failed; it cannot have passed.
        if check.id not in self._begun and not check.run and check.outcome == "passed":
            self.contradictions.append(f"{check.id} passed before it started")
        if check.run and check.run not in [earlier["run"] for earlier in self.run.get("resumed", ())]:
            self.contradictions.append(f"{check.id} comes from {check.run}, with which this run does not go on")
        self.checks[check.id] = check

    def _keep(self, sample: dict[str, Any]) -> None:
        """Telemetry for the plots: of a run of days every second sample, every fourth, and so on. The file has all."""
        if self._samples % self._stride == 0:
            self.telemetry.append(sample)
        self._samples += 1
        if len(self.telemetry) == MOST_SAMPLES:
            del self.telemetry[1::2]
            self._stride *= 2


def _where(event: Mapping[str, Any]) -> str:
    """Of an event that was taken over from an earlier run: which one."""
    return f" (in run {event['in_run']})" if "in_run" in event else ""


def _seconds(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["t"]).timestamp() if "t" in event else 0.0


def sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it. OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of an evidence.jsonl, as `events.read` gives them."""
    return (event for _, event in read_events(path, FIELDS))


def read(path: Path) -> Record:
    """The record of a run from its evidence.jsonl. A last line cut short by a dying machine is left out.

    OSError if it cannot be read; ValueError that names the line if one is no event.
    """
    record = Record()
    for line, event in read_events(path, FIELDS):
        try:
            record.add(event)
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            told = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{path}, line {line}: not an event of a run ({told})") from None
    if record.run.get("schema") == 1:
        record.faults += old_evidence.faults(record.checks.values(), record.findings)
    return record
