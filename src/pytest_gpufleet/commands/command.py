"""What a subcommand of `gpufleet` is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.report import wording
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, REPORT, SUMMARY

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def printing() -> Iterator[None]:
    """Around all that a command prints: who reads it may leave early (`gpufleet judge DIR | head -1`), which changes
    nothing about the exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python itself writes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(text: str, file: TextIO | None = None) -> None:
    """Print one line: what others wrote cannot add lines that look like ours, nor steer the terminal."""
    print(" ".join(wording.clean(text).splitlines()), file=file)


def new_console(**options: Any) -> Console:
    """A console of rich that leaves a reader who leaves to `printing`: rich's own would end the process with status 1,
    which means REJECTED."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Screen(**options)


def print_lines(lines: Iterable[tuple[str, Mapping[str, bool]]]) -> None:
    """Print lines of a summary, each with its markup."""
    from rich.text import Text

    console = new_console(highlight=False, soft_wrap=True)
    for text, markup in lines:
        console.print(Text(text, style=" ".join(markup)))


@dataclass(frozen=True)
class Command:
    """A subcommand: what its help says, its arguments, and what it does; `run` gives the exit status.

    `details` goes on where `help` ends; `statuses` says what its exit statuses mean beyond those of all commands.
    `passes_on`: arguments that it does not know are no mistake, and `run` has them as `passed_on`.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    details: str = ""
    statuses: str = ""
    passes_on: bool = False


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
