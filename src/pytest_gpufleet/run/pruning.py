"""--fleet-keep: which folders of earlier runs are removed when a run is over.

Each of these stays, however old it is: the last run of these GPUs at its level that ended ACCEPTED, one that is signed,
one that has not ended, that another user or another machine has made, or in which anything stands that no run writes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, NODES, REPORT, SUMMARY, RunFolder

WRITTEN = {EVIDENCE, SUMMARY, REPORT, JUNIT}
ENDED = {EVIDENCE, SUMMARY, REPORT}  # what is there when a run has ended


class _Run(msgspec.Struct, frozen=True):
    host: str
    utc: str
    level: str


class _Node(msgspec.Struct, frozen=True):
    gpus: tuple[str, ...]


class _Told(msgspec.Struct, frozen=True):
    """What is looked at in a summary."""

    verdict: str
    run: _Run
    nodes: tuple[_Node, ...]


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
        except FileNotFoundError:  # another run was here first
            continue
        except OSError as error:
            problems.append(f"--fleet-keep: {path} could not be removed: {error.strerror}")
    return names, problems


def removable(own: RunFolder, host: str, keep: int) -> list[Path]:
    """The folders that would be removed, the latest first."""
    beside = own.path.absolute().parent
    named = (path for path in beside.iterdir() if path.name.startswith(f"{host}-"))
    found = {path: told for path in named if (told := _summary(path)) and told.run.host == host}
    runs = sorted(found, key=lambda path: (found[path].run.utc, path.name), reverse=True)
    accepted = [path for path in reversed(runs) if found[path].verdict == "ACCEPTED"]
    last_accepted = {(found[path].run.level, found[path].nodes): path for path in accepted}
    stay = {own.path.absolute(), *last_accepted.values()}
    return [path for path in runs[keep:] if path not in stay and _is_only_a_run(path, ENDED)]


def _summary(path: Path) -> _Told | None:
    """What a run of this user says there."""
    try:
        if path.is_symlink() or path.lstat().st_uid != os.geteuid():
            return None
        return msgspec.json.decode(RunFolder(path).content(SUMMARY) or b"", type=_Told)
    except (OSError, Refused, ValueError, RecursionError):
        return None


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
