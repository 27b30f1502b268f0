"""`gpufleet export`: what a run measured, for experiment trackers and spreadsheets."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from pytest_gpufleet.commands.command import Command, tell
from pytest_gpufleet.commands.recorded import checked
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import RunFolder

# By format the library that it needs, which is also the name of the extra that installs it.
NEEDS = {"tensorboard": "tensorboard", "swanlab": "swanlab", "csv": ""}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument("--to", choices=NEEDS, required=True, help="what it is for")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one, to write to"
    )


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report import exports

    library = NEEDS[given.to]
    if library and find_spec(library) is None:
        raise Refused(
            f"--to {given.to} needs {library}, which is not installed: pip install 'pytest-gpufleet[{library}]'"
        )
    with given.folder.of_anybody():
        run = checked(given.folder)
        about, points = exports.about(run.record, run.digest), exports.points(run.record)
    _make(given.output)
    try:
        exports.WRITERS[given.to](about, points, given.output)
    except OSError as error:
        raise Refused(f"{given.output} cannot be written: {error.strerror}") from None
    tell(f"{given.output}: {len({point.tag for point in points})} series, {len(points)} points")
    return 0


def _make(folder: Path) -> None:
    """An empty folder. Refused if something is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        raise Refused(f"{folder} cannot be written to: {error.strerror}") from None
    if not empty:
        raise Refused(f"{folder} is not empty and is left as it is: name another folder")


EXPORT = Command(
    "write figures, curves and telemetry of a run for TensorBoard, SwanLab or as CSV",
    _arguments,
    _run,
    "It works offline, from the evidence alone.",
)
