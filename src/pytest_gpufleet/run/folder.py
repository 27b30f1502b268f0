"""The folder of a run, its evidence, and the other files in it."""

import hashlib
import io
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from pytest_gpufleet import safe_files
from pytest_gpufleet.model import events
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import LONGEST_LINE, Event, Judged, MachineRead, NodeFound, Spoiled, TopologyFound
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.redaction import aliased
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, read_own
from pytest_gpufleet.verdict.judgement import read

EVIDENCE, SUMMARY, REPORT, JUNIT = "evidence.jsonl", "summary.json", "report.html", "junit.xml"
TEXT, NODES = "report.txt", "nodes"
WRITTEN = {EVIDENCE, SUMMARY, REPORT, JUNIT, TEXT}  # by a run, beside nodes
MOST_BYTES = 256 << 20  # of a report or a summary


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def make(cls, parent: Path, name: str) -> "RunFolder":
        """A folder that no other run has, not even one that starts in the same second. Refused if there is none."""
        folder, number = parent / name, 1
        while True:
            try:
                folder.mkdir(parents=True)
                return cls(folder)
            except OSError as error:
                if not folder.is_dir():  # else another run was here first
                    text = f"cannot be written ({error.strerror}): choose another with --fleet-dir"
                    raise Refused(f"the report folder {folder} {text}") from None
            number += 1
            folder = parent / f"{name}-{number}"

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def evidence(self) -> Path:
        return self.path / EVIDENCE

    @property
    def report(self) -> Path:
        return self.path / REPORT

    def of_node(self, node: NodeFound) -> "RunFolder":
        name = re.sub(r"[^A-Za-z0-9._-]", "_", node.host)  # what no name has, and a path might take otherwise
        return RunFolder(self.path / NODES / f"{node.index}-{name}")

    def own_runs(self, record: Record) -> dict[int, HostRun]:
        """The nodes' own runs of a run on many, by number, whose evidence is here, and its SHA-256 in `record`."""
        common, found = Common(), {}
        for number, end in record.finished.items():
            own = self.of_node(record.node(number))
            with suppress(OSError, ValueError, Refused):
                if end.sha256:
                    of_node = read_own(own.evidence, common, record.hosts[number])
                    found[number] = HostRun(f"{NODES}/{own.name}", end.sha256, of_node)
        return found

    def reports(self, runs: Iterable[HostRun], beside: Path) -> dict[str, str]:
        """The addresses of the reports of those runs that have one, by folder, as seen from a page in `beside`."""
        files = {run.folder: self / run.folder / REPORT for run in runs}
        return {name: quote(os.path.relpath(file, beside)) for name, file in files.items() if file.is_file()}

    def record(self) -> Record:
        """The record of the run, as its evidence has it. Refused if there is none."""
        no_run = f"{self} is not the folder of a run: {self.evidence}"
        try:
            record = read(self.evidence)
        except OSError as error:
            raise Refused(f"{no_run} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise Refused(f"{self}: the evidence is damaged: {error}") from None
        except Refused as error:
            raise Refused(f"{self}: {error}") from None
        if not record.began:
            raise Refused(f"{no_run} does not begin with one")
        return record

    @contextmanager
    def of_anybody(self) -> Iterator[None]:
        """Around what is made of evidence, which has the form of a run's and may still say what no run ever would."""
        try:
            yield
        except (Refused, ModuleNotFoundError):
            raise
        except Exception as error:
            raise Refused(f"{self}: nothing can be made of its evidence, which no run wrote so: {error!r}") from None

    def digest(self) -> str:
        return sha256(self.evidence)

    def content(self, name: str) -> bytes | None:
        """A file of the run, None if it is not there. Refused if it cannot be read."""
        try:
            with safe_files.open_regular(self / name, MOST_BYTES) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"{self / name} cannot be read: {error.strerror}") from None


class Evidence:
    """Writes evidence.jsonl, one line an event, on disk before `add` returns; `record` is what it amounts to.
    If the disk is full, or somebody removes or changes the file, the run goes on. What happened is an event of its own
    (`spoiled`), which no verdict can pass over."""

    sha256 = ""  # of all that was written, once it is sealed

    def __init__(self, path: Path, of_dead_process: bool = False) -> None:
        """In a file that was not there; `of_dead_process`: in that of a process which can write no more."""
        self.path = path
        self._written = hashlib.sha256()
        self._owed: list[bytes] = []  # what went wrong, and could not be written when it did
        self._late = ""  # what went wrong after the verdict
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= 0 if of_dead_process else os.O_CREAT | os.O_EXCL
        self._file = io.FileIO(os.open(path, flags, 0o666), "r+")
        written = b"".join(self._file.readall().rpartition(b"\n")[:2])  # without a last line that was cut short
        self._file.truncate(len(written))
        self._written.update(written)
        self.record = read(path) if of_dead_process else Record()
        self._place = path.absolute()  # a test may go into another folder
        self._lock = threading.RLock()  # telemetry comes from a thread of its own

    def add(self, event: Event) -> None:
        with self._lock:
            if self._file.closed:  # a GPU that hung in its driver may answer after the verdict
                return
            given = msgspec.structs.replace(event, t=events.now())
            event, text = events.recorded(given)
            line = text.encode() + b"\n"
            if len(line) > LONGEST_LINE:
                kind, longest = event.__struct_config__.tag, LONGEST_LINE >> 20
                raise ValueError(f"an event {kind} is longer than {longest} MiB, and could not be read again")
            # What follows from a finding is not written; what is large is in memory once.
            self.record.add(given if isinstance(given, Judged | MachineRead | TopologyFound) else event)
            try:
                while self._owed:
                    self._write(self._owed[0])
                    del self._owed[0]
                self._write(line)
            except OSError as error:
                if isinstance(event, Spoiled):
                    self._owed.append(line)
                self.spoil(f"the evidence could not be written to {self.path}: {error.strerror}")

    def spoil(self, why: str) -> None:
        """Record what keeps this run, and every run that goes on with it, from being complete; once."""
        with self._lock:
            why = aliased(why)
            if not why or why in self.record.spoiled:
                return
            if self.record.verdict is None:
                self.add(Spoiled(why=why))
            else:
                self._late = self._late or why

    def compare(self) -> None:
        """Hold the whole file against what was written, before the verdict is told."""
        with self._lock:
            try:
                same = os.path.samestat(os.fstat(self._file.fileno()), self._place.lstat())
                if not same or sha256(self._place) != self._written.hexdigest():
                    changed = "was changed by something else while the run went on: it is not what the run wrote"
                    self.spoil(f"{self.path} {changed}")
            except OSError as error:
                self.spoil(f"the evidence of this run is not at {self.path} any more: {error.strerror}")

    def seal(self) -> str:
        """Nothing is added from here on, and `sha256` is known. What was done to the file since `compare`, or ""."""
        with self._lock:
            self.compare()
            self.sha256 = self._written.hexdigest()
            self._file.close()
        return self._late

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            rest = line
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fdatasync(self._file.fileno())  # a machine that dies now must leave this line
        except OSError:
            os.ftruncate(self._file.fileno(), before)  # no half of a line before the next one
            raise
        self._written.update(line)


class Stated(msgspec.Struct, frozen=True):
    """What a summary of any version says of itself."""

    schema: int
    verdict: str
    evidence_sha256: str
    report_sha256: str = ""


def prune(own: RunFolder, host: str, keep: int) -> tuple[list[str], list[str]]:
    """Remove what a run in `own` finds beside it, but for the `keep` latest runs of `host`, of which it is one. The
    names of the folders that were removed, and why others could not be. What stays however old it is: the last run that
    ended ACCEPTED, one that is signed, has not ended, is another user's, or has anything in it that no run writes."""
    names, problems = [], []
    try:
        found = removable(own, host, keep)
    except OSError as error:
        return [], [f"--fleet-keep: {own.path.parent} could not be read: {error.strerror}"]
    for path in found:
        try:
            shutil.rmtree(path)  # which follows no link, not even one that has been put there since
            names.append(path.name)
        except OSError as error:
            if path.exists():  # else another run was here first
                problems.append(f"--fleet-keep: {path} could not be removed: {error.strerror}")
    return names, problems


def removable(own: RunFolder, host: str, keep: int) -> list[Path]:
    """The folders that would be removed, the latest first."""
    here, verdicts = own.path.absolute(), {}
    for path in here.parent.iterdir():
        with suppress(OSError, Refused, msgspec.MsgspecError):
            of_host = re.sub(r"-\d{8}T\d{6}Z(-\d+)?$", "", path.name) == host
            if of_host and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
                verdicts[path] = msgspec.json.decode(RunFolder(path).content(SUMMARY) or b"", type=Stated).verdict
    runs = sorted(verdicts, reverse=True)
    stay = {here, next((path for path in runs if verdicts[path] == "ACCEPTED"), here)}
    return [path for path in runs[keep:] if path not in stay and _is_only_a_run(path, {EVIDENCE, SUMMARY, REPORT})]


def _is_only_a_run(folder: Path, needed: set[str]) -> bool:
    """Whether there is all that is `needed`, and nothing but what a run writes: no signature, and no link."""
    try:
        found = {path.name: path for path in folder.iterdir()}
        nodes = list(found.pop(NODES).iterdir()) if NODES in found and not found[NODES].is_symlink() else []
    except OSError:
        return False
    files = all(path.is_file() and not path.is_symlink() for path in found.values())
    own_runs = all(path.is_dir() and not path.is_symlink() and _is_only_a_run(path, set()) for path in nodes)
    return files and needed <= found.keys() <= WRITTEN and own_runs
