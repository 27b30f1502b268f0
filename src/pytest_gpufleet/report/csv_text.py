"""Rows as CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence

from pytest_gpufleet.report.wording import clean

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that spreadsheets compute (OWASP, "CSV Injection")

Row = Sequence[str | float | None]


def csv_text(columns: Row, rows: Iterable[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_cell, row) for row in rows)
    return file.getvalue()


def _cell(value: str | float | None) -> str | float:
    """What is no number is empty; a text from evidence is never a formula, nor more than one line."""
    if isinstance(value, str):
        line = " ".join(clean(value).splitlines())
        return f"'{line}" if line.startswith(FORMULA) else line
    return value if value is not None and math.isfinite(value) else ""
