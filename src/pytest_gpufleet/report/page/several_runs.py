"""What is told of several runs together, on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpufleet.model.language import Language, Say
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.rendering import render
from pytest_gpufleet.report.translation import says
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure
from pytest_gpufleet.verdict.across_runs.run_comparison import models

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Table:
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SeveralRuns:
    """What was found, in one line and in tables; `bad`: it is something that should not be. Tables without rows are
    left out."""

    headline: str
    bad: bool
    notes: tuple[str, ...]
    tables: tuple[Table, ...]


def page(told: SeveralRuns, language: Language = "en") -> str:
    """A self-contained HTML page. `told`: in that language, but for the notes."""
    say = says(language)
    return render(
        "comparison.html.jinja",
        language,
        headline=told.headline,
        notes=[wording.clean(say(note)) for note in told.notes],
        tables=[table for table in told.tables if table.rows],
    )


def screen(told: SeveralRuns) -> Group:
    """What rich prints on a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[RichTable | Text] = []
    for table in (table for table in told.tables if table.rows):
        drawn = RichTable(title=table.caption, title_justify="left", box=box.SIMPLE_HEAD)
        for name in table.header:
            drawn.add_column(Text(wording.clean(name)), overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(wording.clean(cell)) for cell in row))
        parts.append(drawn)
    parts += [Text(f"Note: {wording.clean(note)}", style="yellow") for note in told.notes]
    return Group(*parts, Text(wording.clean(told.headline), style="bold red" if told.bad else "bold green"))


def runs_table(runs: Mapping[str, Record], say: Say) -> Table:
    rows = (
        (
            name,
            record.run.host,
            wording.moment(record.run.utc),
            f"{len(record.topology.gpus)} x {models(record)}" if record.topology.gpus else say(models(record)),
            say(record.verdict or "died"),
        )
        for name, record in runs.items()
    )
    return Table(say("The runs"), (say("Run"), say("Host"), say("Began"), say("GPUs"), say("Verdict")), tuple(rows))


def what(figure: Figure, say: Say) -> str:
    return say(", ").join([say(figure.metric.title), *wording.words(dict(figure.conditions), say)])
