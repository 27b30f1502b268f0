"""Whether all nodes of a run have the same software that carries it: else they do not understand each other, or measure
something else under the same name. What is measured (torch, CUDA, NCCL, driver) is compared by a check."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pytest_gpufleet import __version__
from pytest_gpufleet.machine.host import own_name
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.suite import code, sum_of
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.messages import DialIn

# What has to be the same, and how it is described where it is not.
PARTS = {
    "python": "Python {}",
    "version": "pytest-gpufleet {}",
    "package": "other files of pytest-gpufleet",
    "suite": "other checks, conftest, ini file or limits",
}
EMPTY = "empty"
NO_CHECKS = "no checks where this run has them: the folder is empty there, or not mounted"
NO_FOLDER = "the folder in which this run was started is not there, or closed"


def suite(folder: Path, sources: Iterable[str]) -> str:
    """Of the files, and of all Python files below the folders, that `sources` name as pytest takes them, seen from
    `folder`, and of the conftest files that pytest reads on the way to them. What is not there on a node makes it
    another one. "" where that folder is not, EMPTY where there is nothing of them."""
    if not os.access(folder, os.X_OK):
        return ""
    found = {folder / source.partition("::")[0] for source in sources}
    if found and not any(place.is_file() or any(_python_files(place)) for place in found):
        return EMPTY
    files = [path for place in found for path in ([*_python_files(place)] or [place])]
    above = {parent for place in found for parent in place.parents if parent.is_relative_to(folder)}
    beside = {place.parent for place in found}
    return sum_of(folder, [*files, *(path for parent in above | beside for path in parent.glob("conftest.py"))])


def _python_files(folder: Path) -> Iterator[Path]:
    """Not those of hidden folders, into which pytest does not look either: an environment may be in one."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def own(settings: AgentSettings) -> DialIn:
    """Of this process: a node, or the controller, which the nodes are held against."""
    return DialIn(
        name=settings.name or own_name(),
        index=settings.index,
        version=__version__,
        package=code(),
        suite=suite(Path(settings.run_folder), settings.suite),
        python=platform.python_version(),
    )


def refuse_others(own: DialIn, nodes: Mapping[str, DialIn]) -> None:
    """Refused if any of these nodes, by their names, has another installation than this process."""
    alike = grouped((differing, name) for name, node in nodes.items() if (differing := _differences(own, node)))
    if alike:
        found = "; ".join(f"{', '.join(names)}: {differing}" for differing, names in alike.items())
        raise Refused(
            f"not all nodes have what this one has (pytest-gpufleet {own.version}, Python {own.python}): {found}. "
            "Install the same on all of them"
        )


def _differences(own: DialIn, other: DialIn) -> str:
    parts = {
        part: text.format(getattr(other, part))
        for part, text in PARTS.items()
        if getattr(own, part) != getattr(other, part)
    }
    if "version" in parts:
        parts.pop("package", None)  # which goes without saying
    if "suite" in parts and other.suite in ("", EMPTY):
        parts["suite"] = NO_CHECKS if other.suite else NO_FOLDER
    return ", ".join(parts.values())
