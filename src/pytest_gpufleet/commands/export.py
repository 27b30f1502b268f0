"""`gpufleet export`: what a run measured, for experiment trackers and spreadsheets."""

import argparse
from importlib.util import find_spec

from pytest_gpufleet.commands.command import Command, argument, folder, output, print_line
from pytest_gpufleet.commands.verify import checked
from pytest_gpufleet.model.endings import Refused

# By format the library that it needs, which is also the name of the extra that installs it.
NEEDS = {"tensorboard": "tensorboard", "swanlab": "swanlab", "csv": ""}


def _run(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report import exports

    library, output = NEEDS[given.to], given.output
    if library and find_spec(library) is None:
        raise Refused(
            f"--to {given.to} needs {library}, which is not installed: pip install 'pytest-gpufleet[{library}]'"
        )
    with given.folder.of_anybody():
        run = checked(given.folder)
        about, points = exports.about(run.record, run.digest), exports.points(run.record)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise Refused(f"{output} is not empty and is left as it is: name another folder")
        exports.WRITERS[given.to](about, points, output)
    except OSError as error:
        raise Refused(f"{output} cannot be written to: {error.strerror}") from None
    print_line(f"{output}: {len({point.tag for point in points})} series, {len(points)} points")
    return 0


EXPORT = Command(
    "write measurements, curves and telemetry of a run for TensorBoard, SwanLab or as CSV",
    _run,
    (
        folder(),
        argument("--to", choices=NEEDS, required=True, help="what it is for"),
        output("a new folder, or an empty one, to write to", required=True, metavar="FOLDER"),
    ),
    "It works offline, from the evidence alone.",
)
