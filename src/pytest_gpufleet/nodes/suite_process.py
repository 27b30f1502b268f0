"""The run of a node alone: `python -m pytest` as a child, and how far it is by its evidence."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from pytest_gpufleet import safe_files
from pytest_gpufleet.model import events
from pytest_gpufleet.nodes.messages import CheckEnded, RunSuite, SuiteEnded
from pytest_gpufleet.world.engines import processes


def sizes(folder: Path) -> dict[str, int]:
    """Every regular file below a folder, by its name seen from there, with its size in bytes. No link is followed."""
    found = {}
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # a run that goes on writes files and gives them other names
            if stat.S_ISREG((state := path.lstat()).st_mode):
                found[path.relative_to(folder).as_posix()] = state.st_size
    return found


def part(folder: Path, name: str, offset: int, most: int) -> bytes:
    """`most` bytes of a regular file from `offset` on; fewer at its end. OSError if it cannot be read, or is a link."""
    with safe_files.open_regular(folder / name) as file:
        return os.pread(file.fileno(), most, offset)


def full_disk(folder: Path, output: bytes = b"") -> str:
    """That the disk of this folder is full, as it is, or as a program wrote when it ended; "" if it is not."""
    full = os.strerror(errno.ENOSPC).encode() in output or shutil.disk_usage(folder).free < FULL_BYTES
    return f"; the disk is full that {folder} is on" if full else ""


EVIDENCE = "evidence.jsonl"  # as run/folder.py calls it
NOT_PASSED_ON = ("PYTEST_ADDOPTS", events.STARTED_BY)  # of the run of all nodes: each gets what is meant for it
ONE_OF_MANY = "GPUFLEET_ONE_OF_MANY"  # set for it: what a site names may not be on each of its nodes
FULL_BYTES = 1 << 20  # or less is free
OUTPUT_BYTES = 16 * 1024  # the end of a traceback, or of pytest's own summary
# Kinds of events that are looked at.
LOOKED_AT = (b'"check_started"', b'"check_finished"', b'"verdict"')


class SuiteProcess:
    """Started when it is made, in a session of its own; it ends when this process does, whatever ends that. OSError if
    it cannot be started. Its reports go below a folder in `keep_in`. `check`: what it is at."""

    def __init__(self, asked: RunSuite, keep_in: Path, environment: Mapping[str, str]) -> None:
        self.check = ""
        self._verdict: tuple[events.VerdictWord | None, tuple[str, ...]] = (None, ())  # with its reasons
        self._reports = Path(tempfile.mkdtemp(prefix="run-", dir=keep_in))
        self._output = keep_in / f"{self._reports.name}.output"
        self._read = 0  # bytes of its evidence
        self.over = False  # its end was reported
        held, self._lifeline = os.pipe()
        try:
            with self._output.open("wb") as output:
                passed_on = {name: value for name, value in environment.items() if name not in NOT_PASSED_ON}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *asked.arguments, f"--fleet-dir={self._reports}"],
                    cwd=asked.folder, env={**passed_on, **asked.variables, ONE_OF_MANY: "1"}, pass_fds=[held],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
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

    def news(self) -> list[CheckEnded | SuiteEnded]:
        """What has happened since the last time."""
        if self.over:
            return []
        status = self._process.poll()  # asked first: what it wrote before it ended comes before its end
        news: list[CheckEnded | SuiteEnded] = [*self._checks()]
        if status is not None:
            self.over = True
            os.close(self._lifeline)
            size = self._output.stat().st_size
            output = part(self._output.parent, self._output.name, max(0, size - OUTPUT_BYTES), OUTPUT_BYTES)
            text, trouble = output.decode(errors="replace"), full_disk(self._reports, output)
            name, files = (self.folder.name, sizes(self.folder)) if self.folder else ("", {})
            news.append(SuiteEnded(status, text, name, files, *self._verdict, trouble))
        return news

    def _checks(self) -> Iterator[CheckEnded]:
        """Those that have ended, by the lines of its evidence that are complete by now and were not read yet."""
        folder, whole = self.folder, b""
        with suppress(OSError):  # opened anew each time: a run writes its evidence again if somebody removes it
            if folder is not None:
                with safe_files.open_regular(folder / EVIDENCE) as file:
                    file.seek(self._read)
                    whole, newline, _ = file.read(events.LONGEST_LINE + 1).rpartition(b"\n")
                self._read += len(whole) + len(newline)
        for line in (each for each in whole.split(b"\n") if any(kind in each for kind in LOOKED_AT)):
            with suppress(ValueError):  # somebody else wrote into the file, which the run itself reports in the end
                match events.typed(msgspec.json.decode(line)):
                    case events.CheckStarted(check=check):
                        self.check = check
                    case events.CheckFinished(check=check):
                        yield CheckEnded(check.id, check.outcome, check.seconds)
                    case events.Verdict(verdict=verdict, reasons=reasons):
                        self._verdict = verdict, reasons
