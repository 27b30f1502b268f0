"""The append-only record of a run, and what can be read back from it."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pytest_gpufleet.hardware.topology import GpuTopology
from pytest_gpufleet.verdict import levels
from pytest_gpufleet.verdict.finding import Finding

SCHEMA = 1
MOST_SAMPLES = 4096

# What the fields of an event must be, where they are there: earlier versions had fewer. A list stands for lists of what
# is in it, a dict for objects with such fields, a set for one of its texts.
_NUMBER = (int, float)
_CHECK = dict.fromkeys(("id", "outcome", "title", "doc", "message", "run", "failed_by"), str)
FIELDS: Mapping[str, Any] = {
    "run": {
        **dict.fromkeys(("host", "utc", "command", "gpus", "python", "pytest", "plugin", "rehearsal_because"), str),
        "level": frozenset(levels.LEVELS),
        "burn_in_seconds": _NUMBER,
        "gpus_present": int,
        "ranks": int,
        "rehearsal": bool,
        "environment": dict,
        "resumed": [{"run": str, "utc": str, "failed": [str]}],
    },
    "topology": {"topology": {"gpus": [{"name": str, "uuid": str, "index": int}], "links": [[str]], "absent": str}},
    "machine": {"machine": dict},
    "check_started": {"check": str},
    "progress": {"check": str, "done": _NUMBER, "of": _NUMBER},
    "telemetry": {"sample": {"time": _NUMBER, "gpus": [dict]}},
    "finding": {"finding": {"check": str, "state": str, "reason": str, "measurement": {"metric": str}}},
    "health": {"check": str, "problems": [str]},
    "check_finished": {"check": {**_CHECK, "seconds": _NUMBER}},
    "suite": {"altered": [str]},
    "deselected": {"checks": [str]},
    "verdict": {"verdict": str, "reasons": [str], "broken": str, "exit_status": int},
}

# What made a check fail: figures that missed their limits and nothing else, or anything else. Only the first can be
# undone by judging the figures against other limits. Up to version 0.2 a missed limit could also cut a check off.
FailedBy = Literal["", "limits", "limits, with more to do", "other"]


@dataclass(frozen=True)
class Check:
    """One acceptance test after it ran. `outcome`: passed, failed, skipped or not applicable."""

    id: str
    outcome: str
    seconds: float
    title: str = ""  # first line of its docstring
    doc: str = ""  # the rest: why it matters, what to do
    message: str = ""  # why it failed, was skipped or does not apply
    run: str = ""  # the earlier run that this was carried over from
    failed_by: FailedBy = ""


@dataclass
class Record:
    """What happened in a run, folded from its events in their order."""

    run: dict[str, Any] = field(default_factory=dict)
    topology: GpuTopology = field(default_factory=GpuTopology)
    machine: dict[str, Any] = field(default_factory=dict)  # the document of hardware.machine
    worlds: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    deselected: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)  # files of the suite that are not as they were shipped
    progress: dict[str, tuple[float, float]] = field(default_factory=dict)  # check: seconds done, and of how many
    telemetry: list[dict[str, Any]] = field(default_factory=list)  # samples: "time" and "gpus"
    worsened: list[tuple[str, str]] = field(default_factory=list)  # check, and what got worse on a GPU while it ran
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # check, begin, end: seconds since the epoch
    _begun: dict[str, float] = field(default_factory=dict)
    _samples: int = 0
    _stride: int = 1
    verdict: str | None = None
    reasons: list[str] = field(default_factory=list)
    broken: str = ""  # why the run did not come to its end
    exit_status: int | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        if self.verdict is not None:
            raise ValueError("it stands after the verdict, which is the last event of a run")
        match event:
            case {"event": "run", **run}:
                self.run = run
            case {"event": "topology", "topology": topology}:
                self.topology = GpuTopology.from_json(topology)
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
            case {"event": "health", "check": check, "problems": problems}:
                self.worsened += [(check, problem) for problem in problems]
            case {"event": "check_finished", "check": check}:
                self.checks[check["id"]] = Check(**check)
                if check["id"] in self._begun:
                    self.spans.append((check["id"], self._begun[check["id"]], _seconds(event)))
            case {"event": "suite", "altered": names}:
                self.altered += names
            case {"event": "deselected", "checks": checks}:
                self.deselected += checks
            case {"event": "verdict", "verdict": verdict, "reasons": reasons}:
                self.verdict, self.reasons = verdict, reasons
                self.broken, self.exit_status = event.get("broken", ""), event.get("exit_status")

    def _keep(self, sample: dict[str, Any]) -> None:
        """Telemetry for the plots: of a run of days every second sample, every fourth, and so on. The file has all."""
        if self._samples % self._stride == 0:
            self.telemetry.append(sample)
        self._samples += 1
        if len(self.telemetry) == MOST_SAMPLES:
            del self.telemetry[1::2]
            self._stride *= 2


def _seconds(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["t"]).timestamp() if "t" in event else 0.0


class Evidence:
    """Writes evidence.jsonl, one line an event, on disk before `add` returns; `record` is what it amounts to.

    If the disk is full or the folder is removed, the run goes on: `trouble` then says what happened.
    """

    sha256 = ""  # of the whole file, once it is sealed

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = Record()
        self.trouble = ""
        self._file = path.open("ab+", buffering=0)
        self._lock = threading.Lock()  # telemetry comes from a thread of its own

    def add(self, event: str, **content: Any) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"t": now, "event": event, **content})
        with self._lock:
            if self._file.closed:  # a GPU that hung in its driver may answer after the verdict
                return
            self.record.add(json.loads(line))
            self._write(line)

    def _write(self, line: str) -> None:
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._start_again()
            self._file.write(line.encode() + b"\n")
            os.fsync(self._file.fileno())  # a machine that dies now must leave this line
        except OSError as error:
            self.trouble = f"the evidence could not be written to {self.path}: {error.strerror}"

    def _start_again(self) -> None:
        """Somebody removed the file: its content is still there for who has it open."""
        self.trouble = f"{self.path} was removed while the run went on, and was written again"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        removed, self._file = self._file, self.path.open("ab+", buffering=0)
        removed.seek(0)
        self._file.write(removed.read())
        removed.close()

    def seal(self) -> None:
        """The verdict was the last event: nothing is added from here on, and `sha256` is known."""
        self.close()
        try:
            self.sha256 = sha256(self.path)
        except OSError as error:
            self.trouble = f"the evidence could not be read again from {self.path}: {error.strerror}"

    def close(self) -> None:
        with self._lock:
            self._file.close()


def sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it. OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def read(path: Path) -> Record:
    """The record of a run from its evidence.jsonl. A last line cut short by a dying machine is left out.

    OSError if it cannot be read; ValueError that names the line if one is no event.
    """
    record = Record()
    for number, event in _events(path):
        try:
            _check(event, dict, "it")
            _check(event, FIELDS.get(event.get("event"), {}), "")
            record.add(event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            told = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{path}, line {number}: not an event of a run ({told})") from None
    return record


def _check(value: Any, expected: Any, name: str) -> None:
    """ValueError that names the field if a value is not as FIELDS says."""
    match expected:
        case dict():
            _check(value, dict, name)
            for key in expected.keys() & value.keys():
                _check(value[key], expected[key], f"{name}.{key}".lstrip("."))
            return
        case [within]:
            _check(value, list, name)
            for each in value:
                _check(each, within, f"one of {name}")
            return
        case frozenset():
            right = value in expected
        case _:
            right = isinstance(value, expected)
    if not right:
        raise ValueError(f"{name} is {reprlib.repr(value)}")


def _events(path: Path) -> Iterable[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line)
            except ValueError:  # UnicodeDecodeError is one
                if file.read(1):
                    raise ValueError(f"{path}, line {number}: not JSON") from None
