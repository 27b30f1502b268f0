"""Series as CSV, a file for each kind, a row for each point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpufleet import safe_files
from pytest_gpufleet.report.csv_text import csv_text

if TYPE_CHECKING:
    from pytest_gpufleet.report.exports.tracked import Tracked

COLUMNS = ("name", "unit", "conditions", "place", "along", "step", "time", "value")


def write(tracked: Tracked, folder: Path) -> None:
    rows = [
        (
            each.kind,
            (each.name, each.unit, each.conditions, each.place, each.along, point.step, point.time, point.value),
        )
        for each in tracked.series
        for point in each.points
    ]
    for kind in dict.fromkeys(kind for kind, _ in rows):
        text = csv_text(COLUMNS, (row for of_kind, row in rows if of_kind == kind))
        safe_files.write_text(folder / f"{kind}.csv", text)
    safe_files.write_text(folder / "run.csv", csv_text(("name", "value"), tracked.about.items()))
