"""`gpufleet bundle`: one archive of a run, with what vendors ask for when hardware goes back to them."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from pytest_gpufleet import safe_files
from pytest_gpufleet.commands import verify
from pytest_gpufleet.commands.command import Command, printing, tell
from pytest_gpufleet.commands.writing import SIGNED_BY, check_is_new
from pytest_gpufleet.hardware import host, vendor_reports
from pytest_gpufleet.hardware.tools import Untold
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.redaction import redacted, throughout
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, NODES, REPORT, SUMMARY, RunFolder
from pytest_gpufleet.verdict.verdict import ended

CONTENTS = "CONTENTS.txt"
OF_A_RUN = (EVIDENCE, SUMMARY, REPORT, JUNIT)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the archive (default: the folder's name and .tar.gz, here)"
    )
    parser.add_argument(
        "--no-collect", action="store_true", help="start no program of a vendor, which takes minutes: the run alone"
    )


@dataclass(frozen=True)
class Source:
    """What is to go into the archive under a name: a file as it is, or a text that is made now. What is missing raises
    Untold or OSError."""

    name: str
    file: Path | None = None
    make: Callable[[], str] = str


def _run(given: argparse.Namespace) -> int:
    folder: RunFolder = given.folder
    record = folder.as_written()
    name = folder.name or "run"
    output = given.output or Path(f"{name}.tar.gz")
    check_is_new(output)
    with folder.of_anybody():
        head = _head(folder, record)
        sources = [*_of_the_run(folder, record), *_of_vendors(record, given.no_collect)]
    told = _written(output, name, head, sources, _seconds(record))
    with printing():
        for line in told:
            tell(line)
        tell(f"{output}: written")
    return 0


def _head(folder: RunFolder, record: Record) -> list[str]:
    """What the run is, and what does not belong together in its folder."""
    record = ended(record)
    try:
        problems, signed = verify.examined(folder, record, folder.digest())
    except Refused as error:  # a vendor wants the rest all the same
        problems, signed = [str(error)], []
    run = f"The run of {record.run.host} at {record.run.utc}: {record.verdict}. Its telemetry is in {EVIDENCE}."
    return [run, *(f"Problem: {problem}" for problem in problems), *signed]


def _seconds(record: Record) -> int:
    return int(datetime.fromisoformat(record.run.utc).timestamp()) if record.run.utc else 0


def _of_the_run(folder: RunFolder, record: Record) -> Iterator[Source]:
    yield from _files(folder, "")
    for node in record.run.nodes if record.of_cluster else ():
        own = folder.of_node(node)
        yield from _files(own, f"{NODES}/{own.name}/")


def _files(folder: RunFolder, prefix: str) -> Iterator[Source]:
    try:
        signed = sorted(name for name in os.listdir(folder.path) if name.startswith(SIGNED_BY))
    except OSError:
        signed = []
    for name in (*OF_A_RUN, *signed):
        yield Source(f"{prefix}{name}", file=folder / name)


def _of_vendors(record: Record, run_alone: bool) -> Iterator[Source]:
    machine = record.machine.host

    def diagnostic() -> str:
        if "dcgm" not in machine:
            raise Untold("this run did not start it: level burnin does, where DCGM is installed")
        return json.dumps(throughout(machine["dcgm"]), indent=1) + "\n"

    def here(report: Callable[[], str]) -> Callable[[], str]:
        def made() -> str:
            if why := "--no-collect was given" if run_alone else _elsewhere(record):
                raise Untold(why)
            return redacted(report())

        return made

    ports: Any = machine.get("network_ports") or ()
    yield Source("dcgmi-diag.json", make=diagnostic)
    yield Source("nvidia-bug-report.log", make=here(vendor_reports.bug_report))
    yield Source("ibdiagnet-errors.txt", make=here(lambda: vendor_reports.fabric_errors(ports)))


def _elsewhere(record: Record) -> str:
    """Why what is told here is not of the machine of the run; "" if it is."""
    if record.of_cluster:
        return "the run is of several hosts: run `gpufleet bundle` on each, with the folder of its own run"
    name, serial = socket.gethostname(), host.serial()
    (node, *_) = record.run.nodes or (None,)
    recorded = node.serial if node else None
    if record.run.host != name:
        return f"the run is of {record.run.host}, and this is {name}: run `gpufleet bundle` there"
    return "this is another machine of the same name" if serial and recorded and serial != recorded else ""


def _written(output: Path, name: str, head: list[str], sources: list[Source], seconds: int) -> list[str]:
    """The lines of what was left out. The archive has the same bytes whenever it has the same files. Refused if there
    is a file of that name, or if it cannot be written."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(output, flags, 0o600), "wb")
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror}") from None
    try:
        with (
            file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            return _filled(archive, name, head, sources, seconds)
    except BaseException as error:
        output.unlink(missing_ok=True)  # half of one
        if isinstance(error, OSError):
            raise Refused(f"{output} cannot be written: {error.strerror}") from None
        raise


def _filled(archive: tarfile.TarFile, name: str, head: list[str], sources: list[Source], seconds: int) -> list[str]:
    there, missing = [], []
    for source in sorted(sources, key=lambda each: each.name):
        try:
            content = _content(source)
        except (Untold, OSError) as why:
            reason = why.strerror if isinstance(why, OSError) else str(why)
            missing.append(f"{source.name}: left out: {reason}")
            continue
        with content:
            there.append(f"{source.name}: SHA-256 {_add(archive, f'{name}/{source.name}', content, seconds)}")
    told = [redacted(" ".join(line.split())) for line in (*head, *there, *missing)]
    _add(archive, f"{name}/{CONTENTS}", io.BytesIO("".join(f"{line}\n" for line in told).encode()), seconds)
    return missing


def _content(source: Source) -> BinaryIO:
    if source.file is None:
        return io.BytesIO(source.make().encode())
    for folder in (source.file.parent, source.file.parent.parent) if source.name.startswith(f"{NODES}/") else ():
        if folder.is_symlink():
            raise Untold(f"{folder.name} is a link, which is not followed")
    return safe_files.open_regular(source.file)


def _add(archive: tarfile.TarFile, name: str, content: BinaryIO, seconds: int) -> str:
    """The SHA-256 of what was added."""
    digest, size = hashlib.sha256(), 0
    while part := content.read(1 << 20):
        digest.update(part)
        size += len(part)
    content.seek(0)
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, seconds
    archive.addfile(member, content)
    return digest.hexdigest()


BUNDLE = Command(
    "put a run into one archive, with what vendors ask for when hardware goes back to them",
    _arguments,
    _run,
    "Evidence, report, summary and signatures as they are; the JSON of `dcgmi diag` that the run recorded; on the host "
    f"of the run also nvidia-bug-report.sh and the errors of ibdiagnet. What is missing is told in {CONTENTS}.",
)
