"""What a command writes, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, REPORT, SUMMARY

SIGNED_BY = "signed-by-"  # how the files of a signature begin


def check_output(output: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Refused if `output` is a file that only a run itself writes, or one of the `inputs` of a command."""
    if output is None:
        return
    target = output.resolve()
    # A judgement in the place of a report that is missing would be taken for it.
    left = target.name in (EVIDENCE, SUMMARY, REPORT, JUNIT) or target.name.startswith(SIGNED_BY)
    if left and any((target.parent / name).exists() for name in (EVIDENCE, SUMMARY)):
        raise Refused(f"{output} belongs to the run in {target.parent} and is left as it is: name another file")
    if target.exists() and any(path is not None and path.exists() and path.samefile(target) for path in inputs):
        raise Refused(f"{output} is what this command reads and is left as it is: name another file")


def check_is_new(output: Path | None) -> None:
    """Refused if `output` is there already."""
    if output is not None and output.is_file():
        raise Refused(f"{output} is there already and is left as it is: name another file, or remove it")


def write(path: Path, text: str) -> None:
    """Write a file that was asked for. Refused if that cannot be done."""
    try:
        safe_files.write_text(path, text)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
