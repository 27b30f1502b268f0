"""What a command does with each of several folders, told for people or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gpufleet.commands.command import printing, tell
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.verdict import EXIT_STATUS

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
