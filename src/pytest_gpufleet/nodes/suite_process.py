"""The run of a node alone: `python -m pytest` as a child, and what its evidence tells while it grows."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.events import LONGEST_LINE, STARTED_BY
from pytest_gpufleet.nodes.messages import RunSuite, SuiteEnded, SuiteNews
from pytest_gpufleet.world.engines import processes


def sizes(folder: Path) -> dict[str, int]:
    """Every regular file below a folder, by its name seen from there, with its size in bytes. No link is followed."""
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):  # a run that goes on writes files and gives them other names
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    found[path.relative_to(folder).as_posix()] = state.st_size
    return found


def part(folder: Path, name: str, offset: int, most: int) -> bytes:
    """`most` bytes of a regular file from `offset` on; fewer at its end. OSError if it cannot be read, or if its name
    leads out of the folder, be it by a link."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()) or path.resolve() == folder.resolve():
        raise OSError(f"{name} is not the name of a file below the folder of a run")
    with safe_files.open_regular(path) as file:
        return os.pread(file.fileno(), most, offset)


EVIDENCE = "evidence.jsonl"  # as run/folder.py calls it
NOT_PASSED_ON = ("PYTEST_ADDOPTS", STARTED_BY)  # of the run of all nodes: what is meant for each is told
ONE_OF_MANY = "GPUFLEET_ONE_OF_MANY"  # set for it: hooks hear of all nodes where the run of all of them is
OUTPUT_BYTES = 16 * 1024  # the end of a traceback, or of pytest's own summary


class _Sample(msgspec.Struct):
    gpus: tuple[dict[str, Any], ...] = ()


class _Line(msgspec.Struct):
    """What is looked at in a line of the evidence."""

    event: str
    check: Any = None  # its name, of one that begins
    sample: _Sample = msgspec.field(default_factory=_Sample)


class SuiteProcess:
    """Started when it is made. `check`: what it is at. `readings`: the latest of each GPU. OSError if it cannot be
    started.

    Its reports go below a folder that is made for it in `keep_in`. It has a session of its own, and it ends when this
    process does, whatever ends that.
    """

    def __init__(self, asked: RunSuite, keep_in: Path, environment: Mapping[str, str]) -> None:
        self.check = ""
        self.readings: Sequence[Mapping[str, Any]] = ()
        self._reports = Path(tempfile.mkdtemp(prefix="run-", dir=keep_in))
        self._output = keep_in / f"{self._reports.name}.output"
        self._read = 0  # bytes of its evidence
        self.over = False  # its end was told
        held, self._lifeline = os.pipe()
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *asked.arguments, f"--fleet-dir={self._reports}"],
                    cwd=asked.folder,
                    env={name: value for name, value in environment.items() if name not in NOT_PASSED_ON}
                    | {**asked.variables, ONE_OF_MANY: "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[held],
                    start_new_session=True,
                )
            self.pid = self._process.pid
            processes.end_with(held, self.pid)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(held)

    @property
    def folder(self) -> Path | None:
        """Of its run, once there is one."""
        return next((path.parent for path in self._reports.glob(f"*/{EVIDENCE}")), None)

    def news(self) -> list[SuiteNews | SuiteEnded]:
        """What has happened since the last time."""
        if self.over:
            return []
        status = self._process.poll()  # asked first: what it wrote before it ended comes before its end
        lines = self._lines()
        told: list[SuiteNews | SuiteEnded] = [SuiteNews(lines)] if lines else []
        if status is not None:
            self.over = True
            os.close(self._lifeline)
            told.append(self._ended(status))
        return told

    def _lines(self) -> tuple[bytes, ...]:
        """Those of its evidence that are complete by now and were not told yet, without telemetry."""
        folder = self.folder
        if folder is None:
            return ()
        try:  # anew each time: a run writes its evidence again if somebody removes it
            with safe_files.open_regular(folder / EVIDENCE) as file:
                file.seek(self._read)
                whole, newline, _ = file.read(LONGEST_LINE + 1).rpartition(b"\n")
        except OSError:
            return ()
        self._read += len(whole) + len(newline)
        return tuple(line for line in whole.split(b"\n") if self._is_news(line))

    def _is_news(self, line: bytes) -> bool:
        try:
            known = msgspec.json.decode(line, type=_Line)
        except ValueError:  # somebody else wrote into the file, which the run itself will tell
            return False
        if known.event == "check_started":
            self.check = str(known.check)
        if known.event == "telemetry":
            self.readings = known.sample.gpus
        return known.event != "telemetry"

    def _ended(self, status: int) -> SuiteEnded:
        size = self._output.stat().st_size
        output = part(self._output.parent, self._output.name, max(0, size - OUTPUT_BYTES), OUTPUT_BYTES)
        folder = self.folder
        files = sizes(folder) if folder else {}
        return SuiteEnded(status, output.decode(errors="replace"), folder.name if folder else "", files)
