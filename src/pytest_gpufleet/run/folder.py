"""The folder of a run, and the files in it."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import NodeFound
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, read_own
from pytest_gpufleet.verdict.reading import read

EVIDENCE, SUMMARY, REPORT, JUNIT = "evidence.jsonl", "summary.json", "report.html", "junit.xml"
TEXT, NODES = "report.txt", "nodes"
WRITTEN = {EVIDENCE, SUMMARY, REPORT, JUNIT, TEXT}  # by a run, beside nodes
MOST_BYTES = 256 << 20  # of a report or a summary

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")  # what no name of a host has, and a path might take otherwise


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
        return RunFolder(self.path / NODES / f"{node.index}-{_NO_NAME.sub('_', node.host)}")

    def own_runs(self, record: Record) -> dict[int, HostRun]:
        """The nodes' own runs of a run on many, by their numbers, as far as their evidence is in this folder, and this
        run has its SHA-256."""
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


# --fleet-keep: which folders of earlier runs are removed when a run is over.
#
# Each of these stays, however old it is: the last run that ended ACCEPTED, one that is signed, one that has not ended,
# that another user or another machine has made, or in which anything stands that no run writes.

ENDED = {EVIDENCE, SUMMARY, REPORT}  # what is there when a run has ended
WHEN = re.compile(r"-\d{8}T\d{6}Z(-\d+)?$")  # behind the name of the host


class Stated(msgspec.Struct, frozen=True):
    """What a summary of any version says of itself."""

    schema: int
    verdict: str
    evidence_sha256: str
    report_sha256: str = ""


def prune(own: RunFolder, host: str, keep: int) -> tuple[list[str], list[str]]:
    """Remove what a run in `own` finds beside it, but for the `keep` latest runs of `host`, of which it is one. The
    names of the folders that were removed, and why others could not be."""
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
            if WHEN.sub("", path.name) == host and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
                summary = RunFolder(path).content(SUMMARY) or b""
                verdicts[path] = msgspec.json.decode(summary, type=Stated).verdict
    runs = sorted(verdicts, reverse=True)
    stay = {here, next((path for path in runs if verdicts[path] == "ACCEPTED"), here)}
    return [path for path in runs[keep:] if path not in stay and _is_only_a_run(path, ENDED)]


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
