"""The figures of a group of checks as tables, each figure beside its limit.

Three forms: a column for each GPU where every GPU has a figure of its own; a column for each message size where a
curve was measured; else one figure a row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.place import WORLD, Place, Where
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.heat_tables import spans_nodes
from pytest_gpufleet.verdict.judgement import allowed_spread


class Sources:
    """Numbers for where limits come from, so that a table need not repeat a sentence in every row."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, limit: Limit) -> int:
        source = limit.full_source if limit.calibration else limit.source
        return self._numbers.setdefault((limit.origin, source), len(self._numbers) + 1)

    def rows(self) -> list[tuple[int, str, str]]:
        """(number, grade, source) of each."""
        return [(number, *texts) for texts, number in self._numbers.items()]


FEWEST_SIZES = 3
MOST_COLUMNS = 10  # of figures in a table: more do not fit on the width of a page
Column = TypeVar("Column")
LIKE_PEERS = "like the peers"


@dataclass(frozen=True)
class FigureCell:
    """`state` puts a mark in front of the text, `below` a line under it, and `source` the number of a footnote. `open`:
    why it was not judged."""

    text: str = ""
    state: str = ""
    below: str = ""
    source: int | None = None
    kind: str = "text"  # or "figure"
    open: str = ""


@dataclass(frozen=True)
class FigureRow:
    name: str
    details: str
    cells: tuple[FigureCell, ...]
    for_information: bool


@dataclass(frozen=True)
class FigureTable:
    """The figures of one metric. `shared` are the conditions that all of them have in common."""

    title: str
    unit: str
    better: str
    shared: str
    columns: tuple[str, ...]
    rows: tuple[FigureRow, ...]

    @property
    def judged(self) -> tuple[FigureRow, ...]:
        return tuple(row for row in self.rows if not row.for_information)

    @property
    def folded(self) -> tuple[FigureRow, ...]:
        return tuple(row for row in self.rows if row.for_information)


Form = Callable[[Sequence[Finding], Sources, wording.Hosts], list[FigureTable]]


def figure_tables(
    findings: Sequence[Finding], sources: Sources, hosts: wording.Hosts = wording.ALONE
) -> list[FigureTable]:
    """A table for each metric, in the order in which the metrics are defined; what has no value is left out."""
    known = list(METRICS)
    of_names = grouped((finding.measurement.metric, finding) for finding in findings if finding.measurement.values)
    result = []
    for name in sorted(of_names, key=lambda name: known.index(name) if name in known else len(known)):
        sizes = {_nbytes(finding) for finding in of_names[name] if _is_curve(finding)}
        curved = len(sizes) >= FEWEST_SIZES
        forms = grouped((_form(finding, curved), finding) for finding in of_names[name])
        result += [table for form in FORMS if form in forms for table in form(forms[form], sources, hosts)]
    return result


def _form(finding: Finding, curved: bool) -> Form:
    if per_gpu(finding):
        return _by_gpu
    return _by_size if curved and _is_curve(finding) else _singly


def per_gpu(finding: Finding) -> bool:
    """Whether several GPUs (or CPU ranks) of one machine have a figure of their own."""
    values = finding.measurement.values
    return (
        len(values) > 1
        and not spans_nodes(finding)
        and all(isinstance(place, Place) and place.is_device for place in values)
    )


def for_information(finding: Finding) -> bool:
    """Whether nobody has to have a limit for it, nobody had, and it was held against no peers."""
    against_none = finding.slower_than_peers is None or finding.again
    return bool(not finding.required and finding.state in ("for information", "not judged") and against_none)


def state(finding: Finding) -> str:
    """The state of a figure as a reader is told: without a limit it can still be held against its peers."""
    return LIKE_PEERS if finding.state == "for information" and not for_information(finding) else finding.state


def _by_gpu(findings: Sequence[Finding], sources: Sources, hosts: wording.Hosts) -> list[FigureTable]:
    """A column for each GPU; the limit is one for all of them."""
    places = sorted({place for finding in findings for place in finding.measurement.values})
    shared, names = wording.shared_and_own(findings)
    result = []
    for some in _pages(places):
        rows = []
        for finding, name in zip(findings, names, strict=True):
            cells = [_figure(finding, place, in_row=True) for place in some]
            rows.append(_row(finding, name, cells, sources, hosts))
        heads = [wording.place(place, hosts) for place in some]
        result.append(_table(findings, shared, (*heads, "Limit", "Spread", "State"), rows))
    return result


def _by_size(findings: Sequence[Finding], sources: Sources, hosts: wording.Hosts) -> list[FigureTable]:
    """A column for each message size; every figure has a limit of its own, or none."""
    shared, names = wording.shared_and_own(findings, wording.ALONG["bytes"])
    lines: dict[str, dict[float, Finding]] = {}
    for finding, name in zip(findings, names, strict=True):
        line, size = lines.setdefault(name, {}), _nbytes(finding)
        if size not in line or not for_information(finding):  # measured twice: what was judged counts
            line[size] = finding
    result = []
    for sizes in _pages(sorted({_nbytes(finding) for finding in findings})):
        rows = []
        for name, line in lines.items():
            here = [line[size] for size in sizes if size in line]
            cells = [_figure(line[size], WORLD, sources=sources) if size in line else FigureCell() for size in sizes]
            same = {", ".join(wording.words(finding.measurement.details)) for finding in here}
            details = same.pop() if len(same) == 1 else ""
            if here:
                rows.append(FigureRow(name, details, (*cells, _spread(here, hosts)), all(map(for_information, here))))
        result.append(_table(findings, shared, (*map(wording.size, sizes), "Spread"), rows))
    return result


def _pages(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """The columns of one wide table, as those of several that are about equally narrow."""
    count = math.ceil(len(columns) / MOST_COLUMNS)
    for number in range(count):
        yield columns[len(columns) * number // count : len(columns) * (number + 1) // count]


def _singly(findings: Sequence[Finding], sources: Sources, hosts: wording.Hosts) -> list[FigureTable]:
    shared, names = wording.shared_and_own(findings)
    places = any(finding.measurement.values.keys() != {WORLD} for finding in findings)
    rows = []
    for finding, name in zip(findings, names, strict=True):
        worst = wording.worst(finding)
        assert worst is not None  # it has values
        count = len(finding.measurement.values)
        where = wording.place(worst[0], hosts) + (say(", worst of {count}", count=count) if count > 1 else "")
        cells = [_figure(finding, worst[0], in_row=True), *([FigureCell(where)] if places else [])]
        rows.append(_row(finding, name, cells, sources, hosts))
    return [_table(findings, shared, ("Measured", *(["Where"] if places else []), "Limit", "Spread", "State"), rows)]


FORMS: tuple[Form, ...] = (_by_gpu, _by_size, _singly)


def _table(
    findings: Sequence[Finding], shared: str, columns: tuple[str, ...], rows: Sequence[FigureRow]
) -> FigureTable:
    metric = wording.metric(findings[0])
    unit = {"ratio": "%", "": ""}.get(metric.unit, metric.unit)
    return FigureTable(metric.title, unit, f"{metric.better} is better", shared, columns, tuple(rows))


def _row(finding: Finding, name: str, cells: Sequence[FigureCell], sources: Sources, hosts: wording.Hosts) -> FigureRow:
    details = ", ".join(wording.words(finding.measurement.details))
    held = _limit(finding, sources), _spread([finding], hosts), _state(finding)
    return FigureRow(name, details, (*cells, *held), for_information(finding))


def _figure(finding: Finding, place: Where, in_row: bool = False, sources: Sources | None = None) -> FigureCell:
    """The figure of one place. `in_row`: limit and state have columns of their own."""
    values, unit = finding.measurement.values, wording.metric(finding).unit
    if place not in values:
        return FigureCell()
    text, limit = wording.quantity(values[place], unit), ""
    if finding.limit:
        text, limit = wording.value_and_limit(values[place], finding.limit)
    slower = (finding.slower_than_peers or {}).get(place)
    below = say("{share} off peers", share=wording.percent(slower, 2)) if slower else ""
    missed = place in finding.missed or slower is not None
    if in_row:
        return FigureCell(_bare(text, unit), "missed" if missed else "", below, kind="figure")
    number = sources.number(finding.limit) if sources and finding.limit else None
    state = "" if finding.state == "for information" else finding.state
    below = " ".join(filter(None, (_bare(limit, unit), _grade(finding.limit))))
    return FigureCell(_bare(text, unit), state, below, number, "figure", _why_open(finding))


def _limit(finding: Finding, sources: Sources) -> FigureCell:
    if finding.limit is None:
        if finding.slower_than_peers is None:
            return FigureCell()
        worse = say(" or ").join(wording.percent(tolerance.worse) for tolerance in finding.tolerances)
        return FigureCell(say("peers"), below=say("at most {share} worse", share=worse), kind="figure")
    worst = wording.worst(finding)
    text = wording.value_and_limit(worst[1] if worst else finding.limit.value, finding.limit)[1]
    number = sources.number(finding.limit)
    return FigureCell(_bare(text, finding.limit.unit), below=_grade(finding.limit), source=number, kind="figure")


def _grade(limit: Limit | None) -> str:
    """What a limit is worth, and whose it is if it is the customer's."""
    if limit is None:
        return ""
    return say("{grade}, customer's", grade=say(limit.grade)) if limit.given else say(limit.grade)


def _spread(findings: Sequence[Finding], hosts: wording.Hosts) -> FigureCell:
    """How far the samples behind the figures differ at most, of which of several figures, and the fewest samples there
    are; where that is more than a judged figure may, why it is none that fails."""
    spreads = [(spread, at, each) for each in findings for at, spread in each.measurement.spread.items()]
    if not spreads:
        return FigureCell()
    counts = [len(samples) for each in findings for samples in each.measurement.samples.values()]
    widest, at, of = max(spreads, key=lambda spread: spread[0])
    size = wording.size(_nbytes(of)) if len(findings) > 1 else ""
    where = wording.place(at, hosts) if len(of.measurement.spread) > 1 else ""
    told = (say("at {place}", place=where or size) if where or size else "", _why_wide(of))
    text = f"{wording.number(round(100 * widest, 2), 3)} % (n={min(counts)})"
    return FigureCell(text, below=say(", ").join(filter(None, told)))


def _why_wide(finding: Finding) -> str:
    """Why the samples of a figure differ by more than those of a judged one may, if they do."""
    allowed = allowed_spread(finding.measurement)
    if max(finding.measurement.spread.values()) <= allowed:
        return ""
    if not wording.metric(finding).steady:
        return say("no bound")
    judged = finding.state in ("met", "missed")
    return say("above {share}", share=wording.percent(allowed)) if judged else say("not judged")


def _state(finding: Finding) -> FigureCell:
    told = state(finding)
    return FigureCell(told, "met" if told == LIKE_PEERS else told, open=_why_open(finding))


def _why_open(finding: Finding) -> str:
    return finding.reason or "no reason was given" if finding.state == "not judged" else ""


def _bare(text: str, unit: str) -> str:
    """A quantity without its unit, which stands in the table's caption."""
    return text.removesuffix(" %" if unit == "ratio" else f" {unit}")


def _is_curve(finding: Finding) -> bool:
    return finding.measurement.values.keys() == {WORLD} and _nbytes(finding) > 0


def _nbytes(finding: Finding) -> float:
    nbytes = finding.measurement.conditions.get("bytes", 0)
    return float(nbytes) if isinstance(nbytes, int | float) else 0
