"""The append-only record of a run, and what can be read back from it."""

import hashlib
import io
import os
import threading
from pathlib import Path

import msgspec

from pytest_gpufleet.model import events
from pytest_gpufleet.model.events import LONGEST_LINE, Event, Judged, MachineRead, Spoiled, TopologyFound
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.redaction import aliased
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.reading import read

NEW = os.O_CREAT | os.O_EXCL  # a file that was not there


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
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if of_dead_process else NEW)
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
