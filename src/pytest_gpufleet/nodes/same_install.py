"""Whether all nodes of a run have the same software that carries it: else they do not understand each other, or measure
something else under the same name. What is measured (torch, CUDA, NCCL, driver) is compared by a check."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from pytest_gpufleet import __version__
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.nodes import installed
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.messages import Greeting, Hello

# What has to be the same, and how it is told where it is not.
PARTS = {
    "python": "Python {}",
    "transport": "{}",
    "version": "pytest-gpufleet {}",
    "package": "other files of pytest-gpufleet",
    "suite": "other checks, conftest, ini file or limits",
}
NO_FOLDER = "the folder in which this run was started is not there, or closed"


def own(settings: AgentSettings, transport: str) -> Greeting:
    """Of this process, which the nodes are held against."""
    return Greeting(
        host=socket.gethostname(),
        version=__version__,
        package=installed.package(),
        suite=installed.suite(Path(settings.run_folder), settings.suite),
        python=platform.python_version(),
        transport=transport,
    )


def refuse_others(own: Greeting, nodes: Mapping[str, Hello | Greeting]) -> None:
    """Refused if any of these nodes, by their names, has another installation than this process."""
    if not (others := {name: told for name, node in nodes.items() if (told := _differences(own, node))}):
        return
    alike: dict[str, list[str]] = {}
    for name, told in others.items():
        alike.setdefault(told, []).append(name)
    found = "; ".join(f"{', '.join(names)}: {told}" for told, names in alike.items())
    raise Refused(
        f"not all nodes have what this one has (pytest-gpufleet {own.version}, Python {own.python}): {found}. "
        "Install the same on all of them"
    )


def _differences(own: Greeting, other: Hello | Greeting) -> str:
    differing = [part for part in PARTS if getattr(own, part) != getattr(other, part)]
    if "version" in differing and "package" in differing:  # which goes without saying
        differing.remove("package")
    told = {part: PARTS[part].format(getattr(other, part)) for part in differing}
    if "suite" in told and not other.suite:
        told["suite"] = NO_FOLDER
    return ", ".join(told.values())
