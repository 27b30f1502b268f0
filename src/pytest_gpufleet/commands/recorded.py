"""The runs that commands read: each is checked first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import printing, tell
from pytest_gpufleet.commands.signatures import Signers
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run import integrity
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.integrity import Checked
from pytest_gpufleet.verdict.verdict import EXIT_STATUS


def examined(folder: RunFolder, signers: Signers | None = None, nodes: bool = True) -> tuple[Checked, list[str]]:
    """The run in a folder, and what is to be said of it. Refused if its files do not belong together, or if a signature
    is not good. `nodes`: of one on many also the nodes' own."""
    found = integrity.check(folder, nodes)
    missing = [f"{name} is missing, as after a run that was killed" for name in found.missing]
    return found, [*missing, *signatures.check(folder, signers)]


def checked(folder: RunFolder, nodes: bool = True) -> Checked:
    """The run in a folder. What is to be said of it goes to standard error."""
    found, said = examined(folder, nodes=nodes)
    for line in said:
        tell(f"{folder}: {line}", sys.stderr)
    return found


def all_checked(folders: Sequence[RunFolder]) -> dict[str, Checked]:
    """Several runs by a name for each: its folder's, or the path where that is not clear enough."""
    short = [folder.name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise Refused("the same folder is given twice")
    return {name: checked(folder) for name, folder in zip(names, folders, strict=True)}


# The best first. Whatever else a run ended with is as bad as a rejection.
STATUSES = (EXIT_STATUS["ACCEPTED"], EXIT_STATUS["INCOMPLETE"], EXIT_STATUS["REJECTED"])


@dataclass(frozen=True)
class Done:
    """What came of one folder: its exit status, what programs are told of it, and what shows it to people."""

    status: int
    document: Mapping[str, Any]
    show: Callable[[], None]


def for_each(folders: Sequence[RunFolder], work: Callable[[RunFolder], Done], as_json: bool) -> int:
    """The worst exit status. A folder that cannot be used is told, has status 1, and does not stop the others."""
    statuses, documents = [], []
    for folder in folders:
        try:
            done = work(folder)
        except Refused as error:
            tell_why = partial(tell, f"gpufleet: {error}", sys.stderr)
            done = Done(1, {"error": str(error)}, tell_why)
        statuses.append(done.status)
        if as_json:
            documents.append({"folder": str(folder), "exit_status": done.status, **done.document})
            continue
        with printing():
            if len(folders) > 1:
                tell(f"{folder}:")
            done.show()
    status = max(statuses, key=_badness)
    if as_json:
        with printing():
            print(json.dumps({"exit_status": status, "runs": documents}))
    return status


def _badness(status: int) -> int:
    return STATUSES.index(status) if status in STATUSES else len(STATUSES)


def check_one(folders: Sequence[RunFolder], output: Path | None) -> None:
    """Refused if several folders were given, and one file to write."""
    if output is not None and len(folders) > 1:
        raise Refused(f"-o {output} is one file, and {len(folders)} folders were given: name one")
