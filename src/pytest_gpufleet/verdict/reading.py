"""The record of a run from its evidence, with the findings that follow from what was recorded."""

from collections.abc import Callable
from pathlib import Path

from pytest_gpufleet.model import events
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.judgement import held

STORED = ("0.1.", "0.2.", "0.3.")  # versions that wrote down what follows from a measurement, by limits of their own


def add(record: Record, event: events.Event | None) -> None:
    """Take in one event as evidence has it. ValueError that says what is wrong with it."""
    record.add(event)
    if isinstance(event, events.Judged) and not record.run.plugin.startswith(STORED):
        record.findings[-1] = held(event.finding, record.topology, event.finding.reason, record.run.rehearsal)


def read(path: Path, quick: Callable[[bytes], events.Event | None] | None = None) -> Record:
    """The record of a run from its evidence.jsonl. A last line cut short by a dying machine is left out. `quick`: as
    `read_events` has it. OSError if it cannot be read; ValueError that names the line if one is no event; Refused if it
    has another schema."""
    record = Record()
    for line, event in events.read_events(path, quick):
        try:
            add(record, event)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {line}: not an event of a run ({error})") from None
    return record
