"""Tables, built once for the page and the terminal; and measurements as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpufleet.model.language import say
from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict.outliers import Figure

if TYPE_CHECKING:
    from rich.table import Table as ScreenTable


class Cell(NamedTuple):
    """`state` puts a mark in front of the text, `below` a line under it, and `source` the number of a footnote. `open`:
    why it was not judged. `heat`: how full its colour is, in per cent. `bar`: how far it is from its limit, of what
    fills a bar; beyond it below 0. `figure`: it is one."""

    text: str = ""
    state: str = ""
    below: str = ""
    source: int | None = None
    open: str = ""
    heat: int | None = None
    bar: float | None = None
    figure: bool = False


class Row(NamedTuple):
    """`details`: a line under its name. `for_information`: the page folds it."""

    name: str
    cells: tuple[Cell, ...]
    details: str = ""
    for_information: bool = False


class Table(NamedTuple):
    """`corner`: above the names of the rows; it and `columns` are said when shown. `notes`: beside the title."""

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    foot: str = ""

    @property
    def note(self) -> str:
        return say("; ").join(filter(None, self.notes))


def row(name: str, *values: object) -> Row:
    return Row(name, tuple(Cell("" if value is None else str(value)) for value in values))


def on_screen(table: Table) -> ScreenTable:
    """What rich prints on a terminal."""
    from rich import box
    from rich.table import Table as ScreenTable
    from rich.text import Text

    drawn = ScreenTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in (table.corner, *table.columns):
        drawn.add_column(Text(wording.clean(say(name))), overflow="fold")
    for each in table.rows:
        texts = (each.name, *(cell.text for cell in each.cells))
        drawn.add_row(*(Text(wording.ascii_signs(wording.clean(text))) for text in texts))
    return drawn


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def of_figure(figure: Figure) -> dict[str, Any]:
    return {"metric": figure.name, "unit": figure.metric.unit, "conditions": dict(figure.conditions)}


def what(figure: Figure) -> str:
    """What was measured, under which conditions."""
    return say(", ").join([say(figure.metric.title), *wording.words(dict(figure.conditions))])
