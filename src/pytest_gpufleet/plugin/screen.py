"""The terminal of a run, past what pytest captures while tests run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpufleet.model.gpu import GpuTopology
    from pytest_gpufleet.model.sample import Sample
    from pytest_gpufleet.report.terminal.live_nodes import NodesNow
    from pytest_gpufleet.report.terminal.live_table import LiveTable


class Screen:
    """Before `open` it is what Python calls the standard output."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._table: LiveTable | None = None

    def open(self, terminal: TextIO | None, stack: ExitStack) -> None:
        """The same terminal by a file descriptor of its own, until `stack` is closed; nowhere for None."""
        self._stream = terminal = terminal or io.StringIO()
        try:
            descriptor = os.dup(terminal.fileno())
        except (OSError, ValueError):
            return
        encoding = getattr(terminal, "encoding", None) or "utf-8"
        self._stream = stack.enter_context(os.fdopen(descriptor, "w", encoding=encoding, errors="replace"))

    def tell(self, text: str) -> None:
        """A line at once."""
        with suppress(OSError, ValueError):  # the terminal is closed, or no file
            # Past the buffers of the stream, in the middle of which a signal may come.
            os.write(self._stream.fileno(), f"\n{text}\n".encode(errors="replace"))

    def draw(self, topology: GpuTopology, reports: Path, stack: ExitStack) -> None:
        """Keep a table of all GPUs below everything else, until `stack` is closed."""
        from pytest_gpufleet.report.terminal.live_table import LiveTable
        from pytest_gpufleet.report.terminal.running_check import RunningCheck

        self._table = stack.enter_context(LiveTable(topology, self._stream, RunningCheck(reports)))

    def draw_nodes(self, now: Callable[[], NodesNow], rows: int, stack: ExitStack) -> None:
        """Keep a line on what is waited for below everything else, with `rows` of nodes, until `stack` is closed."""
        from pytest_gpufleet.report.terminal.live_nodes import LiveNodes

        stack.enter_context(LiveNodes(now, self._stream, rows))

    def show(self, sample: Sample) -> None:
        """Bring the table up to date, if there is one."""
        if self._table is not None:
            self._table.show(sample)

    def progress(self, seconds: float) -> Callable[[float, Any], None]:
        """tell(seconds done, latest sample) writes how far something long is, unless the table says so."""
        from pytest_gpufleet.report.terminal import progress_lines

        return progress_lines.teller(self._stream, seconds, lambda: self._table is not None and self._table.drawn)
