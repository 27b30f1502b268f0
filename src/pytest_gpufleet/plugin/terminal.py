"""The terminal of a run: what it says among the lines of pytest, and the lowest lines while tests run."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from pytest_gpufleet import lazy
from pytest_gpufleet.model.language import in_language, say, some
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.compat import RUN
from pytest_gpufleet.plugin.markers import uses_ranks
from pytest_gpufleet.redaction import clean

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from pytest_gpufleet.model.metric import Sample
    from pytest_gpufleet.model.place import GpuTopology
    from pytest_gpufleet.report.terminal import live, summary_lines
    from pytest_gpufleet.verdict.fleet import host_runs
else:
    live, summary_lines = lazy("report", "terminal.live", "terminal.summary_lines")
    (host_runs,) = lazy("verdict", "fleet.host_runs")


class Screen:
    """Before `open` it is what Python calls the standard output."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._below: live.Below | None = None
        self.sample: Sample | None = None  # that the table shows

    def open(self, config: pytest.Config, stack: ExitStack) -> None:
        """pytest's terminal by a file descriptor of its own, until `stack` is closed; nowhere if it has none."""
        if (terminal := compat.terminal(config)) is not None:
            stack.enter_context(compat.terminal_replaced(config, terminal))
        self._stream = terminal = terminal or io.StringIO()
        try:
            descriptor = os.dup(terminal.fileno())
        except (OSError, ValueError):
            return
        encoding = getattr(terminal, "encoding", None) or "utf-8"
        self._stream = stack.enter_context(os.fdopen(descriptor, "w", encoding=encoding, errors="replace"))

    def tell(self, text: str) -> None:
        """A line at once; may be called in a handler of a signal."""
        text = clean(text)
        if self._below is not None:
            self._below.tell(text)
            return
        with suppress(OSError, ValueError):  # the terminal is closed, or no file
            # Past the buffers of the stream, in the middle of which a signal may come.
            os.write(self._stream.fileno(), f"\n{text}\n".encode(errors="replace"))

    def draw(self, topology: GpuTopology, reports: Path, config: pytest.Config, stack: ExitStack) -> None:
        """Keep a table of all GPUs below everything else, until `stack` is closed."""

        def shown() -> RenderableType:
            return live.table(self.sample, topology, live.running_check(reports)) if self.sample else ""

        self._keep_below(shown, len(topology.gpus) + live.AROUND, config, stack)

    def draw_nodes(self, now: Callable[[], str], config: pytest.Config, stack: ExitStack) -> None:
        """Keep a line on what many nodes are at below everything else, until `stack` is closed."""
        from rich.text import Text

        shown = lambda: Text(clean(f"{time.strftime('%H:%M:%S')} {now()}"), no_wrap=True, overflow="crop")  # noqa: E731
        self._keep_below(shown, 1, config, stack)

    def _keep_below(
        self, shown: Callable[[], RenderableType], lines: int, config: pytest.Config, stack: ExitStack
    ) -> None:
        captured = config.getoption("capture", "no") == "fd"  # else tests write there too
        if captured and live.has_room(self._stream, lines):
            self._below = stack.enter_context(live.Below(self._stream, shown))
            self._replaced = stack.enter_context(ExitStack())
            self._replaced.callback(setattr, self, "_below", None)
            self._replaced.enter_context(compat.terminal_replaced(config, self._below))

    def leave_to_a_debugger(self) -> None:
        if self._below is not None:
            self._below.leave()
            self._replaced.close()

    def progress(self, seconds: float) -> Callable[[float, Any], None]:
        """tell(seconds done, latest sample) writes how far something long is, unless the table says so."""
        return live.teller(self._stream, seconds, lambda: self._below is not None)


SCREEN = pytest.StashKey[Screen]()  # of the configuration


MOST_NAMES = 16  # of nodes in one line
INSECURE = ", which lets in anyone who reaches its ports, to run anything (--fleet-insecure)"


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = config.stash[RUN]
    if not run.options.makes_a_run or run.evidence is None:
        return []
    resumed = f"; {len(run.carried)} checks carried over from {run.options.resume}" if run.options.resume else ""
    lines = [f"gpufleet: {run.target.headline(run.options.level, run.options.basis)}{resumed}"]
    header = run.evidence.record.run
    if header.transport:
        safe = INSECURE if header.secured == "insecure" else ""
        how = "processes of this machine" if header.transport == "local" else f"by {header.transport}"
        lines.append(f"nodes: {some([node.host for node in header.nodes], MOST_NAMES)}, {how}{safe}")
        return [*lines, *host_runs.one_host(run.evidence.record)]
    return [*lines, *summary_lines.software(run.evidence.record)]


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """On what tests run that were given none of our options, before the first of them does."""
    run = config.stash[RUN]
    if run.evidence is not None or run.options.listing or not any(map(uses_ranks, items)):
        return None
    config.stash[SCREEN].open(config, run.open_things)
    return f"gpufleet: {run.target.headline(run.options.level, run.options.basis)}"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    run = config.stash[RUN]
    if run.evidence is None:
        return
    record, wrong = run.evidence.record, {"red": True}
    terminalreporter.section("gpufleet", sep="=")
    if run.never_began:
        terminalreporter.write_line("nothing was tested, because of the error below", **wrong)
        return
    removed, problems = run.pruned
    shown = () if config.option.tbstyle == "no" else compat.failures_shown(config)
    with in_language(record.run.language):
        lines = summary_lines.summary_lines(record, str(run.folder), config.get_verbosity() > 0, shown)
        lines += [(trouble, wrong) for trouble in run.unwritten]
        if removed:
            lines.append((f"removed by --fleet-keep: {', '.join(removed)}", {}))
        lines += [(problem, wrong) for problem in problems]
        if run.folder.report.exists():
            lines.append((say("report: {file}", file=run.folder.report), {}))
        elif run.evidence.path.exists():
            lines.append((say("evidence: {file}", file=run.evidence.path), {}))
    for text, markup in lines:
        terminalreporter.write_line(text, **markup)
