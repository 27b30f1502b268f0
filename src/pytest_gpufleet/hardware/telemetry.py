"""What the GPUs do while a run goes on: the readings of all GPUs at one moment, and a thread that takes them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.hardware.facts import READINGS, Source, Unavailable, in_thread, read

# nvml.h, nvmlClocksEventReasons: why the clocks are not higher than they are, the most alarming first.
CLOCK_EVENT_REASONS = {
    0x40: "hw thermal slowdown",
    0x80: "hw power brake slowdown",
    0x8: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x4: "sw power cap",
    0x2: "applications clocks setting",
    0x10: "sync boost",
    0x100: "display clock setting",
    0x1: "gpu idle",
}


@dataclass(frozen=True)
class Sample:
    """The readings of all GPUs at `time` (seconds since the epoch): reading -> value, None where it cannot be had."""

    time: float
    gpus: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {"time": self.time, "gpus": list(self.gpus)}


def clock_event_reasons(mask: int) -> list[str]:
    """The bits of the reading `clock_event_reasons` in words, the most alarming first."""
    unknown = mask & ~sum(CLOCK_EVENT_REASONS)
    words = [word for bit, word in CLOCK_EVENT_REASONS.items() if mask & bit]
    return words + ([f"unknown reason {unknown:#x}"] if unknown else [])


def sample(source: Source, not_applicable: set[tuple[int, str]] | None = None) -> Sample:
    """The readings of all GPUs now. The GPUs are read at the same time, for some calls block for tens of milliseconds.

    `not_applicable` remembers, from one sample to the next, what some GPU does not have and is not asked for again.
    """
    skip = set() if not_applicable is None else not_applicable
    now = round(time.time(), 3)
    readings = [in_thread(_read, source, index, skip) for index in range(source.count())]
    return Sample(now, tuple(future.result() for future in readings))


def _read(source: Source, index: int, skip: set[tuple[int, str]]) -> dict[str, Any]:
    values = read(source, index, {name: call for name, call in READINGS.items() if (index, name) not in skip})
    absent = {name: value for name, value in values.items() if isinstance(value, Unavailable)}
    skip.update((index, name) for name, value in absent.items() if not value.applicable)
    return {name: None if name in absent else values.get(name) for name in READINGS}


class Sampler:
    """A daemon thread that hands a Sample to `on_sample`, which runs in that thread, every `interval_seconds`.

    Whatever fails in the source or in `on_sample` costs one sample, and `trouble` says what it was last.
    """

    def __init__(self, source: Source, interval_seconds: float, on_sample: Callable[[Sample], None]) -> None:
        self.trouble = ""
        self._source = source
        self._interval = interval_seconds
        self._on_sample = on_sample
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpufleet-telemetry", daemon=True)

    def start(self) -> None:
        """The first sample is taken at once."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples. Waits for one that is being taken, but no longer than one interval."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(self._interval)

    def _run(self) -> None:
        not_applicable: set[tuple[int, str]] = set()
        due = time.monotonic()
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            try:
                taken = sample(self._source, not_applicable)
                if not self._stopped.is_set():
                    self._on_sample(taken)
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            # The next beat of a fixed rhythm; beats that were missed are left out, not made up for.
            due += self._interval * max(1, math.ceil((time.monotonic() - due) / self._interval))


def summary(samples: Sequence[Sample], since: float, until: float) -> list[dict[str, list[Any]]]:
    """What each GPU did from `since` to `until` (seconds since the epoch): reading -> [minimum, mean, maximum].

    `clock_event_reasons` is a set of bits and has no mean: it gives the words of all reasons that were seen. A reading
    that was never had is left out. If no sample fell into the span, the nearest one before stands for it; without
    one, the list is empty.
    """
    within = [one for one in samples if since <= one.time <= until]
    before = [one for one in samples if one.time < since]
    chosen = within or before[-1:]
    count = max((len(one.gpus) for one in chosen), default=0)
    return [_summary([one.gpus[index] for one in chosen if index < len(one.gpus)]) for index in range(count)]


def _summary(readings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for name in READINGS:
        values = [value for reading in readings if (value := reading.get(name)) is not None]
        if not values:
            continue
        if name == "clock_event_reasons":
            seen = 0
            for value in values:
                seen |= value
            result[name] = clock_event_reasons(seen)
        else:
            result[name] = [min(values), round(sum(values) / len(values), 3), max(values)]
    return result
