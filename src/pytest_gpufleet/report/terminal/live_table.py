"""The table of all GPUs in the lowest lines of a terminal, while pytest writes above it."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.sample import Sample
from pytest_gpufleet.report.terminal.gpu_table import HISTORY, table
from pytest_gpufleet.report.terminal.lowest_lines import LowestLines

AROUND = 4  # lines: above the rows of GPUs two of heads and one of the machine, below them one of the run


class LiveTable:
    """Drawn for each sample that it is shown.

    with LiveTable(topology, sys.__stdout__, running) as live:
        Sampler(source, 1.0, live.show).start()
    """

    def __init__(self, topology: GpuTopology, stream: TextIO, running: Callable[[], str] = lambda: "") -> None:
        self._topology = topology
        self._running = running
        self._history: deque[Sample] = deque(maxlen=HISTORY)
        self._lock = threading.Lock()
        self._lines = LowestLines(stream, len(topology.gpus) + AROUND)
        self._ascii = not (stream.encoding or "").lower().startswith("utf")
        self._ended = False

    def __enter__(self) -> LiveTable:
        with self._lock:
            self._lines.reserve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._lines.release()
            self._ended = True

    @property
    def drawn(self) -> bool:
        """Whether the terminal is one that shows the table, and large enough for it."""
        return self._lines.reserved

    def show(self, sample: Sample) -> None:
        """Draw this sample; may be called from any thread."""
        self._history.append(sample)
        with self._lock:
            if self._ended or not (columns := self._lines.reserve()):
                return
            canvas = Console(file=io.StringIO(), width=columns, force_terminal=True, legacy_windows=False)
            with canvas.capture() as capture:
                history = tuple(self._history)
                canvas.print(table(sample, history, self._topology, self._running(), columns, self._ascii))
            self._lines.draw(capture.get().split("\n"))
