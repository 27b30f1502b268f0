"""The page that somebody signs: verdict, the GPUs at a glance, what failed, every measurement beside its limit."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.finding import GRADES, IN_WORDS, Finding, distinct
from pytest_gpufleet.model.language import Language, in_language, say
from pytest_gpufleet.model.metric import AS_NCCL_IS, STEADY
from pytest_gpufleet.model.place import GpuTopology, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped, titled
from pytest_gpufleet.report import failures, figures, machine_section, wording
from pytest_gpufleet.report.banner import next_steps, reasons, stamp, why
from pytest_gpufleet.report.figures import group_table, named
from pytest_gpufleet.report.hosts import HostsPart, nodes_in_words, rows as rows_of_nodes
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.tables import Cell, Row, Table
from pytest_gpufleet.verdict import basis, requirements
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.fleet.host_runs import between
from pytest_gpufleet.verdict.gaps import Gap, Kind, answered, gaps, in_cases, inapplicable, newer, not_applied

SETTLED = ("passed", "not applicable", "met", "for information")  # checks, and figures
STATE_WORDS = {"met": "within limits", "missed": "outside limits", "for information": "informational"}
STATES = ("met", figures.LIKE_PEERS, "missed", "not judged", "for information")
# Seconds of telemetry below which it is not drawn. Level quick of recorded machines had 7 to 16 samples, one a second,
# in which no GPU became warm; to load matplotlib and draw them took a tenth of the run.
SHORTEST_DRAWN = 20.0
MAY_DIFFER = {"steady": wording.percent(STEADY), "by_nccl": wording.percent(AS_NCCL_IS)}  # samples of a figure
MOST_DRAWN = 24  # groups of checks with plots; the suite has ten, and evidence may come from anybody
# More than these nobody reads, and pages of tens of thousands take minutes. Level burnin on 4 GPUs has 402 figures.
MOST_FIGURES, MOST_FAILURES, MOST_ROWS = 4000, 200, 400
AS_A_WHOLE: dict[Kind, str] = {
    "incomplete": "the run as a whole", "calibrated here": "the profile as a whole", "too short": "the burn-in",
}  # fmt: skip
MOST_AT_THE_TOP = 5  # failed checks
MOST_NAMED = 8  # figures of one row of what is left open

LEAVES_NOTHING_OPEN = {
    "Not applicable: what this machine does not have; nothing is left open by it": inapplicable,
    "Checks that are newer than this run; nothing is left open by them": newer,
    "Limits of the given profile that applied to no measurement": not_applied,
}


def page(
    record: Record, sha256: str = "", fleet: Fleet | None = None, reports: Mapping[str, str] | None = None,
    language: Language | None = None,
) -> str:  # fmt: skip
    """The report of a run as a self-contained HTML page. `sha256`: of the whole evidence file. `fleet`: of many nodes.
    `reports`: as `HostsPart` has them. `language`: that of the run, if none is given."""
    record, nodes = between(record), None
    with in_language(language or record.run.language):
        if fleet:
            nodes = HostsPart("node", "nodes", fleet, rows_of_nodes(record, fleet), reports or {})
        title = f"{say('GPU acceptance report')}{say(': ')}{record.run.host or say('unknown host')}"
        return render(
            "page.html.jinja", title=title, made="Made by {tool} from the evidence of the run.", sha256=sha256,
            foot=machine_section.page_foot(record, sha256), **_content(record, nodes),
        )  # fmt: skip


def _content(record: Record, nodes: HostsPart | None) -> dict[str, Any]:
    """What the templates show. `nodes`: of a run on many, what their own runs came to."""
    own = [row.run.record for row in nodes.rows if row.run] if nodes else []
    said, parts = failures.accused(record), failures.groups(record)
    sources: figures.Sources = {}
    if nodes:  # what is at nodes alone, their rows have
        ours = {check for part in parts for check in (*part.checks, *(each.check for each in part.findings))}
        said = {check: each for check, each in said.items() if check in ours}
    failed = failures.failures(record, said)
    shown = enumerate(failed[:MOST_FAILURES], 1)
    rows = [] if nodes else failures.grid_rows(record, parts, said)
    states = {cell.state for row in rows for cell in row.cells}
    judged = [each.state == "met" for one in (record, *own) for each in figures.judged(one)]
    return {
        "record": record,
        "run": record.run,
        "machine": machine_section,
        "topology": GpuTopology() if nodes else record.topology,  # each node has a report of its own
        "within": basis.within(sum(judged), len(judged)) if record.verdict == "ACCEPTED" else "",
        "returned": failures.return_tables(record),
        "margins": group_table(record, *own),
        "stamp": stamp(record),
        "why": why(record),
        "reasons": reasons(record, "all of which are listed below", of_fleet=nodes.fleet.reasons if nodes else ()),
        "counts": _counts(record, own),
        "groups": parts,
        "chapters": shipped().chapters,
        "links": {say(part.title): number for number, part in enumerate(parts, 1)},
        "hosts": nodes,
        "rows": rows,
        # A group that says nothing of any GPU, nor of the host, needs no column.
        "columns": [number for number in range(len(parts)) if any(row.cells[number].state for row in rows)],
        "legend": [text for state, text in failures.MEANING.items() if state in states],
        "marks": failures.SYMBOLS,
        "failures": failed[:MOST_FAILURES],
        "failures_left_out": len(failed[MOST_FAILURES:]),
        "most_at_the_top": MOST_AT_THE_TOP,
        "most_rows": MOST_ROWS,
        "most_messages": failures.MOST_MESSAGES,
        "anchors": {each.name: f"fleet-failure-{at}" for at, failure in shown for each in failure.alike or [failure]},
        "sections": list(_sections(parts, said, sources, record.hosts)),
        "sources": sources,
        "telemetry": _telemetry(record),
        "requirements": _requirements(record, own),
        **_open(record, nodes),
        **MAY_DIFFER,
        "grades": IN_WORDS.values(),
        "symbols": wording.SYMBOLS,
    }


def _counts(record: Record, own: Sequence[Record]) -> list[str]:
    """The run in figures: checks, what was measured, and what it was held against. `own`: runs of its nodes."""
    outcomes: Counter[str] = Counter(check.outcome for check in record.checks.values() if check.asked)
    limits = [*filter(None, [basis.grades(basis.by_grade(record, *own))])]
    if record.run.basis != GRADES[-1]:
        limits.append(say("at least {grade} asked for", grade=say(IN_WORDS[record.run.basis])))
    parts = [
        *nodes_in_words(record),
        _tally("check", outcomes, ("passed", "failed", "skipped", "not applicable")),
        _tally("measurement", Counter(map(figures.state, distinct(record.findings))), STATES),
        say("Limits: {grades}", grades=say(", ").join(limits)) if limits else "",
        "" if own else basis.has_run(record),
        *basis.outdated(record),
    ]
    return [text for text in parts if text]


def _tally(noun: str, counts: Counter[str], order: Sequence[str]) -> str:
    parts = [f"{counts[name]} {say(STATE_WORDS.get(name, name))}" for name in order if counts[name]]
    total = counts.total()
    return f"{total} {say(noun if total == 1 else f'{noun}s')}" + (say(": ") + say(", ").join(parts) if parts else "")


def _sections(
    groups: Sequence[failures.Group],
    accused: Mapping[str, failures.Accused],
    sources: figures.Sources,
    hosts: wording.Hosts,
) -> Iterator[dict[str, Any]]:
    """Each group of checks as it stands in the report."""
    room = MOST_FIGURES
    for number, group in enumerate(group for group in groups if group.checks or group.findings):
        every = group.findings
        if len(every) > room:  # first what somebody has to look at
            every = tuple(sorted(every, key=lambda finding: finding.state in SETTLED)[:room])
        room -= len(every)
        # The sweep has one table, of all of its figures.
        swept = (figures.is_swept(each.measurement.conditions) and figures.for_information(each) for each in every)
        apart = [each for each, in_sweep in zip(every, swept, strict=True) if not in_sweep]
        lines, states = failures.check_lines(group, accused), Counter(map(figures.state, group.findings))
        tallies = [_tally("check", Counter(group.outcomes), failures.GRAVITY)]
        open_ = (each for each in group.findings if each.state not in SETTLED and not figures.for_information(each))
        yield {
            "group": group,
            "in_short": say("; ").join([*tallies, *([_tally("measurement", states, STATES)] if states else [])]),
            # Nobody has to look at it: all passed, and no figure missed or is open.
            "settled": all(line.cells[0].state in SETTLED for line in lines) and not any(open_),
            "lines": lines,
            "plots": _curves(every) if every and number < MOST_DRAWN else [],
            "heats": figures.heat_tables(apart, hosts),
            "tables": [*figures.training_tables(every), *figures.figure_tables(apart, sources, hosts)],
            "left_out": len(group.findings) - len(every),
        }


def _curves(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """The plots of a group, each with its caption. matplotlib is loaded here, once there is something to draw."""
    from pytest_gpufleet.report.plots import curves

    return curves(findings)


def _telemetry(record: Record) -> str:
    times = [sample.time for sample in record.telemetry]
    if not times or max(times) - times[0] < SHORTEST_DRAWN:
        return ""
    from pytest_gpufleet.report.plots import telemetry

    return telemetry(record.telemetry, [gpu.place for gpu in record.topology.gpus], record.spans)


def _requirements(record: Record, own: Sequence[Record]) -> Table | None:
    """What --fleet-requirements asked for, as the run answers it. `own`: runs of its nodes."""
    if (given := record.requirements) is None:
        return None
    rows = []
    for each in answered(record, own):
        asked, why = each.requirement, each.why or say("; ").join(requirements.names(each.requirement))
        rows.append(Row(asked.id, (Cell(asked.text), Cell(state=each.state), Cell(why))))
    columns = ("Requirement", "State", "Checks that answer it, or why it is not met")
    return Table(given.name, "Number", columns, tuple(rows), (f"{given.file}{say(', ')}SHA-256 {given.sha256}",))


def _open(record: Record, nodes: HostsPart | None) -> dict[str, Any]:
    """What the templates show of what is left open. `opened`: by group and reason the anchor of its row."""
    found = gap_rows(gaps(record), record)
    found += [GapRow(gap.kind, gap.what, "The run", gap.hosts, 0) for gap in nodes.fleet.gaps] if nodes else []
    opened: dict[str, dict[str, str]] = {}
    for number, gap in enumerate(found[:MOST_ROWS], 1):
        opened.setdefault(gap.group, {}).setdefault(gap.why, f"fleet-gap-{number}")
    possible = [check for check in record.suite.checks.values() if check.nodes <= len(record.hosts)]
    settled = {caption: gap_rows(gaps_of(record), record) for caption, gaps_of in LEAVES_NOTHING_OPEN.items()}
    # What could not be read, and is not among the reasons of the verdict.
    skipped = gap_rows((gap for gap in gaps(record) if gap.kind == "skipped" and not gap.counts), record)
    unread = [*record.topology.problems, *(f"{say(row.group)}{say(', ')}{say(row.why)}" for row in skipped)]
    return {
        "gaps": found,
        "opened": opened,
        "settled": {caption: rows for caption, rows in settled.items() if rows},
        # How many checks that a run on so many nodes could do belong to a higher level.
        "above": sum(not levels.includes(record.run.level, check.level) for check in possible),
        "next_steps": next_steps(record),
        "unread": unread[:MOST_NAMED],
    }


class GapRow(NamedTuple):
    """Gaps of one kind and reason in one group of checks. `more`: figures that only the tables above name."""

    kind: str
    why: str
    group: str
    things: Sequence[str]
    more: int


def gap_rows(found: Iterable[Gap], record: Record) -> list[GapRow]:
    """One for each reason and group of checks."""
    rows, titles = [], {levels.check_name(check.id): check.title for check in record.checks.values()}
    groups = ((failures.group_title(gap.check) if gap.check else "The run", gap) for gap in found)
    for key, each in grouped(((gap.kind, gap.why, group), gap) for group, gap in groups).items():
        things = [
            titled(name, titles.get(name, "")) + in_cases(of, record.suite) if of[0].check else name
            for name, of in grouped((gap.check or gap.subject, gap) for gap in each).items()
        ]
        things = [say(AS_A_WHOLE[each[0].kind])] if each[0].kind in AS_A_WHOLE else things
        named_ones = [named(gap.finding) for gap in each if gap.finding]
        rows.append(GapRow(*key, named_ones[:MOST_NAMED] or things, len(named_ones[MOST_NAMED:])))
    return rows
