"""The end of the run on the terminal: the verdict, why, and what to look at."""

import io
import textwrap
from collections import Counter
from collections.abc import Callable, Collection

from pytest_gpufleet.model.place import on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import STAMPS, headline, next_steps, reasons, stamp, to_look_at, why
from pytest_gpufleet.report.failures import Failure, Miss, accused, failures
from pytest_gpufleet.report.hosts import HostRow, counts, host_rows, nodes_in_words
from pytest_gpufleet.report.margins import group_table, narrow, required_tables
from pytest_gpufleet.report.tables import Table, on_screen
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import all_faults
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.gaps import counted, gaps, inapplicable
from pytest_gpufleet.verdict.verdict import is_stated

Line = tuple[str, dict[str, bool]]

WIDTH = 80
PLAIN: dict[str, bool] = {}
BAD = {"red": True}
HEADING = {"bold": True}


def wrapped(text: str, indent: str, markup: dict[str, bool] = PLAIN) -> list[Line]:
    texts = textwrap.wrap(
        wording.ascii_signs(wording.clean(text)),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(line, markup) for line in texts]


def table_lines(table: Table, width: int = WIDTH) -> list[Line]:
    """A table as plain text; nothing without a row."""
    if not table.rows:
        return []
    from rich.console import Console

    drawn = on_screen(table)
    drawn.title, drawn.box, drawn.pad_edge = None, None, False
    console = Console(width=width, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(drawn)
    return [(line.rstrip(), PLAIN) for line in captured.get().splitlines()]


def _titled(table: Table) -> list[Line]:
    return [(table.title, HEADING), *table_lines(table)]


def and_more(count: int, indent: str, what: str = "", where: str = "which the report lists") -> list[Line]:
    """That there are so many more than those above, of `what`; nothing if there are none."""
    number = wording.count(count, what) if what else count
    return wrapped(f"... and {number} more, {where}", indent) if count > 0 else []


MOST_HOSTS = 20
MOST_FLEET_REASONS = 12


def fleet_lines(fleet: Fleet) -> list[Line]:
    """The lines of the summary, each with its markup."""
    stands_on = basis.in_words(fleet.grades) if fleet.verdict == "ACCEPTED" else ""
    headline = "; ".join(filter(None, (fleet.verdict, ", ".join(counts(fleet)), stands_on)))
    lines = wrapped(headline, "", STAMPS[fleet.verdict].markup)
    for reason in fleet.reasons[:MOST_FLEET_REASONS]:
        lines += wrapped(reason, "  - ")
    lines += and_more(len(fleet.reasons) - MOST_FLEET_REASONS, "  - ")
    if wrong := [row for row in host_rows(fleet) if row.wrong]:
        lines.append((f"Hosts to look at: {len(wrong)}", HEADING))
        lines += [line for row in wrong[:MOST_HOSTS] for line in _host(row)]
        lines += and_more(len(wrong) - MOST_HOSTS, "  ")
    return lines


def _host(row: HostRow) -> list[Line]:
    serial = f", serial {row.run.serial}" if row.run and row.run.serial else ""
    own = f"its own run is {row.verdict}" if row.run else "no run that counts"
    lines = wrapped(f"{row.host}{serial}: {own}", "  ", BAD)
    if row.run and row.verdict == "REJECTED":
        lines += wrapped(why(row.run.record), "    ")
    lines += [line for gpu in row.named for line in wrapped(gpu.identity, "    ", BAD)]
    lines += [line for gap in row.gaps for line in wrapped(gap.what, "    ")]
    for each in row.slow[:1]:
        some = wording.places([on_node(one.place, 0) for one in each.places])
        where = "all of its places" if each.everywhere else some
        more = f", and {wording.count(len(row.slow) - 1, 'measurement')} more" if len(row.slow) > 1 else ""
        what = f"{each.figure.metric.title} of {where} {wording.percent(each.worst.worse)} worse than the fleet's peers"
        lines += wrapped(f"{what}{more}", "    ")
    for difference in row.differences:
        value = next(value for value, hosts in difference.others.items() if row.host in hosts)
        lines += wrapped(f"{difference.fact}: {value}, most hosts: {difference.usual or 'nothing in common'}", "    ")
    return lines


SCREEN = 40  # lines
MOST_NODE_REASONS = 6
MOST_FAULTS = 2  # of a node
MOST_CHECKS = 3
TWO_LINES = 2 * WIDTH - 8


def node_lines(record: Record) -> list[Line]:
    """Each line with its markup: no more than SCREEN, however many nodes there are."""
    lines = [*wrapped(headline(record), "", stamp(record).markup), *wrapped("; ".join(nodes_in_words(record)), "  ")]
    lines += wrapped(why(record), "  ")
    against = reasons(record, with_checks=True)
    for reason in against[:MOST_NODE_REASONS]:
        lines += wrapped(_short(reason), "  - ")
    lines += and_more(len(against) - MOST_NODE_REASONS, "  - ")
    lines += table_lines(narrow(group_table(record)))
    below = _between(record)
    below += _left_open(record, _short)
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
    others = (fault for fault in all_faults(record) if not is_stated(record, fault))
    at_node = (fault for fault in others if any(part.node == node for at in fault.subjects for part in at.parts))
    texts = dict.fromkeys([*_why(record, node), *(fault.described(record.topology.identity) for fault in at_node)])
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


MOST_FAILURES = 100
MOST_MISSES = 3  # of one check
MOST_LINES = 8  # of what it said: a line a GPU
MOST_REASONS = 2  # for which checks do not apply
SHORT = 70  # characters of one


def summary_lines(
    record: Record, folder: str = "FOLDER", detailed: bool = False, shown: Collection[str] = ()
) -> list[Line]:
    """The lines of the summary, each with pytest's markup; 80 columns wide where that cuts no identity. `folder`: the
    one that the run is in. `detailed`: with every required measurement. `shown`: failed checks of which the messages
    stand above."""
    tables = [line for table in (required_tables(record) if detailed else []) for line in _titled(table)]
    if record.of_cluster:
        return [*tables, *node_lines(record)]
    verdict = stamp(record)
    result = [*tables, *wrapped(headline(record), "", verdict.markup), *wrapped(why(record), "  ")]
    for reason in reasons(record):
        result += wrapped(reason, "  - ")
    result += table_lines(narrow(group_table(record)))
    blamed = accused(record)
    if failed := failures(record, blamed):
        result.append((f"Failed checks: {len(blamed)}", HEADING))
        result += [line for failure in failed[:MOST_FAILURES] for line in _failure(failure, shown)]
        result += and_more(len(failed) - MOST_FAILURES, "  ", "failed check", "which are in evidence.jsonl")
    for step in next_steps(record, folder):
        result += [*wrapped(f"Next, {step.why}:", ""), (f"  {step.command}", {})]
    carried = Counter(check.run for check in record.checks.values() if check.run)
    for run, count in carried.items():
        result += wrapped(f"Carried over from {run}: {wording.count(count, 'check')}", "")
    return result + _left_open(record) + _inapplicable(record)


def _left_open(record: Record, shortened: Callable[[str], str] = str) -> list[Line]:
    if stamp(record).word == "INCOMPLETE" and not record.of_cluster:  # the paragraph says it
        return []
    suite = any(map(record.suite.contains, record.checks))
    points = (
        counted(gaps(record)) if suite or not record.run.rehearsal else []
    )  # of own checks nobody asked for the suite
    text = f"Left open: {', '.join(points)} (the report lists each with its reason)" if points else ""
    return wrapped(shortened(text), "", {"yellow": True})


def _inapplicable(record: Record) -> list[Line]:
    """How many checks, and for which reasons most of them: somebody may have meant to give what they need."""
    reasons: Counter[str] = Counter()
    for gap in inapplicable(record):
        reasons[gap.why] += 1
    if not reasons:
        return []
    commonest = [
        f"{textwrap.shorten(reason, SHORT, placeholder=' ...')} ({count})"
        for reason, count in reasons.most_common(MOST_REASONS)
    ]
    text = f"Not applicable: {wording.count(reasons.total(), 'check')}: {'; '.join(commonest)}"
    if (more := len(reasons) - MOST_REASONS) > 0:
        text += f"; and for {wording.count(more, 'other reason')}, which the report lists"
    return wrapped(text, "")


def _failure(failure: Failure, shown: Collection[str]) -> list[Line]:
    """What failed, why if that was found out, which GPUs, how far off, what it means and what to do."""
    cases = f", {len(failure.cases)} cases" if len(failure.cases) > 1 else ""
    result = wrapped(failure.title, "  ", BAD)
    if failure.title != failure.name and not failure.alike:
        result += wrapped(f"{failure.name}{cases}", "    ")
    for text in failure.causes:
        result += [line for each in text.splitlines() for line in wrapped(each, "    ", BAD)]
    said = failure.messages[0].head if failure.messages and failure.name not in shown else ""
    for gpu in failure.gpus:
        if gpu.identity not in "\n".join((said, *failure.causes)):
            result += wrapped(gpu.identity, "    ", BAD)
    for miss in failure.misses[:MOST_MISSES]:
        result += _miss(miss)
    result += and_more(len(failure.misses) - MOST_MISSES, "    ", "measurement")
    said_lines = [line for line in said.splitlines() if line.strip()]
    for line in said_lines[:MOST_LINES]:
        result += wrapped(textwrap.shorten(line, 400, placeholder=" ..."), "    ")
    result += and_more(len(said_lines) - MOST_LINES, "    ", "line", "which the report shows")
    for file, names in failure.by_file.items():
        result += wrapped(f"{file}: {', '.join(names)}", "    ")
    return result + [line for paragraph in failure.advice for line in wrapped(paragraph, "    ")]


def _miss(miss: Miss) -> list[Line]:
    what = ", ".join(filter(None, (miss.metric, miss.conditions)))
    result = wrapped(f"{miss.place}: {what}", "    ", BAD)
    result += wrapped(", ".join(filter(None, (miss.value, miss.peers, f"limit: {miss.limit}"))), "      ")
    if miss.kind != "peers" and miss.source:
        result += wrapped(f"source of the limit: {miss.kind}, {miss.source}", "      ")
    return result
