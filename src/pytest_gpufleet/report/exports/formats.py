"""The formats that runs are exported to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpufleet.report.exports import csv_files, swanlab_files, tensorboard_files

if TYPE_CHECKING:
    from pytest_gpufleet.report.exports.tracked import Tracked


@dataclass(frozen=True)
class Format:
    """`write` fills an empty folder; OSError if it cannot. `library`: what it needs, which is also the name of the
    extra that installs it; "" if nothing."""

    write: Callable[[Tracked, Path], None]
    library: str = ""


FORMATS = {
    "tensorboard": Format(tensorboard_files.write, "tensorboard"),
    "swanlab": Format(swanlab_files.write, "swanlab"),
    "csv": Format(csv_files.write),
}
