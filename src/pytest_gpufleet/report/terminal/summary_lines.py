"""The end of the run on the terminal: the verdict, why, and what to look at; and a run as text."""

import io
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import grouped, on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import machine_section, wording
from pytest_gpufleet.report.banner import STAMPS, headline, next_steps, reasons, stamp, to_look_at, why
from pytest_gpufleet.report.failures import Failure, accused, failures, message
from pytest_gpufleet.report.figures import group_table, named, narrow, required_tables, texts
from pytest_gpufleet.report.hosts import HostRow, beside, counts, host_rows, nodes_in_words
from pytest_gpufleet.report.tables import Table, on_screen
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import all_faults
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.gaps import counted, gaps
from pytest_gpufleet.verdict.verdict import is_stated

Line = tuple[str, dict[str, bool]]  # with pytest's markup

WIDTH = 80
PLAIN: dict[str, bool] = {}
BAD = {"red": True}
HEADING = {"bold": True}


class Wrapper(textwrap.TextWrapper):
    """Breaks lines between Chinese characters too, not before punctuation; each has two columns, the second a NUL."""

    WIDE, STOP = "[\u2e80-\u9fff\uff00-\uffef]", "[\u3001\u3002\uff01\uff09\uff0c\uff1a\uff1b\uff1f]\0"
    wordsep_simple_re = re.compile(rf"(\s+|(?:{WIDE}\0|[!-~]+(?={STOP}))(?:{STOP})*)")


def wrapped(text: str, indent: str, markup: dict[str, bool] = PLAIN) -> list[Line]:
    below = " " * len(indent)
    wrapper = Wrapper(
        WIDTH, initial_indent=indent, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )
    wide = re.sub(f"({Wrapper.WIDE})", "\\1\0", wording.ascii_signs(wording.clean(text)))
    return [(line.replace("\0", ""), markup) for line in wrapper.wrap(wide)]


def table_lines(table: Table, width: int = WIDTH) -> list[Line]:
    """A table as plain text; nothing without a row."""
    if not table.rows:
        return []
    from rich.console import Console

    drawn = on_screen(table)
    drawn.title, drawn.box, drawn.pad_edge = None, None, False
    Console(width=width, color_system=None, file=(file := io.StringIO())).print(drawn)
    return [(line.rstrip(), PLAIN) for line in file.getvalue().splitlines()]


def first_few(each: Sequence[list[Line]], most: int, indent: str, where: str = "which the report lists") -> list[Line]:
    """The lines of the first `most`, and that there are so many more, if there are."""
    more = say("... and {count} more, {where}", count=len(each) - most, where=say(where))
    left = wrapped(more, indent) if len(each) > most else []
    return [*(line for lines in each[:most] for line in lines), *left]


MOST_HOSTS = 20


def fleet_lines(fleet: Fleet) -> list[Line]:
    stands_on = basis.in_words(fleet.grades) if fleet.verdict == "ACCEPTED" else ""
    headline = "; ".join(filter(None, (fleet.verdict, ", ".join(counts(fleet)), stands_on)))
    lines = wrapped(headline, "", STAMPS[fleet.verdict].markup)
    lines += first_few([wrapped(reason, "  - ") for reason in fleet.reasons], 12, "  - ")
    rows = sorted(host_rows(fleet), key=lambda row: row.verdict, reverse=True)  # REJECTED, INCOMPLETE, ACCEPTED, none
    if wrong := [_host(row) for row in rows if row.wrong]:
        lines += [(f"Hosts to look at: {len(wrong)}", HEADING), *first_few(wrong, MOST_HOSTS, "  ")]
    return lines


def _host(row: HostRow) -> list[Line]:
    serial = f", serial {row.run.serial}" if row.run and row.run.serial else ""
    own = f"its own run is {row.verdict}" if row.run else "no run that counts"
    lines = wrapped(f"{row.host}{serial}: {own}", "  ", BAD)
    lines += wrapped(why(row.run.record), "    ") if row.run and row.verdict == "REJECTED" else []
    lines += [line for gpu in row.named for line in wrapped(gpu.identity, "    ", BAD)]
    below = beside(row)
    for each in row.slow[:1]:
        at = "all of its places" if each.everywhere else wording.places([on_node(one.place, 0) for one in each.places])
        more = f", and {wording.count(len(row.slow) - 1, 'measurement')} more" if len(row.slow) > 1 else ""
        worse = wording.percent(each.worst.worse)
        below.append(f"{each.figure.metric.title} of {at} {worse} worse than the fleet's peers{more}")
    for difference in row.differences:
        value = next(value for value, hosts in difference.others.items() if row.host in hosts)
        below.append(f"{difference.fact}: {value}, most hosts: {difference.usual or 'no common value'}")
    return lines + _indented(below)


def _indented(texts: Iterable[str]) -> list[Line]:
    return [line for text in texts for line in wrapped(text, "    ")]


SCREEN = 40  # lines


def node_lines(record: Record) -> list[Line]:
    """No more than SCREEN, however many nodes there are."""
    lines = wrapped(headline(record), "", stamp(record).markup)
    lines += [*wrapped(say("; ").join(nodes_in_words(record)), "  "), *wrapped(why(record), "  ")]
    lines += first_few([wrapped(_short(reason), "  - ") for reason in reasons(record, with_checks=True)], 6, "  - ")
    lines += table_lines(narrow(group_table(record)))
    # The checks between nodes that failed, with what was found out about each.
    said = {check: each for check, each in accused(record).items() if record.suite.between_nodes(check)}
    failed = failures(record, said)
    below: list[Line] = [(say("Failed checks between nodes: {count}", count=len(failed)), HEADING)] if failed else []
    for failure in failed[:3]:
        texts = (*failure.causes, *(message.head for message in failure.messages))[:1]
        below += [*wrapped(_short(failure.title), "  ", BAD), *_indented(map(_short, texts))]
    below += wrapped(_short(_left_open(record)), "", {"yellow": True})
    found, room = to_look_at(record), SCREEN - len(lines) - len(below)
    nodes: list[Line] = [(say("Nodes to look at: {count}", count=len(found)), HEADING)] if found else []
    for shown, (node, state) in enumerate(found.items()):
        own = _node(record, node, state)
        if len(nodes) + len(own) >= room:
            things, listed = wording.count(len(found) - shown, "more node"), say("which the report lists")
            nodes += wrapped(say("... and {things}, {where}", things=things, where=listed), "  ")
            break
        nodes += own
    return [*lines, *nodes, *below]


def _node(record: Record, node: int, state: str) -> list[Line]:
    """Why it was lost, or else the first reason of its own run; and what is said of it beside that."""
    number = record.node(node).serial
    serial = f"{say(', ')}{say('serial {serial}', serial=number)}" if number else ""
    end = record.finished.get(node)
    texts = [*end.reasons[:1]] if end and end.verdict == "REJECTED" else []
    texts = [record.lost[node].why] if node in record.lost else texts
    for fault in (fault for fault in all_faults(record) if not is_stated(record, fault)):
        if any(part.node == node for at in fault.subjects for part in at.parts):
            texts.append(fault.described(record.topology.identity))
    head = wrapped(f"{record.hosts[node]}{serial}{say(': ')}{say(state)}", "  ", BAD)
    return head + _indented(map(_short, [*dict.fromkeys(texts)][:2]))


def _short(text: str) -> str:
    """In two lines at most."""
    return textwrap.shorten(wording.clean(text), 2 * WIDTH - 8, placeholder=" ...")


MOST_FAILURES = 100
MOST_LINES = 8  # of what it said: a line a GPU


def summary_lines(
    record: Record, folder: str = "FOLDER", detailed: bool = False, shown: Collection[str] = ()
) -> list[Line]:
    """The lines of the summary, 80 columns wide where that cuts no identity. `folder`: the one that the run is in.
    `detailed`: with every required measurement. `shown`: failed checks of which the messages stand above."""
    tables: list[Line] = []
    for table in required_tables(record) if detailed else ():
        tables += [(table.title, HEADING), *table_lines(table)]
    steps: list[Line] = []
    for aim, command in next_steps(record, folder):
        steps += [*wrapped(say("Next, {why}:", why=aim), ""), (f"  {command}", {})]
    if record.of_cluster:
        return [*tables, *node_lines(record), *steps]
    result = [*tables, *wrapped(headline(record), "", stamp(record).markup), *wrapped(why(record), "  ")]
    result += [line for reason in reasons(record) for line in wrapped(reason, "  - ")]
    result += table_lines(narrow(group_table(record)))
    blamed = accused(record)
    if failed := [_failure(failure, shown) for failure in failures(record, blamed)]:
        no_others = blamed.keys() <= {*record.failed}
        text = "Failed checks: {count}" if no_others else "Failed checks and other faults: {count}"
        result.append((say(text, count=len(blamed)), HEADING))
        result += first_few(failed, MOST_FAILURES, "  ", "which are in evidence.jsonl")
    result += steps
    for run, count in Counter(check.run for check in record.checks.values() if check.run).items():
        result += wrapped(say("Carried over from {run}: {checks}", run=run, checks=wording.count(count, "check")), "")
    if stamp(record).word != "INCOMPLETE":  # the paragraph says it
        result += wrapped(_left_open(record), "", {"yellow": True})
    return result


def _left_open(record: Record) -> str:
    # Of own checks nobody asked for the suite.
    suite = any(map(record.suite.contains, record.checks))
    points = counted(gaps(record)) if suite or not record.run.rehearsal else []
    text = "Left open: {points} (the report lists each with its reason)"
    return say(text, points=say(", ").join(points)) if points else ""


def _failure(failure: Failure, shown: Collection[str]) -> list[Line]:
    """What failed, why if that was found out, which GPUs, how far off, what it means and what to do."""
    several = len(failure.cases) > 1
    result = wrapped(failure.title, "  ", BAD)
    if failure.title != failure.name and not failure.alike:
        name, count = failure.name, len(failure.cases)
        result += wrapped(say("{reason}, {count} cases", reason=name, count=count) if several else name, "    ")
    said = failure.messages[0].head if failure.messages and failure.name not in shown else ""
    bad = [line for text in failure.causes for line in text.splitlines()]
    bad += [gpu.identity for gpu in failure.gpus if gpu.identity not in "\n".join((said, *failure.causes))]
    result += [line for text in bad for line in wrapped(text, "    ", BAD)]
    misses = []
    for miss in failure.misses:
        what = f"{miss.place}{say(': ')}{miss.metric}", miss.conditions
        held = miss.value, miss.peers, f"{say('limit: ')}{miss.limit}"
        lines = wrapped(say(", ").join(filter(None, what)), "    ", BAD)
        lines += wrapped(say(", ").join(filter(None, held)), "      ")
        if miss.kind != "peers" and miss.source:
            text = say("source of the limit: {kind}, {source}", kind=say(miss.kind), source=miss.source)
            lines += wrapped(text, "      ")
        misses.append(lines)
    result += first_few(misses, 3, "    ")
    texts = (textwrap.shorten(line, 400, placeholder=" ...") for line in said.splitlines() if line.strip())
    result += first_few([wrapped(text, "    ") for text in texts], MOST_LINES, "    ", "which the report shows")
    result += _indented(f"{file}: {', '.join(names)}" for file, names in failure.by_file.items())
    return result + _indented(failure.advice)


def software(record: Record) -> list[str]:
    """The versions of what the GPUs run with, and how they are linked: in a line where all pairs are alike."""
    topology = record.topology
    versions = ((name, getattr(topology, name.lower())) for name in ("driver", "CUDA", "cuDNN", "NCCL", "torch"))
    lines = [f"versions: {', '.join(f'{name} {version}' for name, version in versions if version)}"]
    links = machine_section.links(topology)
    kinds = {cell.text for row, each in enumerate(links.rows) for at, cell in enumerate(each.cells) if row != at}
    if len(kinds) == 1:
        return [*lines, f"links: {kinds.pop()} between every two GPUs"]
    return [*lines, *(line for line, _ in table_lines(links, 400))]


def beginning(record: Record) -> str:
    """Of report.txt, which has this and the checks while a run goes on."""
    run = record.run
    gpus = wording.models(record.topology.gpus) or "no GPU"
    head = f"pytest-gpufleet {run.plugin} on {run.host}, {wording.moment(run.utc)}, level {run.level}: {gpus}"
    return _joined([head, f"command: {run.command}", *software(record), ""])


def of_check(record: Record, check_id: str, findings: Iterable[Finding]) -> str:
    """How a check ended, what it measured, and all that it said if it failed."""
    check = record.checks[check_id]
    lines = [f"{check.outcome:<14} {wording.duration(check.seconds):>12}  {check.id}"]
    for finding in findings:
        value, limit, margin, where = texts(finding, record.hosts)
        held = f" ({', '.join(filter(None, (limit, margin)))})" if limit else ""
        lines.append(f"    {finding.state}: {named(finding)}: {value}{held}, {where}")
    said = message(check).whole or message(check).head
    return _joined([*lines, *(f"    {line}" for line in said.splitlines())])


def ending(record: Record, folder: str) -> str:
    return _joined(["", *(line for line, _ in summary_lines(record, folder, detailed=True))])


def text_report(record: Record, folder: str) -> str:
    findings = grouped((finding.check, finding) for finding in record.findings)
    checks = (of_check(record, check_id, findings.get(check_id, ())) for check_id in record.checks)
    return "".join((beginning(record), *checks, ending(record, folder)))


def _joined(lines: list[str]) -> str:
    return "".join(f"{wording.ascii_signs(wording.clean(line))}\n" for line in lines)
