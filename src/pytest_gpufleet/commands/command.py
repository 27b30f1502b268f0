"""What a subcommand of `gpufleet` is, and what all of them do alike: take arguments, print, write."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.report import wording
from pytest_gpufleet.run.folder import EVIDENCE, SUMMARY, WRITTEN, RunFolder
from pytest_gpufleet.verdict.verdict import EXIT_STATUS

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def printing() -> Iterator[None]:
    """Around what a command prints: who reads it may leave early (`| head -1`) without changing the exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python itself writes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_line(text: str, file: TextIO | None = None) -> None:
    print(wording.one_line(text), file=file)


def new_console(**options: Any) -> Console:
    """A console that leaves a broken pipe to `printing`: rich's own ends the process with status 1, REJECTED."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Screen(**options)


def print_lines(lines: Iterable[tuple[str, Mapping[str, bool]]], report: Path | None) -> None:
    """Print lines of a summary, each with its markup, and where the report is, if there is one."""
    from rich.text import Text

    console = new_console(highlight=False, soft_wrap=True)
    with printing():
        for text, markup in lines:
            console.print(Text(wording.clean(text), style=" ".join(markup)))
        if report:
            print_line(f"report: {report}")


SIGNED_BY = "signed-by-"  # how the names of the files of signatures begin
Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **how: Any) -> Argument:
    """As add_argument of argparse takes it."""
    return names, how


folder = partial(argument, metavar="DIR", type=lambda text: RunFolder(Path(text)))
FOLDER = folder("folder", help="the folder of a run")
folders = partial(folder, "folders", nargs="+")
file = partial(argument, metavar="FILE", type=Path)
output = partial(file, "-o", "--output")
as_json = partial(argument, "--json", action="store_true")


Run = Callable[[argparse.Namespace], int]  # gives the exit status


@dataclass(frozen=True)
class Command:
    """`details` goes on where `help` ends; `statuses` says what exit statuses mean beyond those of all commands.
    `passes_on`: `run` has unknown arguments as `passed_on`."""

    help: str
    run: Run
    arguments: tuple[Argument, ...]
    details: str = ""
    statuses: str = ""
    passes_on: bool = False


def subcommand(help: str, *arguments: Argument, **more: Any) -> Callable[[Run], Command]:
    return lambda run: Command(help, run, arguments, **more)


def check_output(
    output: Path | None, inputs: Iterable[Path | None] = (), new: bool = False, folders: Sequence[RunFolder] = ()
) -> None:
    """Refused if `output` is a file that only a run itself writes, or one of the `inputs` of a command, or there
    already where it has to be `new`, or one file for several `folders`."""
    if output is None:
        return
    if len(folders) > 1:
        raise Refused(f"-o {output} is one file, and {len(folders)} folders were given: name one")
    target = output.resolve()
    # A judgement in the place of a report that is missing would be taken for it.
    left = target.name in WRITTEN or target.name.startswith(SIGNED_BY)
    if left and any((target.parent / name).exists() for name in (EVIDENCE, SUMMARY)):
        raise Refused(f"{output} belongs to the run in {target.parent} and is left as it is: name another file")
    if target.exists() and any(path is not None and path.exists() and path.samefile(target) for path in inputs):
        raise Refused(f"{output} is what this command reads and is left as it is: name another file")
    if new and output.is_file():
        raise Refused(f"{output} is there already and is left as it is: name another file, or remove it")


def write(path: Path, text: str) -> None:
    """Write a file that was asked for. Refused if that cannot be done."""
    try:
        safe_files.write_text(path, text)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None


Work = Callable[[argparse.Namespace, RunFolder], tuple[int, dict[str, Any]]]


def for_each(work: Work) -> Run:
    """The worst exit status. `work` gives that of one folder, and its document for programs, and prints what people are
    to read. A folder that cannot be used is named, has status 1, and does not stop the others."""

    def run(given: argparse.Namespace) -> int:
        check_output(given.output, [vars(given).get("fleet_profile")], folders=given.folders)
        documents: list[dict[str, Any]] = []
        for folder in given.folders:
            if len(given.folders) > 1 and not given.json:
                with printing():
                    print_line(f"{folder}:")
            try:
                status, document = work(given, folder)
            except Refused as error:
                status, document = 1, {"error": str(error)}
                if not given.json:
                    print_line(f"gpufleet: {error}", sys.stderr)
            documents.append({"folder": str(folder), "exit_status": status, **document})
        best_first = [EXIT_STATUS[verdict] for verdict in ("ACCEPTED", "INCOMPLETE", "REJECTED")]
        worst: int = max((each["exit_status"] for each in documents), key=best_first.index)
        if given.json:
            with printing():
                print(json.dumps({"exit_status": worst, "runs": documents}))
        return worst

    return run
