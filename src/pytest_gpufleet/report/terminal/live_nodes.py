"""What the nodes of a run are at, in the lowest lines of a terminal, while pytest writes above them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from pytest_gpufleet.model.language import some
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.terminal.lowest_lines import LowestLines

MOST_ROWS = 20
MOST_NAMES = 6  # of nodes that are waited for
TURN_SECONDS = 1.0  # as often as nodes tell what they are at


@dataclass(frozen=True)
class NodeNow:
    """`wrong`: what is not fine with it, in a word or two. `waited_for`: all others have done what it is at. None for
    what nobody has told."""

    host: str
    doing: str
    wrong: str = ""
    waited_for: bool = False
    hottest_c: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class NodesNow:
    """`check`: that the run over all nodes is at, "" if it is at none."""

    check: str
    nodes: Sequence[NodeNow]


def lines(now: NodesNow, rows: int, columns: int) -> list[str]:
    """One on the check and who is waited for, and below it `rows` nodes, first those that are not fine, then those
    that are waited for."""
    late = [node.host for node in now.nodes if node.waited_for]
    waiting = f", waiting for {some(late, MOST_NAMES)}" if late else ""
    shown = sorted(now.nodes, key=lambda node: (not node.wrong, not node.waited_for))
    if len(shown) > rows > 0:
        shown = shown[: rows - 1]
    told = [f"{now.check or 'no check is on'}{waiting}", *(map(_row, shown) if rows else ())]
    if rows and len(shown) < len(now.nodes):
        wrong = sum(bool(node.wrong) for node in now.nodes) - sum(bool(node.wrong) for node in shown)
        told.append(f"and {len(now.nodes) - len(shown)} more nodes, {f'{wrong} of them' if wrong else 'none'} not fine")
    return [wording.clean(line)[:columns] for line in told]


def _row(node: NodeNow) -> str:
    hottest = "" if node.hottest_c is None else f"{node.hottest_c:.0f} C"
    power = "" if node.watts is None else f"{node.watts:.0f} W"
    return f"{node.host:<16} {node.wrong:<9} {hottest:>5} {power:>8}  {node.doing}"


class LiveNodes:
    """Draws what `now()` tells, once a second, from a thread of its own. `rows`: of nodes, 0 for none."""

    def __init__(self, now: Callable[[], NodesNow], stream: TextIO, rows: int) -> None:
        self._now = now
        self._rows = min(rows, MOST_ROWS)
        self._lines = LowestLines(stream, 1 + self._rows)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpufleet live nodes", daemon=True)

    def __enter__(self) -> LiveNodes:
        if self._lines.reserve():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._lines.release()

    def _run(self) -> None:
        while not self._over.wait(TURN_SECONDS):
            if columns := self._lines.reserve():
                clock = time.strftime("%H:%M:%S")
                head, *below = lines(self._now(), self._rows, columns)
                self._lines.draw([f"{clock} {head}"[:columns], *below])
