"""What is installed on a node: all nodes of a run have the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest_gpufleet
from pytest_gpufleet.model.suite import digest

NOT_OURS = "__pycache__"  # of the interpreter


def package() -> str:
    """Of all files of this package."""
    folder = Path(str(pytest_gpufleet.__file__)).parent
    return _sum_of(folder, (path for path in folder.rglob("*") if path.is_file() and NOT_OURS not in path.parts))


def suite(folder: Path, sources: Iterable[str]) -> str:
    """Of the files, and of all Python files below the folders, that `sources` name as pytest is told them, seen from
    `folder`, and of the conftest files that pytest reads on the way to them. What is not there on a node makes it
    another one. "" where that folder is not."""
    if not os.access(folder, os.X_OK):
        return ""
    found = {folder / source.partition("::")[0] for source in sources}
    files = [path for place in found for path in ([*_python_files(place)] or [place])]
    return _sum_of(folder, [*files, *(path for place in found for path in _conftest_files(folder, place))])


def _conftest_files(folder: Path, place: Path) -> Iterator[Path]:
    """Those beside and above a place, as far as `folder`."""
    for parent in place.parents:
        if parent.is_relative_to(folder) or parent == place.parent:
            yield from parent.glob("conftest.py")


def transport(name: str) -> str:
    """What carries messages, with the version of it that is here where it is a package: "local", "ray 2.60.0"."""
    return name if name == "local" else f"{name} {version(name)}"


def _python_files(folder: Path) -> Iterator[Path]:
    """Not those of hidden folders, into which pytest does not look either: an environment may be in one."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def _sum_of(folder: Path, files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(set(files)):
        name = path.relative_to(folder) if path.is_relative_to(folder) else path
        total.update(f"{name} {digest(path)}\n".encode())
    return total.hexdigest()
