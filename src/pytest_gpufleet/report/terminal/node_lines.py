"""The end of a run on many nodes on the terminal: the verdict, why, and the nodes to look at, on one screen."""

from __future__ import annotations

import textwrap

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.accused import accused
from pytest_gpufleet.report.banner import headline, reasons, stamp
from pytest_gpufleet.report.failures import failures
from pytest_gpufleet.report.node_standings import nodes_in_words, to_look_at
from pytest_gpufleet.report.open_points import counted, gaps
from pytest_gpufleet.report.reason_texts import why
from pytest_gpufleet.report.terminal.screen_lines import BAD, HEADING, WIDTH, Line, and_more, wrapped
from pytest_gpufleet.verdict.accusations import told
from pytest_gpufleet.verdict.node_verdicts import tells

SCREEN = 40  # lines
MOST_REASONS = 6
MOST_FAULTS = 2  # of a node
MOST_CHECKS = 3
TWO_LINES = 2 * WIDTH - 8


def node_lines(record: Record) -> list[Line]:
    """Each line with its markup: no more than SCREEN, however many nodes there are."""
    lines = [*wrapped(headline(record), "", stamp(record).markup), *wrapped("; ".join(nodes_in_words(record)), "  ")]
    lines += wrapped(why(record), "  ")
    against = reasons(record)
    for reason in against[:MOST_REASONS]:
        lines += wrapped(_short(reason), "  - ")
    lines += and_more(len(against) - MOST_REASONS, "  - ")
    below = _between(record)
    if left_open := counted(gaps(record)):
        text = f"Left open: {', '.join(left_open)} (the report lists each with its reason)"
        below += wrapped(_short(text), "", {"yellow": True})
    return [*lines, *_nodes(record, SCREEN - len(lines) - len(below)), *below]


def _nodes(record: Record, room: int) -> list[Line]:
    """The nodes to look at, as many as there is room for."""
    found = to_look_at(record)
    if not found:
        return []
    lines: list[Line] = [(f"Nodes to look at: {len(found)}", HEADING)]
    for shown, (node, state) in enumerate(found.items()):
        own = _node(record, node, state)
        if len(lines) + len(own) >= room:
            more = f"... and {wording.count(len(found) - shown, 'more node')}, which the report lists"
            return [*lines, *wrapped(more, "  ")]
        lines += own
    return lines


def _node(record: Record, node: int, state: str) -> list[Line]:
    serial = f", serial {number}" if (number := record.node(node).serial) else ""
    lines = wrapped(f"{record.hosts[node]}{serial}: {state}", "  ", BAD)
    others = (fault for fault in told(record) if not tells(record, fault))
    at_node = (fault for fault in others if any(part.node == node for at in fault.subjects for part in at.parts))
    texts = dict.fromkeys([*_why(record, node), *(fault.told(record.topology.identity) for fault in at_node)])
    for text in list(texts)[:MOST_FAULTS]:
        lines += wrapped(_short(text), "    ")
    return lines


def _why(record: Record, node: int) -> list[str]:
    """Why a node was lost, or else the first reason of its own run."""
    if node in record.lost:
        return [record.lost[node].why]
    end = record.finished.get(node)
    return [reason for reason in end.reasons if end.verdict == "REJECTED"][:1] if end else []


def _between(record: Record) -> list[Line]:
    """The checks between nodes that failed, with what was found out about each."""
    said = {check: each for check, each in accused(record).items() if record.suite.between_nodes(check)}
    failed = failures(record, said)
    if not failed:
        return []
    lines: list[Line] = [(f"Failed checks between nodes: {len(failed)}", HEADING)]
    for failure in failed[:MOST_CHECKS]:
        lines += wrapped(_short(failure.title), "  ", BAD)
        for text in (*failure.causes, *(message.head for message in failure.messages))[:1]:
            lines += wrapped(_short(text), "    ")
    return lines


def _short(text: str) -> str:
    return textwrap.shorten(wording.clean(text), TWO_LINES, placeholder=" ...")
