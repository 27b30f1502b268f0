"""The runs that commands read: each is checked first."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import tell
from pytest_gpufleet.commands.signatures import Signers
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run import integrity
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.integrity import Checked


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
