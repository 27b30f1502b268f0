"""--fleet-keep: which folders of earlier runs are removed when a run is over.

Each of these stays, however old it is: the last run of these GPUs at its level that ended ACCEPTED, one that is signed,
one that has not ended, that another user or another machine has made, or in which anything stands that no run writes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_gpufleet import safe_files
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, MOST_BYTES, NODES, REPORT, SUMMARY, RunFolder

WRITTEN = (EVIDENCE, SUMMARY, REPORT, JUNIT)
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


@dataclass(frozen=True)
class Pruned:
    """The names of the folders that were removed, and why others could not be."""

    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def prune(own: RunFolder, host: str, keep: int) -> Pruned:
    """Remove what a run in `own` finds beside it, but for the `keep` latest runs of `host`, of which it is one."""
    names, problems = [], []
    try:
        found = removable(own, host, keep)
    except OSError as error:
        return Pruned(problems=(f"--fleet-keep: {own.path.parent} could not be read: {error.strerror}",))
    for path in found:
        try:
            shutil.rmtree(path)  # which follows no link, not even one that has been put there since
            names.append(path.name)
        except FileNotFoundError:  # another run was here first
            continue
        except OSError as error:
            problems.append(f"--fleet-keep: {path} could not be removed: {error.strerror}")
    return Pruned(tuple(names), tuple(problems))


def removable(own: RunFolder, host: str, keep: int) -> list[Path]:
    """The folders that would be removed, the latest first."""
    runs = sorted(_runs(own.path.absolute().parent, host), key=lambda run: (run[1].run.utc, run[0].name), reverse=True)
    last_accepted: dict[object, Path] = {}
    for path, told in runs:
        if told.verdict == "ACCEPTED":
            last_accepted.setdefault((told.run.level, told.nodes), path)
    stay = {own.path.absolute(), *last_accepted.values()}
    return [path for path, _ in runs[keep:] if path not in stay and _is_only_a_run(path, ENDED)]


def _runs(parent: Path, host: str) -> Iterator[tuple[Path, _Told]]:
    """The folders there in which a run of this user has left a summary about this host."""
    with os.scandir(parent) as entries:
        found = [entry for entry in entries if entry.name.startswith(f"{host}-")]
    for entry in found:
        try:
            if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            with safe_files.open_regular(parent / entry.name / SUMMARY, MOST_BYTES) as file:
                told = msgspec.json.decode(file.read(), type=_Told)
        except (OSError, ValueError, RecursionError):
            continue
        if told.run.host == host:
            yield parent / entry.name, told


def _is_only_a_run(folder: Path, needed: set[str]) -> bool:
    """Whether there is all that is `needed`, and nothing but what a run writes: no signature, and no link."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
        of_nodes = [Path(entry) for entry in found if entry.name == NODES and entry.is_dir(follow_symlinks=False)]
        files = {entry.name for entry in found if entry.name in WRITTEN and entry.is_file(follow_symlinks=False)}
        own = [each for nodes in of_nodes for each in nodes.iterdir()]
    except OSError:
        return False
    if len(files) + len(of_nodes) != len(found) or not needed <= files:
        return False
    return all(not each.is_symlink() and each.is_dir() and _is_only_a_run(each, set()) for each in own)
