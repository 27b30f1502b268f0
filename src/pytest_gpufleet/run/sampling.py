"""Telemetry of a run: sampled from its begin to its end, on record, and held against the health of the GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gpufleet.hardware.telemetry import Activity, Sampler
from pytest_gpufleet.model.sample import Sample

if TYPE_CHECKING:
    from pytest_gpufleet.hardware.node import Node
    from pytest_gpufleet.run.run import Run


class Sampling:
    """`hear(sample)` is called with each sample, by a thread of its own."""

    def __init__(self, run: Run, node: Node, hear: Callable[[Sample], None]) -> None:
        self._run = run
        self._hear = hear
        self._activity = Activity()
        self._lost = False  # told once: the words of the trouble change
        self.latest: Sample | None = None
        self.sampler = Sampler(node, run.options.interval, self._take_in)

    def start(self) -> None:
        self.sampler.start()

    def stop(self) -> None:
        self.sampler.stop()

    def _take_in(self, sample: Sample) -> None:
        self.note_lost()
        self._run.record_event("telemetry", sample=sample.to_json())
        self._activity.add(sample)
        self.latest = sample
        self._hear(sample)

    def note_lost(self) -> None:
        """Nobody sees a GPU slow down between two tests without it."""
        if self.sampler.trouble and self._run.evidence is not None and not self._lost:
            self._lost = True
            self._run.evidence.spoil(f"telemetry lost samples: {self.sampler.trouble}")

    def end_of_check(self) -> list[dict[str, list[Any]]]:
        """What the GPUs did during a check that ends now: minimum, mean and maximum of every reading."""
        return self._activity.end()
