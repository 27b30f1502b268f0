"""The records of several runs."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.refused import Refused


def records_of(folders: Sequence[RunFolder]) -> dict[str, Record]:
    """The records of several runs by a name for each: its folder's, or the path where that is not clear enough."""
    short = [folder.name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise Refused("the same folder is given twice")
    return {name: folder.record() for name, folder in zip(names, folders, strict=True)}
