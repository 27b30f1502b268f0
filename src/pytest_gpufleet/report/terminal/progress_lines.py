"""How far a long check has come, in lines: for a log, and wherever the live table is not drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.report import wording

EVERY_SECONDS = 60.0

Tell = Callable[[float, "Sample | None"], None]


def teller(stream: TextIO, whole: float, shown_elsewhere: Callable[[], bool]) -> Tell:
    """tell(seconds done, latest sample) writes a line, once a minute; nothing while it is `shown_elsewhere`."""
    due = 0.0

    def tell(done: float, sample: Sample | None) -> None:
        nonlocal due
        if done < due or shown_elsewhere():
            return
        lead = "" if due else "\n"  # ends the line that pytest has begun
        due = done + EVERY_SECONDS
        state = [
            f"{_range(sample, name)} {unit}"
            for name, unit in (("temperature_c", "°C"), ("power_watts", "W"))
            if sample is not None and _range(sample, name)
        ]
        left = wording.duration(max(0.0, whole - done))
        parts = [f"{wording.duration(done)} of {wording.duration(whole)}", f"{left} left", *state]
        stream.write(f"{lead}  {', '.join(parts)}\n")
        stream.flush()

    return tell


def _range(sample: Sample, name: str) -> str:
    values: list[Any] = [value for readings in sample.gpus if (value := readings.get(name)) is not None]
    return f"{min(values):.0f}-{max(values):.0f}" if values else ""
