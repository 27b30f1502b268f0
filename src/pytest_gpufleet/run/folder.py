"""The folders that runs leave behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pytest_gpufleet import safe_files
from pytest_gpufleet.commands.command import CommandFailed
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.run import summary
from pytest_gpufleet.verdict.contradictions import contradictions

EVIDENCE = "evidence.jsonl"
REPORT = "report.html"
LEFT_BY_A_RUN = (EVIDENCE, summary.FILE, REPORT, "junit.xml")
MOST_BYTES = 256 << 20  # of a report or a summary
SIGNED_BY = "signed-by-"  # how the files of a signature begin

# As the report's template writes them. No message of a check can look so: they are escaped.
_SUM_IN_REPORT = re.compile(r'<code id="fleet-sha256">([0-9a-f]{64})</code>')
_JUDGED_AGAIN = '<code id="fleet-sha256-judged-again">'


def record_of(folder: Path) -> Record:
    """The record of the run in `folder`. CommandFailed if there is none, or if it contradicts itself."""
    record = as_written(folder)
    with of_anybody(folder):
        found = contradictions(record)
    if found:
        more = f" (and {len(found) - 1} more: see `gpufleet verify`)" if len(found) > 1 else ""
        raise CommandFailed(f"{folder}: the evidence contradicts itself: {found[0]}{more}")
    return record


def as_written(folder: Path) -> Record:
    """The record of the run in `folder`, whether it contradicts itself or not. CommandFailed if there is none."""
    path = folder / EVIDENCE
    try:
        record = read(path)
    except OSError as error:
        raise CommandFailed(f"{folder} is not the folder of a run: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CommandFailed(f"{folder}: the evidence is damaged: {error}") from None
    if not record.run:
        raise CommandFailed(f"{folder} is not the folder of a run: {path} does not begin with one")
    return record


@contextmanager
def of_anybody(folder: Path) -> Iterator[None]:
    """Around what is made of evidence, which has the form of a run's and may still say what no run ever would."""
    try:
        yield
    except CommandFailed:
        raise
    except Exception as error:
        raise CommandFailed(
            f"{folder}: nothing can be made of its evidence, which no run wrote so: {error!r}"
        ) from None


def records_of(folders: Sequence[Path]) -> dict[str, Record]:
    """The records of several runs by a name for each: its folder's, or the path where that is not clear enough."""
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise CommandFailed("the same folder is given twice")
    return {name: record_of(folder) for name, folder in zip(names, folders, strict=True)}


def stated_sums(folder: Path) -> dict[str, str | None]:
    """The SHA-256 of the evidence that report and summary of a run say they were made of.

    None where there is no such file, "" where it says nothing.
    """
    texts = {name: text_of(folder / name) for name in _SUMS}
    return {name: None if text is None else _SUMS[name](text) for name, text in texts.items()}


def is_judgement(folder: Path) -> bool:
    """Whether the report of a run is none, but a later judgement of its figures by `gpufleet judge`."""
    return _JUDGED_AGAIN in (text_of(folder / REPORT) or "")


def _in_report(page: str) -> str:
    found = _SUM_IN_REPORT.search(page)
    return found[1] if found else ""


def _in_summary(document: str) -> str:
    try:
        return str(json.loads(document)["evidence_sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


_SUMS = {REPORT: _in_report, summary.FILE: _in_summary}


def text_of(path: Path) -> str | None:
    """What a run's own file says, None if it is not there. CommandFailed if it cannot be read."""
    try:
        with safe_files.open_regular(path, MOST_BYTES) as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from None


def check_output(output: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """CommandFailed if `output` is a file that only a run itself writes, or one of the `inputs` of a command."""
    if output is None:
        return
    target = output.resolve()
    # A judgement in the place of a report that is missing would be taken for it.
    left = target.name in LEFT_BY_A_RUN or target.name.startswith(SIGNED_BY)
    if left and any((target.parent / name).exists() for name in (EVIDENCE, summary.FILE)):
        raise CommandFailed(f"{output} belongs to the run in {target.parent} and is left as it is: name another file")
    if target.exists() and any(path is not None and path.exists() and path.samefile(target) for path in inputs):
        raise CommandFailed(f"{output} is what this command reads and is left as it is: name another file")


def write(path: Path, text: str) -> None:
    """Write a file that was asked for. CommandFailed if that cannot be done."""
    try:
        safe_files.write_text(path, text)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from None
