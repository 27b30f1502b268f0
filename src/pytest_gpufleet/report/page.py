"""The page that somebody signs: verdict, the GPUs at a glance, what failed, every figure beside its limit."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.finding import GRADES, IN_WORDS, Finding, distinct
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import Language, in_language, say
from pytest_gpufleet.model.levels import includes
from pytest_gpufleet.model.metric import AS_NCCL_IS, STEADY
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import titled
from pytest_gpufleet.report import gpu_grid, machine_section, wording
from pytest_gpufleet.report.banner import next_steps, reasons, stamp, why
from pytest_gpufleet.report.failures import Accused, accused, failures, return_tables
from pytest_gpufleet.report.figures import (
    LIKE_PEERS,
    Sources,
    figure_tables,
    for_information,
    heat_tables,
    is_swept,
    state,
    training_tables,
)
from pytest_gpufleet.report.gpu_grid import grid_rows, legend
from pytest_gpufleet.report.hosts import HostsPart, nodes_in_words, nodes_part
from pytest_gpufleet.report.margins import margins, named, texts
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.tables import Cell, Row, Table
from pytest_gpufleet.verdict import basis, requirements
from pytest_gpufleet.verdict.fleet.host_runs import NodeRuns, between
from pytest_gpufleet.verdict.gaps import Gap, Kind, answered, gaps, in_cases, inapplicable, newer, not_applied

SETTLED = ("passed", "not applicable", "met", "for information")  # checks, and figures
STATE_WORDS = {
    "met": "within limits", "missed": "outside limits", LIKE_PEERS: "consistent with peers",
    "for information": "informational",
}  # fmt: skip
STATES = ("met", LIKE_PEERS, "missed", "not judged", "for information")
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
MOST_NAMED = 8  # figures of one row of what is left open

LEAVES_NOTHING_OPEN = {
    "Not applicable: what this machine does not have, which leaves nothing open": inapplicable,
    "Checks that are newer than this run, which leaves nothing open": newer,
    "Limits of the customer's profile that held for nothing": not_applied,
}

Plots = list[tuple[str, str]]  # caption and SVG


@dataclass(frozen=True)
class Section:
    """A group of checks as it stands in the report."""

    group: gpu_grid.Group
    lines: list[gpu_grid.CheckLine]
    plots: Plots
    heats: list[Table]
    tables: list[Table]
    left_out: int = 0  # figures

    @property
    def settled(self) -> bool:
        """Whether nobody has to look at it: all passed, and no figure missed or is open."""
        ended = all(line.state in SETTLED for line in self.lines)
        return ended and all(finding.state in SETTLED or for_information(finding) for finding in self.group.findings)

    def in_short(self) -> str:
        outcomes = Counter(check.outcome if check else "unfinished" for check in self.group.checks.values())
        states = Counter(map(state, self.group.findings))
        parts = [
            _tally("check", outcomes, gpu_grid.GRAVITY),
            _tally("measurement", states, STATES) if states else "",
        ]
        return say("; ").join(filter(None, parts))


def _content(record: Record, nodes: HostsPart | None) -> dict[str, Any]:
    """What the templates show. `nodes`: of a run on many, what their own runs came to."""
    own = [row.run.record for row in nodes.rows if row.run] if nodes else []
    said, parts = accused(record), gpu_grid.groups(record)
    sources: Sources = {}
    if nodes:  # what is at nodes alone, their rows have
        ours = {check for part in parts for check in (*part.checks, *(each.check for each in part.findings))}
        said = {check: each for check, each in said.items() if check in ours}
    failed = failures(record, said)
    shown = enumerate(failed[:MOST_FAILURES], 1)
    anchors = {name: f"fleet-failure-{number}" for number, failure in shown for name in failure.names}
    rows = [] if nodes else grid_rows(record, parts, said)
    return {
        "record": record,
        "run": record.run,
        "machine": machine_section,
        "topology": GpuTopology() if nodes else record.topology,  # each node has a report of its own
        "within": _within(record, *own),
        "returned": return_tables(record),
        "margins": _margins(record, *own),
        "stamp": stamp(record),
        "why": why(record),
        "reasons": reasons(record, "all of which are listed below", of_fleet=nodes.fleet.reasons if nodes else ()),
        "counts": _counts(record, own),
        "groups": parts,
        "links": {say(part.title): number for number, part in enumerate(parts, 1)},
        "hosts": nodes,
        "rows": rows,
        # A group that says nothing of any GPU, nor of the host, needs no column.
        "columns": [number for number in range(len(parts)) if any(row.cells[number].state for row in rows)],
        "legend": legend(rows),
        "failures": failed[:MOST_FAILURES],
        "failures_left_out": len(failed[MOST_FAILURES:]),
        "most_rows": MOST_ROWS,
        "anchors": anchors,
        "sections": list(_sections(parts, said, sources, record.hosts)),
        "sources": sources,
        "telemetry": _telemetry(record),
        "requirements": _requirements(record, own),
        **_open(record, nodes),
        **MAY_DIFFER,
        "grades": IN_WORDS.values(),
        "symbols": wording.SYMBOLS,
    }


def _within(*records: Record) -> str:
    """The line below the verdict: "22 of 24 measurements within limits, 30 not judged"."""
    open = (each.required and each.state == "not judged" for record in records for each in distinct(record.findings))
    count, within = sum(open), basis.within(basis.by_grade(*records), basis.missed(*records))
    more = say("{count} not judged", count=count) if count and within else ""
    return say(", ").join(filter(None, (within, more)))


FULL_BAR = 0.25  # of a limit: far from it is far from it


def _margins(*records: Record) -> Table:
    """A row for each group: of all of its measurements the one that came nearest to its limit."""
    rows = []
    for each in margins(*records):
        value, limit, margin, where = texts(each.nearest, each.record.hosts)
        host = each.record.run.host if len(records) > 1 and not each.record.of_cluster else ""
        share = max(-0.25, min(1.0, wording.margin(each.nearest) / FULL_BAR))  # beyond it there is less room
        state = "missed" if each.within < each.judged else ""
        cells = (
            Cell(say("{met} of {count}", met=each.within, count=each.judged), state),
            Cell(margin, each.nearest.state, bar=share),
            Cell(value),
            Cell(limit),
            Cell(named(each.nearest)),
            Cell(" ".join(filter(None, (host, where)))),
        )
        rows.append(Row(say(each.group), cells))
    columns = ("Within limits", "Smallest margin", "Measured", "Limit", "What", "Where")
    note = say("the bar begins at the limit and is full at {share} or more", share=wording.percent(FULL_BAR))
    return Table("Margin to the limits, by group", "Group", columns, tuple(rows), (note,))


def _requirements(record: Record, own: Sequence[Record]) -> Table | None:
    """What --fleet-requirements asked for, as the run answers it. `own`: runs of its nodes."""
    given = record.requirements
    if given is None:
        return None
    rows = []
    for each in answered(record, own):
        asked, why = each.requirement, each.why or say("; ").join(requirements.names(each.requirement))
        rows.append(Row(asked.id, (Cell(asked.text), Cell(state=each.state), Cell(why))))
    columns = ("Requirement", "State", "Checks that answer it, or why it is not met")
    note = f"{given.file}{say(', ')}SHA-256 {given.sha256}"
    return Table(given.name, "Number", columns, tuple(rows), (note,))


def _open(record: Record, nodes: HostsPart | None) -> dict[str, Any]:
    """What the templates show of what is left open. `opened`: by group and reason the anchor of its row."""
    found = gap_rows(gaps(record), record)
    found += [GapRow(gap.kind, gap.what, "The run", gap.hosts, 0) for gap in nodes.fleet.gaps] if nodes else []
    opened: dict[str, dict[str, str]] = {}
    for number, gap in enumerate(found[:MOST_ROWS], 1):
        opened.setdefault(gap.group, {}).setdefault(gap.why, f"fleet-gap-{number}")
    possible = [check for check in record.suite.checks.values() if check.nodes <= len(record.hosts)]
    settled = {caption: gap_rows(gaps_of(record), record) for caption, gaps_of in LEAVES_NOTHING_OPEN.items()}
    return {
        "gaps": found,
        "opened": opened,
        "settled": {caption: rows for caption, rows in settled.items() if rows},
        # How many checks that a run on so many nodes could do belong to a higher level.
        "above": sum(not includes(record.run.level, check.level) for check in possible),
        "next_steps": next_steps(record),
        "unread": _unread(record),
    }


def _unread(record: Record) -> list[str]:
    """What could not be read, and is not among the reasons of the verdict."""
    rows = gap_rows((gap for gap in gaps(record) if gap.kind == "skipped" and not gap.counts), record)
    found = [say(", ").join([say(row.group), say(row.why)]) for row in rows]
    return [*record.topology.problems, *found][:MOST_NAMED]


@dataclass(frozen=True)
class GapRow:
    """Gaps of one kind among the checks of one group, for one reason. `more`: figures that are not named, since each
    stands in a table above."""

    kind: str
    why: str
    group: str
    things: tuple[str, ...]
    more: int


def gap_rows(found: Iterable[Gap], record: Record) -> list[GapRow]:
    """One for each reason and group of checks."""
    rows = []
    for key, each in grouped(((gap.kind, gap.why, _group(gap)), gap) for gap in found).items():
        things = _things(each, record)
        most = MOST_NAMED if each[0].finding else len(things)
        rows.append(GapRow(*key, tuple(things[:most]), len(things[most:])))
    return rows


def _group(gap: Gap) -> str:
    return gpu_grid.group_title(gap.check) if gap.check else "The run"


def _things(found: list[Gap], record: Record) -> list[str]:
    """What a row is about: figures, checks with their cases, else what the gaps name."""
    if figures := [gap.finding for gap in found if gap.finding]:
        return [say(", ").join([wording.title(each), *wording.conditions(each)]) for each in figures]
    if whole := AS_A_WHOLE.get(found[0].kind):
        return [say(whole)]
    titles = {levels.check_name(check.id): check.title for check in record.checks.values()}
    by_check = grouped((gap.check or gap.subject, gap) for gap in found)
    return [
        titled(name, titles.get(name, "")) + in_cases(each, record.suite) if each[0].check else name
        for name, each in by_check.items()
    ]


def _sections(
    groups: Sequence[gpu_grid.Group], accused: Mapping[str, Accused], sources: Sources, hosts: wording.Hosts
) -> Iterator[Section]:
    room = MOST_FIGURES
    for number, group in enumerate(group for group in groups if group.checks or group.findings):
        every = group.findings
        if len(every) > room:  # first what somebody has to look at
            every = tuple(sorted(every, key=lambda finding: finding.state in SETTLED)[:room])
        room -= len(every)
        # The sweep has one table, of all of its figures.
        findings = [each for each in every if not (is_swept(each.measurement.conditions) and for_information(each))]
        yield Section(
            group,
            gpu_grid.check_lines(group, accused),
            _drawn(every) if number < MOST_DRAWN else [],
            heat_tables(findings, hosts),
            [*training_tables(every), *figure_tables(findings, sources, hosts)],
            len(group.findings) - len(every),
        )


def _counts(record: Record, own: Sequence[Record]) -> list[str]:
    """The run in figures: checks, what was measured, and what it was held against. `own`: runs of its nodes."""
    outcomes: Counter[str] = Counter(check.outcome for check in record.checks.values() if check.asked)
    states = Counter(map(state, distinct(record.findings)))
    parts = [
        *nodes_in_words(record),
        _tally("check", outcomes, ("passed", "failed", "skipped", "not applicable")),
        _tally("measurement", states, STATES),
        _basis(record, own),
        "" if own else basis.has_run(record),
        *basis.outdated(record),
    ]
    return [text for text in parts if text]


def _basis(record: Record, own: Sequence[Record]) -> str:
    """ "Limits: 19 calibrated, 23 theoretical (...), at least published asked for"; "" where there is none"""
    parts = [*filter(None, [basis.grades(basis.by_grade(record, *own))])]
    if record.run.basis != GRADES[-1]:
        parts.append(say("at least {grade} asked for", grade=say(IN_WORDS[record.run.basis])))
    return say("Limits: {grades}", grades=say(", ").join(parts)) if parts else ""


def _tally(noun: str, counts: Counter[str], order: Sequence[str]) -> str:
    parts = [f"{counts[name]} {say(STATE_WORDS.get(name, name))}" for name in order if counts[name]]
    total = counts.total()
    return f"{total} {say(noun if total == 1 else f'{noun}s')}" + (say(": ") + say(", ").join(parts) if parts else "")


def _drawn(findings: Sequence[Finding]) -> Plots:
    """The plots of a group. matplotlib is loaded here, once there is something to draw."""
    if not findings:
        return []
    from pytest_gpufleet.report.plots.figure_plots import draw

    return draw(findings)


def _telemetry(record: Record) -> Plots:
    times = [sample.time for sample in record.telemetry]
    if not times or max(times) - times[0] < SHORTEST_DRAWN:  # and no need to load matplotlib
        return []
    from pytest_gpufleet.report.plots import telemetry_plots

    places = [gpu.place for gpu in record.topology.gpus]
    return telemetry_plots.svgs(record.telemetry, places, record.spans)


ALONE: NodeRuns = {}
NOWHERE: Mapping[str, str] = {}


def page(
    record: Record,
    sha256: str = "",
    runs: NodeRuns = ALONE,
    reports: Mapping[str, str] = NOWHERE,
    language: Language | None = None,
) -> str:
    """The report of a run as a self-contained HTML page: the one that the run writes and that of `gpufleet report`.

    `sha256`: of the whole evidence file. `runs` and `reports`: as `hosts.nodes_part` takes them. `language`: that
    of the run, if none is given.
    """
    record = between(record, runs)
    with in_language(language or record.run.language):
        return render(
            "page.html.jinja",
            title=f"{say('GPU acceptance report')}{say(': ')}{record.run.host or say('unknown host')}",
            made="Made by {tool} from the evidence of the run.",
            foot=machine_section.page_foot(record, sha256),
            sha256=sha256,
            **_content(record, nodes_part(record, runs, reports)),
        )
