"""The records of several runs."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import EVIDENCE, RunFolder


def records_of(folders: Sequence[RunFolder]) -> dict[str, Record]:
    """The records of several runs by a name for each: its folder's, or the path where that is not clear enough."""
    short = [folder.name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise Refused("the same folder is given twice")
    return {name: folder.record() for name, folder in zip(names, folders, strict=True)}


def unaltered(folder: RunFolder) -> tuple[Record, str]:
    """The record of a run and the SHA-256 of its evidence. Refused if that is not what its report and summary were made
    of, where these are there."""
    record, digest = folder.record(), folder.digest()
    for name, stated in folder.stated_sums().items():
        if stated is not None and stated != digest:
            raise Refused(f"{folder}: {name} was made of other evidence than {EVIDENCE}")
    return record, digest
