"""The measurements of a group of checks as tables, each beside its limit: a column for each GPU where every GPU has a
figure of its own, for each message size where a curve was measured, else one figure a row. Of pairs, and of what each
of several nodes has, a matrix in colours too. Of training a table by the number of GPUs."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from pytest_gpufleet.model.conditions import COMPARED_WORK, EACH_ALONE, Condition
from pytest_gpufleet.model.finding import IN_WORDS, Finding, Limit, distinct, that_count
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.metric import METRICS, Measurement, row_of
from pytest_gpufleet.model.place import WORLD, Pair, Place, Where, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.failures import group_title
from pytest_gpufleet.report.tables import Cell, Row, Table, row
from pytest_gpufleet.verdict import basis

# Numbers by grade and source of limits, so that a table need not repeat a sentence in every row.
Sources = dict[tuple[str, str], int]
Column = TypeVar("Column", bound=Hashable)

Line = dict[float, Finding]  # a curve: by size
MOST_COLUMNS = 10  # of figures in a table: more do not fit on the width of a page
LIKE_PEERS = "consistent with peers"


def figure_tables(findings: Sequence[Finding], sources: Sources, hosts: wording.Hosts = wording.ALONE) -> list[Table]:
    """A table for each metric, in the order in which the metrics are defined; what has no value is left out."""
    known = list(METRICS)
    of_names = grouped((finding.measurement.metric, finding) for finding in findings if finding.measurement.values)
    result: list[Table] = []
    for name in sorted(of_names, key=lambda name: known.index(name) if name in known else len(known)):
        sizes = {size_of(each) for each in of_names[name] if each.measurement.values.keys() == {WORLD}}
        by_gpu: list[Finding] = []
        curves: list[Finding] = []
        singly: list[Finding] = []
        for each in of_names[name]:
            at = each.measurement.values
            of_gpus = len(at) > 1 and all(isinstance(place, Place) and place.is_device for place in at)
            curve = len(sizes - {0}) >= 3 and at.keys() == {WORLD} and size_of(each) > 0
            (by_gpu if of_gpus and not _spans_nodes(each) else curves if curve else singly).append(each)
        columns = _pages(sorted({place for each in by_gpu for place in each.measurement.values}))
        result += [_a_row_each(by_gpu, places, sources, hosts) for places in columns]
        result += _by_size(curves, sources, hosts) if curves else []
        result += [_a_row_each(singly, (), sources, hosts)] if singly else []
    return result


def size_of(finding: Finding, key: str = "bytes") -> float:
    size = finding.measurement.conditions.get(key, 0)
    return float(size) if isinstance(size, int | float) else 0


def _spans_nodes(finding: Finding) -> bool:
    """Whether several nodes have figures of their own in it."""
    return len({part.node for place in finding.measurement.values for part in place.parts if part.is_on_node}) > 1


def for_information(finding: Finding) -> bool:
    """Whether it was measured again; or nobody needs a limit for it or had one, and it was held against no peers."""
    unjudged = not finding.required and finding.state in ("for information", "not judged")
    return bool(finding.again) or (unjudged and finding.slower_than_peers is None)


def state(finding: Finding) -> str:
    """The state of a figure as a reader is told: without a limit it can still be held against its peers."""
    return LIKE_PEERS if finding.state == "for information" and not for_information(finding) else finding.state


def _a_row_each(findings: Sequence[Finding], places: Sequence[Where], sources: Sources, hosts: wording.Hosts) -> Table:
    """A row for each finding: a column for each of these GPUs, which have one limit; without any the worst place, which
    is named where any finding has one. Then limit, spread and state."""
    shared, names = wording.shared_and_own(findings)
    placed = not places and any(finding.measurement.values.keys() != {WORLD} for finding in findings)
    heads = [wording.place(place, hosts) for place in places] or ["Measured", *["Where"] * placed]
    rows = []
    for finding, name in zip(findings, names, strict=True):
        worst, count = wording.worst(finding), len(finding.measurement.values)
        assert worst is not None  # it has values
        cells = [_figure(finding, place) for place in places or worst[:1]]
        if placed:
            others = say(", worst of {count}", count=count) if count > 1 else ""
            cells.append(Cell(f"{wording.place(worst[0], hosts)}{others}"))
        shown = state(finding)
        ended = Cell(shown, "met" if shown == LIKE_PEERS else shown, open=_why_open(finding))
        cells += [_limit(finding, sources), _spread([finding], hosts), ended]
        rows.append(Row(name, tuple(cells), _details(finding), for_information(finding)))
    return _table(findings, shared, (*heads, "Limit", "Spread", "State"), rows)


def _details(finding: Finding) -> str:
    return say(", ").join(wording.words(finding.measurement.details))


def _by_size(findings: Sequence[Finding], sources: Sources, hosts: wording.Hosts) -> list[Table]:
    """A column for each message size; every figure has a limit of its own, or none."""
    shared, names = wording.shared_and_own(findings, wording.ALONG["bytes"])
    lines = by_size(findings, names)
    result = []
    for sizes in _pages(sorted({size_of(finding) for finding in findings})):
        rows = []
        for name, line in lines.items():
            if here := [line[size] for size in sizes if size in line]:
                cells = [_with_limit(line[size], sources) if size in line else Cell() for size in sizes]
                details = {*map(_details, here)}
                about = details.pop() if len(details) == 1 else ""
                rows.append(Row(name, (*cells, _spread(here, hosts)), about, all(map(for_information, here))))
        result.append(_table(findings, shared, (*map(wording.size, sizes), "Spread"), rows))
    return result


def by_size(findings: Iterable[Finding], lines: Iterable[Column], key: str = "bytes") -> dict[Column, Line]:
    """The findings of each line by size, from the smallest up. Of a figure measured twice what was judged counts."""
    found: dict[Column, Line] = {}
    for finding, line in zip(findings, lines, strict=True):
        of_line, size = found.setdefault(line, {}), size_of(finding, key)
        if size not in of_line or not for_information(finding):
            of_line[size] = finding
    return {line: dict(sorted(of_line.items())) for line, of_line in found.items()}


def _pages(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """The columns of one wide table, as those of several that are about equally narrow."""
    count = math.ceil(len(columns) / MOST_COLUMNS)
    for number in range(count):
        yield columns[len(columns) * number // count : len(columns) * (number + 1) // count]


def _table(findings: Sequence[Finding], shared: str, columns: tuple[str, ...], rows: Sequence[Row]) -> Table:
    metric = findings[0].measurement.definition
    unit = "%" if metric.unit == "ratio" else metric.unit
    title = say(", ").join(filter(None, (wording.capitalised(say(metric.title)), unit)))
    return Table(title, "Conditions", columns, tuple(rows), (say(f"{metric.better} is better"), shared))


def _figure(finding: Finding, place: Where) -> Cell:
    """The figure of one place; limit and state have columns of their own."""
    if place not in finding.measurement.values:
        return Cell()
    slower = (finding.slower_than_peers or {}).get(place)
    below = say("{share} off peers", share=wording.percent(slower, 2)) if slower else ""
    missed = place in finding.missed or slower is not None
    return Cell(_value_and_limit(finding, place)[0], "missed" if missed else "", below, figure=True)


def _with_limit(finding: Finding, sources: Sources) -> Cell:
    """The figure of all ranks together, with its limit below."""
    (value, limit), (grade, source) = _value_and_limit(finding, WORLD), _worth(finding.limit, sources)
    marked, below = "" if finding.state == "for information" else finding.state, " ".join(filter(None, (limit, grade)))
    return Cell(value, marked, below, source, _why_open(finding), figure=True)


def _value_and_limit(finding: Finding, place: Where | None) -> tuple[str, str]:
    """Of a place, or of no place for the limit alone; without the unit, which stands in the table's caption."""
    limit, unit = finding.limit, finding.measurement.definition.unit
    value = finding.measurement.values[place] if place else limit.value if limit else math.nan
    texts = wording.value_and_limit(value, limit) if limit else (wording.quantity(value, unit), "")
    sign = " %" if unit == "ratio" else f" {unit}"
    return texts[0].removesuffix(sign), texts[1].removesuffix(sign)


def _limit(finding: Finding, sources: Sources) -> Cell:
    if finding.limit is None:
        if finding.slower_than_peers is None:
            return Cell()
        worse = say(" or ").join(wording.percent(tolerance.worse) for tolerance in finding.tolerances)
        return Cell(say("peers"), below=say("at most {share} worse", share=worse), figure=True)
    worst, (grade, source) = wording.worst(finding), _worth(finding.limit, sources)
    return Cell(_value_and_limit(finding, worst[0] if worst else None)[1], "", grade, source, figure=True)


def _worth(limit: Limit | None, sources: Sources) -> tuple[str, int | None]:
    """The grade of a limit, and whose it is if it is the customer's; and the number of its source."""
    if limit is None:
        return "", None
    grade, number = say(IN_WORDS[limit.grade]), sources.setdefault((limit.origin, limit.source), len(sources) + 1)
    return say("{grade}, customer's", grade=grade) if limit.given else grade, number


def _spread(findings: Sequence[Finding], hosts: wording.Hosts) -> Cell:
    """How far the samples differ at most, of which figure, the fewest of them, and why it may be more than allowed."""
    spreads = [(spread, at, each) for each in findings for at, spread in each.measurement.spread.items()]
    if not spreads:
        return Cell()
    fewest = min(len(samples) for each in findings for samples in each.measurement.samples.values())
    widest, at, of = max(spreads, key=lambda spread: spread[0])
    where = wording.size(size_of(of)) if len(findings) > 1 else ""
    where = wording.place(at, hosts) if len(of.measurement.spread) > 1 else where
    allowed = row_of(of.measurement.definition).spread(of.measurement.conditions)
    notes = [say("at {place}", place=where)] if where else []
    if widest > allowed:
        why = "above {share}" if of.state in ("met", "missed") else "not judged"
        why = why if of.measurement.definition.steady else "no bound"
        notes.append(say(why, share=wording.percent(allowed)))
    return Cell(f"{wording.number(round(100 * widest, 2), 3)} % (n={fewest})", below=say(", ").join(notes))


def _why_open(finding: Finding) -> str:
    return finding.reason or "no reason was given" if finding.state == "not judged" else ""


MOST_PLACES = 24  # that are shown pair by pair, even if most pairs were not measured
MOST_ROWS = 25  # of one matrix: then the next begins beside it


def heat_tables(findings: Sequence[Finding], hosts: wording.Hosts = wording.ALONE) -> list[Table]:
    """Of each finding with figures of pairs, and of what several nodes have, then with a row a node."""
    tables = []
    for finding in (each for each in findings if each.measurement.values):
        places = finding.measurement.values
        # Every figure is of one device of a node, or of the same device of two.
        same = all(len({(part.kind, part.index) for part in place.parts}) == 1 for place in places)
        devices = all(part.is_on_node and part.is_device for place in places for part in place.parts)
        if same and devices and _spans_nodes(finding):
            at = {}
            for where in sorted(places):
                first = where.parts[0]
                at[tuple(Place(part.node, "node") for part in where.parts), Place(0, first.kind, first.index)] = where
            rows = {nodes: say(" to ").join(wording.place(node, hosts) for node in nodes) for nodes, _ in at}
            tables += _matrices(finding, "Node", rows, {device: wording.place(device) for _, device in sorted(at)}, at)
        elif all(isinstance(place, Pair) for place in places):
            tables += _pairs(finding, hosts)
    return tables


def _pairs(finding: Finding, hosts: wording.Hosts) -> list[Table]:
    """From the place of the row to that of the column; where few of many pairs were measured, those of each place."""
    values = finding.measurement.values
    given = {(place.parts[0], place.parts[1]): place for place in values}
    if not any(pair[::-1] in given for pair in given):  # each pair was measured once, for both directions
        given |= {(to, place): where for (place, to), where in given.items()}
    names = {place: wording.place(place, hosts) for place in sorted({place for pair in given for place in pair})}
    if len(names) <= MOST_PLACES or 2 * len(given) > len(names) ** 2:
        return _matrices(finding, "From, to", names, names, given)
    # Few of many: those of each place, the lowest first. NaN is worse than any figure.
    partners = grouped(sorted(given, key=lambda pair: (not math.isnan(values[given[pair]]), values[given[pair]])))
    columns = {at: f"{at + 1}." if at else say("lowest") for at in range(max(map(len, partners.values())))}
    others = {(place, number): other for place, found in partners.items() for number, other in enumerate(found)}
    at = {(place, number): given[place, other] for (place, number), other in others.items()}
    beside = {cell: say("with {place}", place=names[other]) for cell, other in others.items()}
    return _matrices(finding, "With others", names, columns, at, beside)


def _matrices(
    finding: Finding, corner: str, rows: Mapping[Any, str], columns: Mapping[Any, str], at: Mapping[Any, Where],
    beside: Mapping[Any, str] | None = None,
) -> list[Table]:  # fmt: skip
    """`at`: where the figure of a (row, column) was measured, if one was. `beside`: what is said below it."""
    metric, values = finding.measurement.definition, finding.measurement.values
    bad = {*finding.missed, *(finding.slower_than_peers or ())}
    numbers = [value for value in values.values() if not math.isnan(value)]
    largest = max((value for value in numbers if math.isfinite(value)), default=0.0)

    def cell(key: object) -> Cell:
        if key not in at:
            return Cell()
        value = values[at[key]]
        share = value / largest if largest > 0 and value > 0 else 0.0  # NaN is not above 0
        missed, below = "missed" if at[key] in bad else "", (beside or {}).get(key, "")
        return Cell(wording.number(value), missed, below, heat=round(100 * min(share, 1.0)))

    made = [Row(name, tuple(cell((row, column)) for column in columns)) for row, name in rows.items()]
    title = f"{wording.capitalised(say(metric.title))}{say(', ')}{metric.unit}"
    lowest, highest = (wording.number(end(numbers, default=math.nan)) for end in (min, max))
    foot = say("{lowest} to {highest}; the fuller the colour, the larger the value.", lowest=lowest, highest=highest)
    notes = (say(", ").join(wording.conditions(finding)),)
    heads = tuple(columns.values())
    parts = (tuple(made[first : first + MOST_ROWS]) for first in range(0, len(made), MOST_ROWS))
    return [Table(title, corner, heads, part, notes, foot) for part in parts]


# Images of ImageNet's training set (ILSVRC 2012): https://image-net.org/download.php
EPOCH_IMAGES = 1_281_167
ALONE, TOGETHER, EFFICIENCY, FED, MEMORY, SHARE = (
    "solo_train_throughput", "train_throughput", "scaling_efficiency", "loader_throughput", "train_memory",
    "communication_share",
)  # fmt: skip
SWEEP = "sweep"
# A table for each kind of workload.
TITLES: dict[Condition, str] = {
    "": "Throughput and efficiency by number of GPUs",
    "custom": "Throughput and efficiency by number of GPUs, of work that was asked for",
    SWEEP: "Training by method, batch, accumulated gradients and number of GPUs",
}
NOTE = (
    "images/s, and below it the efficiency, relative to the sum of as many GPUs alone. "
    "1 GPU: mean of all GPUs, each alone, all at the same time. Epoch: {images} images at the row's best rate"
)
LOST = (
    "percent of the sum of all GPUs alone; derived from the share of communication and from each GPU alone; "
    "the rest is the host, or lower clocks"
)
HEADS_LOST = ("Efficiency", "all_reduce of gradients", "Pace of the slowest", "Anything else")


@dataclass(frozen=True)
class Way:
    """What is trained in one `way`, the conditions of its `figures`, which are by metric and by the number of GPUs, of
    GPUs alone by 1. `kind`: of TITLES. `fed`: by a data loader."""

    kind: Condition
    way: dict[str, Condition]
    fed: bool = False
    figures: dict[tuple[str, int], Mapping[Where, float]] = field(default_factory=dict)

    def by_count(self, *metrics: str) -> dict[int, float]:
        """The means of all places."""
        return {count: fmean(values.values()) for (name, count), values in self.figures.items() if name in metrics}

    @property
    def rates(self) -> dict[int, float]:
        """images/s"""
        return self.by_count(TOGETHER, FED) | self.by_count(ALONE)


def training_tables(findings: Sequence[Finding]) -> list[Table]:
    """The tables of a group of checks; but for the sweep none where no efficiency was measured."""
    ways = grouped((way.kind, way) for way in ways_of(findings))
    shown = {kind: of for kind, of in ways.items() if kind == SWEEP or any(way.by_count(EFFICIENCY) for way in of)}
    tables = [_by_gpus(title, shown[kind]) for kind, title in TITLES.items() if kind in shown]
    lost = tuple(row for of in ways.values() for way in of for row in _lost(way))
    title = wording.capitalised(say("Where efficiency is lost"))
    return [*tables, Table(title, "Conditions", HEADS_LOST, lost, (say(LOST),))] if lost else tables


def is_swept(conditions: Mapping[str, Condition]) -> bool:
    """Whether a figure belongs to the sweep, which was three of them before."""
    return conditions.get("workload") in COMPARED_WORK


def ways_of(findings: Sequence[Finding]) -> list[Way]:
    """By all that training depends on but the number of GPUs. Of other work than the sweep what several did."""
    rows: dict[tuple[object, ...], Way] = {}
    each_alone: list[tuple[Measurement, int, Way]] = []
    for one in (finding.measurement for finding in findings if finding.measurement.values):
        count, method = one.conditions.get("ranks"), ("method", EACH_ALONE)
        under = {key: value for key, value in one.conditions.items() if key != "ranks" and (key, value) != method}
        way = Way(SWEEP if is_swept(under) else under.get("workload", ""), under, one.metric == FED)
        if isinstance(count, int) and one.metric in (TOGETHER, FED, EFFICIENCY, SHARE) and WORLD in one.values:
            row = rows.setdefault((way.fed, *sorted(under.items())), way)
            row.figures[one.metric, count] = {WORLD: one.values[WORLD]}
        elif isinstance(count, int) and one.metric in (ALONE, MEMORY):
            each_alone.append((one, count, way))
    for one, count, of in each_alone:
        # GPUs alone are those of a row whatever trains them together.
        held = {key: value for key, value in of.way.items() if count > 1 or key != "method"}.items()
        ours = [row for row in rows.values() if row.kind == of.kind and not row.fed and held <= row.way.items()]
        if not ours and of.kind == SWEEP:
            ours = [rows.setdefault((False, *sorted(of.way.items())), of)]
        for row in ours:
            row.figures[one.metric, count if one.metric == MEMORY else 1] = one.values
    shown = [row for row in rows.values() if row.kind == SWEEP or max(row.rates, default=1) > 1]
    return sorted(shown, key=lambda row: [value for value in row.way.values() if isinstance(value, int)])


def _by_gpus(title: str, rows: Sequence[Way]) -> Table:
    counts = sorted({1, *(count for way in rows for count in way.rates)})
    memory = any(way.by_count(MEMORY) for way in rows)
    names = [wording.words({key: each for key, each in way.way.items() if key != "workload"}) for way in rows]
    names = [words + [say("fed by a data loader")] * way.fed for words, way in zip(names, rows, strict=True)]
    shared = set.intersection(*map(set, names)) if len(rows) > 1 else set()
    lines = []
    for way, words in zip(rows, names, strict=True):
        rates, efficiencies, used = way.rates, way.by_count(EFFICIENCY), way.by_count(MEMORY)
        below = {count: wording.percent(efficiency) for count, efficiency in efficiencies.items()}
        cells = [
            Cell(wording.number(rates[count]), below=below.get(count, ""), figure=True) if count in rates else Cell()
            for count in counts
        ]
        if memory:
            most = wording.span(way.figures[MEMORY, max(used)].values(), "GiB", 3) if used else ""
            cells.append(Cell(most, figure=True))
        fastest = max(rates.values(), default=0.0)
        cells.append(Cell(wording.duration(EPOCH_IMAGES / fastest) if fastest > 0 else "", figure=True))
        name = say(", ").join(word for word in words if word not in shared)
        lines.append(Row(name or say("images that stay on the GPU"), (*cells,)))
    heads = [say("1 GPU" if count == 1 else "{gpus} GPUs", gpus=count) for count in counts]
    columns = (*heads, *(["GPU memory"] if memory else []), "Epoch of ImageNet")
    notes = say(NOTE, images=f"{EPOCH_IMAGES:,}"), say(", ").join(word for word in names[0] if word in shared)
    return Table(wording.capitalised(say(title)), "Conditions", columns, tuple(lines), notes)


def _lost(way: Way) -> Iterator[Row]:
    """Parts of what the GPUs do alone, added up, by number of GPUs; together 1, or more where the figures do not fit
    together. Delivered: what they do together. Gradients: lost to communication, by its share of a step. Imbalance:
    what faster GPUs could do beyond the slowest. The rest is not told apart: the host, or lower clocks."""
    alone = way.figures.get((ALONE, 1), {})
    total = sum(alone.values())
    for count, share in way.by_count(SHARE).items():
        together = way.rates.get(count, math.nan)
        if len(alone) != count or not (total > 0 and 0 <= share < 1 and together >= 0):  # NaN is neither
            continue
        slowest, pace = min(alone.items(), key=lambda item: item[1])
        delivered = together / total
        gradients, imbalance = delivered * share / (1 - share), 1 - count * pace / total
        parts = (delivered, gradients, imbalance, max(0.0, 1 - delivered - gradients - imbalance))
        below = ("", "", say("of {place}", place=wording.place(slowest)), "")
        cells = (Cell(wording.percent(part), below=text, figure=True) for part, text in zip(parts, below, strict=True))
        conditions = {key: value for key, value in way.way.items() if key not in ("image", "model")}
        yield Row(say(", ").join(wording.words({**conditions, "ranks": count})), tuple(cells))


FULL_BAR = 0.25  # of a limit: far from it is far from it


def _by_group(findings: Iterable[tuple[Finding, Record]]) -> dict[str, list[tuple[Finding, Record]]]:
    order = {title: number for number, title in enumerate(shipped().chapters)}
    found = grouped((group_title(each.check), (each, record)) for each, record in findings)
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def judged(record: Record) -> list[Finding]:
    """What was held against a limit, and what missed its peers or spread too far."""
    return [each for each in distinct(record.findings) if basis.judged_by(each) or each.state == "missed"]


def group_table(*records: Record) -> Table:
    """A row for each group of which something was judged, on many nodes of all of them together: how many measurements
    are within their limits, and the one nearest to its limit or furthest beyond, in `details` how people call it."""
    rows = []
    for group, of_group in _by_group((each, record) for record in records for each in judged(record)).items():
        nearest, record = min(of_group, key=lambda each: wording.margin(each[0]))
        within = sum(each.state == "met" for each, _ in of_group)
        value, limit, margin, where = texts(nearest, record.hosts)
        host = record.run.host if len(records) > 1 and not record.of_cluster else ""
        share = max(-FULL_BAR, min(1.0, wording.margin(nearest) / FULL_BAR))  # beyond it there is less room
        cells = (
            Cell(say("{met} of {count}", met=within, count=len(of_group)), "missed" if within < len(of_group) else ""),
            Cell(margin, nearest.state, bar=share),
            *map(Cell, (value, limit, named(nearest), " ".join(filter(None, (host, where))))),
        )
        leads = {key: of for key, of in nearest.measurement.conditions.items() if key in SHORT}
        rows.append(Row(say(group), cells, say(", ").join([wording.title(nearest), *wording.words(leads)])))
    columns = ("Within limits", "Smallest margin", "Measured", "Limit", "What", "Where")
    note = say("the bar begins at the limit and is full at {share} or more", share=wording.percent(FULL_BAR))
    return Table("Margin to the limits, by group", "Group", columns, tuple(rows), (note,))


SHORT = (*wording.LEADING, "bytes")  # conditions by which people call a measurement


def narrow(table: Table) -> Table:
    """`group_table` for a terminal."""
    rows = []
    for each in table.rows:
        within, margin, value, limit, _, where = (cell.text for cell in each.cells)
        held = f"{value} ({limit})" if limit else value  # else it missed its peers, or spread too far
        rows.append(row(each.name, within, margin, f"{each.details}{say(': ')}{held}{say(', ')}{where}"))
    return Table("", "Group", ("In limits", "Margin", "Nearest to its limit"), tuple(rows))


def required_tables(record: Record) -> list[Table]:
    """A table for each group and metric, with every measurement that the verdict requires."""
    tables = []
    required = ((each, record) for each in that_count(distinct(record.findings)) if each.required)
    for group, found in _by_group(required).items():
        for findings in grouped((each.measurement.metric, each) for each, _ in found).values():
            shared, names = wording.shared_and_own(findings)
            title = say(", ").join(filter(None, (wording.title(findings[0]), shared)))
            rows = []
            for name, each in zip(names, findings, strict=True):
                value, limit, margin, where = texts(each, record.hosts)
                rows.append(row(name, value, limit or say(each.state), margin, where))
            columns = ("Value", "Limit", "Margin", "Where")
            tables.append(Table(f"{say(group)}{say(': ')}{title}", "Conditions", columns, tuple(rows)))
    return tables


def texts(finding: Finding, hosts: wording.Hosts = wording.ALONE) -> tuple[str, str, str, str]:
    """The value nearest to the limit, the limit without its unit, the margin ("+2.1 %"), the place; "" where none."""
    nearest, limit = wording.worst(finding), finding.limit
    if nearest is None:
        return "", "", "", ""
    place = wording.place(nearest[0], hosts)
    share, value = wording.margin(finding), wording.quantity(nearest[1], finding.measurement.unit)
    margin = f"{'+' if share >= 0 else ''}{wording.percent(share, 2)}" if math.isfinite(share) else ""
    if limit is None or wording.off_peers(finding):
        return value, say("peers") if share < 0 else "", margin, place
    value, line = wording.value_and_limit(nearest[1], limit)
    return value, line.removesuffix(value.rpartition(" ")[2]).strip(), margin, place


def named(finding: Finding) -> str:
    return say(", ").join([wording.title(finding), *wording.conditions(finding)])
