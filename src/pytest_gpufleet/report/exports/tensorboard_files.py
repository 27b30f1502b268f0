"""Series as the event files of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpufleet.report.exports.tracked import Tracked


def write(tracked: Tracked, folder: Path) -> None:
    import numpy
    from tensorboard.summary import DirectoryOutput, Writer

    about = ", ".join(f"{name} {value}" for name, value in tracked.about.items() if value)
    writer = Writer(DirectoryOutput(str(folder)))
    for each in tracked.series:
        described = f"{each.unit}{f', by {each.along}' if each.along else ''}; {about}"
        for point in each.points:
            value = numpy.float32(point.value)  # as TensorBoard stores scalars
            writer.add_scalar(each.tag, value, point.step, wall_time=point.time, description=described)
    writer.close()
