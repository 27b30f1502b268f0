"""What the nodes of a run are at, in lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.language import some
from pytest_gpufleet.report import wording

MOST_ROWS = 20
MOST_NAMES = 6  # of nodes that are waited for


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


def lines(now: NodesNow, rows: int) -> list[str]:
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
    return [wording.clean(line) for line in told]


def _row(node: NodeNow) -> str:
    hottest = "" if node.hottest_c is None else f"{node.hottest_c:.0f} C"
    power = "" if node.watts is None else f"{node.watts:.0f} W"
    return f"{node.host:<16} {node.wrong:<9} {hottest:>5} {power:>8}  {node.doing}"
