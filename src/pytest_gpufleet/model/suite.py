"""What the suite consists of. A run that leaves a part of it out is INCOMPLETE, whatever the command line selected.

Evidence is judged by the manifest of the suite that made it, which it holds."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

import pytest_gpufleet
from pytest_gpufleet.model import codec, levels
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.levels import Level

# `python docs/make_checks.py` writes it; a test holds it to acceptance/. A check that never ran tells nothing itself.
SHIPPED = Path(__file__).with_name("suite.json")
PACKAGED = "pytest_gpufleet.acceptance"  # where a wheel has the suite
CONFTEST = "conftest.py"
CLONE = Path(str(pytest_gpufleet.__file__)).parents[2]  # if this is one
ABOVE = f"../{CONFTEST}"  # by which a clone runs where it is not installed


class SuiteCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """A check of the suite: the lowest level that requires it, the first line of its docstring, what stands in the
    brackets of its cases (none if it is not parametrized), the metrics of which each case leaves a finding, and the
    chapter of the report where it stands. A machine of which nothing `proves_sound` ran is not known to be good.
    `nodes`: how many it takes at least, if it is one between nodes. One of a machine runs on each node of a cluster."""

    level: Level
    title: str
    cases: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    figures_of_several: tuple[str, ...] = ()  # only where there are several GPUs
    chapter: str = ""
    proves_sound: bool = False
    at_the_end: bool = False
    nodes: int = 0

    def metrics(self, several: bool) -> tuple[str, ...]:
        """Of which each case leaves a finding, on one GPU or on several."""
        return self.figures + (self.figures_of_several if several else ())


@dataclass(frozen=True)
class Suite:
    """The suite of one version: its checks by "file.py::test_name", the SHA-256 of its files by their names, and the
    question that each chapter of the report answers."""

    version: str = ""
    checks: Mapping[str, SuiteCheck] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    chapters: Mapping[str, str] = field(default_factory=dict)

    def required(self, level: str, nodes: int = 1) -> list[str]:
        """The names of the checks that a level requires of a run on so many nodes."""
        of_level = ((name, check) for name, check in self.checks.items() if levels.includes(level, check.level))
        return [name for name, check in of_level if check.nodes <= nodes]

    def contains(self, node_id: str) -> bool:
        return levels.check_name(node_id) in self.checks

    def between_nodes(self, node_id: str) -> bool:
        """Whether a check is one of the suite's between nodes, and not one of each machine."""
        known = self.checks.get(levels.check_name(node_id))
        return known is not None and known.nodes > 0

    def cases(self, name: str) -> list[str]:
        return [f"{name}[{case}]" for case in self.checks[name].cases] or [name]

    def known_as(self, node_id: str) -> str:
        """A test's name: of a case of the suite without folders, so that it is the same however the run was called."""
        return levels.case_name(node_id) if self.contains(node_id) else node_id


@cache
def shipped() -> Suite:
    return codec.typed(json.loads(SHIPPED.read_text(encoding="utf-8")), Suite)


def digest(path: Path) -> str:
    """SHA-256 of a file of text, whatever ends its lines here; "" if there is none."""
    try:
        return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    except OSError:
        return ""


@cache
def code() -> str:
    """SHA-256 over all files of this package: versions in development change without another number."""
    folder = Path(str(pytest_gpufleet.__file__)).parent
    return sum_of(folder, (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts))


def sum_of(folder: Path, files: Iterable[Path]) -> str:
    """Over files, by their names as seen from a folder."""
    total = hashlib.sha256()
    for path in sorted(set(files)):
        name = path.relative_to(folder) if path.is_relative_to(folder) else path
        total.update(f"{name} {digest(path)}\n".encode())
    return total.hexdigest()


@cache
def belongs(path: Path) -> bool:
    """Whether a test file is one of the suite, as it was shipped."""
    return path.name in shipped().files and not altered([path])


def altered(paths: Iterable[Path]) -> list[str]:
    """The names of those test files that are called like one of the suite and are not it, and of the conftest.py beside
    them, and in a clone above them, if those are others. Files with other names are checks of somebody's own."""
    known = shipped().files
    ours = {(path.parent, path.name) for path in paths if path.name in known}
    ours |= {(folder, CONFTEST) for folder, _ in ours}
    ours |= {(folder, ABOVE) for folder, _ in ours if folder.parent == CLONE}
    return sorted({name for folder, name in ours if digest(folder / name) != known.get(name, "")})


def titled(check_id: str, title: str = "") -> str:
    """ "Its title (file.py::test_name)" for a person; without any title, only the id."""
    known = shipped().checks.get(levels.check_name(check_id))
    title = say(title or (known.title if known else ""))
    return f"{title} ({check_id})" if title else check_id
