"""Training by the number of GPUs: throughput, efficiency and where it is lost, memory and time of an epoch, made of the
figures of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pytest_gpufleet.model.conditions import COMPARED_WORK, EACH_ALONE, Condition
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD, Where
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.tables import Cell, Row as Line, Table


@dataclass(frozen=True)
class Losses:
    """Parts of what the GPUs do alone, added up; together 1, or more where the figures do not fit together.

    `delivered`: what they do together, the scaling efficiency. `gradients`: lost to communication, as its share of a
    step says. `imbalance`: what faster GPUs could do beyond the pace of the slowest. `rest`: told apart by nothing that
    is measured: the host, or clocks that are lower when all communicate.
    """

    conditions: Mapping[str, Condition]
    delivered: float
    gradients: float
    imbalance: float
    rest: float
    slowest: Where  # whose pace it is


def efficiency_losses(findings: Sequence[Finding]) -> list[Losses]:
    """Of each way of training whose share of communication was measured, beside each GPU alone."""
    measured = [finding.measurement for finding in findings if finding.measurement.values]
    together = {_key(one, "ranks"): one for one in measured if one.metric == "train_throughput"}
    alone = {_key(one): one for one in measured if one.metric == "solo_train_throughput"}
    found = []
    for share in (one for one in measured if one.metric == "communication_share" and WORLD in one.values):
        many, each = together.get(_key(share, "ranks")), alone.get(_key(share))
        if many is not None and each is not None and len(each.values) == share.conditions.get("ranks"):
            found += _losses(many, each, share)
    return found


def _losses(many: Measurement, each: Measurement, share: Measurement) -> list[Losses]:
    total, waits = sum(each.values.values()), share.values[WORLD]
    if not (total > 0 and 0 <= waits < 1 and many.values.get(WORLD, 0) >= 0):  # NaN is neither
        return []
    slowest, pace = min(each.values.items(), key=lambda item: item[1])
    delivered = many.values[WORLD] / total
    gradients = delivered * waits / (1 - waits)
    imbalance = 1 - len(each.values) * pace / total
    rest = max(0.0, 1 - delivered - gradients - imbalance)
    conditions = {key: value for key, value in many.conditions.items() if key not in ("image", "model")}
    return [Losses(conditions, delivered, gradients, imbalance, rest, slowest)]


def _key(measurement: Measurement, *also: str) -> tuple[object, ...]:
    names = ("model", "recipe", "batch", "image", "optimizer", "workload", *also)
    return tuple(measurement.conditions.get(name) for name in names)


# Images of ImageNet's training set (ILSVRC 2012): https://image-net.org/download.php
EPOCH_IMAGES = 1_281_167
ALONE, TOGETHER, EFFICIENCY, FED, MEMORY = (
    "solo_train_throughput", "train_throughput", "scaling_efficiency", "loader_throughput", "train_memory",
)  # fmt: skip
SWEEP = "sweep"
# A table for each kind of workload.
TITLES: dict[Condition, str] = {
    "": "Throughput and efficiency by number of GPUs",
    "custom": "Throughput and efficiency by number of GPUs, of work that was asked for",
    SWEEP: "Training by method, batch, accumulated gradients and number of GPUs",
}
NOTE = (
    "images/s, and below them the efficiency: of what as many GPUs do alone, added up. "
    "1 GPU: each alone, all at the same time, on average. "
    "Derived: an epoch, {images} images at the row's best rate"
)
LOST = (
    "per cent of what the GPUs do alone, added up, derived from the share of communication and from each GPU alone; "
    "what these do not tell apart is the host, or clocks"
)
TITLE_LOST = "Where efficiency is lost"
HEADS_LOST = ("Efficiency", "all_reduce of gradients", "Pace of the slowest", "Anything else")
EPOCH, GPU_MEMORY = "Epoch of ImageNet", "GPU memory"
BY_LOADER, FROM_MEMORY = "fed by a data loader", "images that stay on the GPU"


@dataclass(frozen=True)
class Row:
    """What is trained in one `way`, the conditions of its figures: images/s, efficiency and GiB of each GPU, all by the
    number of GPUs; 1: each alone, on average. `fed`: by a data loader."""

    way: dict[str, Condition]
    fed: bool = False
    rates: dict[int, float] = field(default_factory=dict)
    efficiencies: dict[int, float] = field(default_factory=dict)
    memory: dict[int, list[float]] = field(default_factory=dict)

    def words(self) -> list[str]:
        words = wording.words({key: value for key, value in self.way.items() if key != "workload"})
        return [*words, say(BY_LOADER)] if self.fed else words


def training_tables(findings: Sequence[Finding]) -> list[Table]:
    """The tables of a group of checks; but for the sweep none where no efficiency was measured."""
    tables = []
    for kind, title in TITLES.items():
        rows = rows_of(findings, kind)
        if any(row.efficiencies or kind == SWEEP for row in rows):
            tables.append(_by_gpus(title, rows))
    losses = efficiency_losses(findings)
    return [*tables, *([_lost(losses)] if losses else [])]


def is_swept(conditions: Mapping[str, Condition]) -> bool:
    """Whether a figure belongs to the sweep, which was three of them before."""
    return conditions.get("workload") in COMPARED_WORK


def rows_of(findings: Sequence[Finding], kind: Condition) -> list[Row]:
    """What was trained of one kind of workload, by all that training depends on but the number of GPUs; by the numbers
    in which they differ. Of other work than the sweep only what several GPUs did together."""
    rows: dict[tuple[object, ...], Row] = {}
    each_alone = []
    for one in (finding.measurement for finding in findings if finding.measurement.values):
        count, way = one.conditions.get("ranks"), _way(one)
        if (SWEEP if is_swept(way) else way.get("workload", "")) != kind or not isinstance(count, int):
            continue
        if one.metric in (TOGETHER, FED, EFFICIENCY) and WORLD in one.values:
            row = rows.setdefault((one.metric == FED, *sorted(way.items())), Row(way, one.metric == FED))
            (row.efficiencies if one.metric == EFFICIENCY else row.rates)[count] = one.values[WORLD]
        elif one.metric in (ALONE, MEMORY):
            each_alone.append((one, count, way))
    for one, count, way in each_alone:
        ours = [row for row in rows.values() if not row.fed and _holds(way, row.way, count)]
        if not ours and kind == SWEEP:
            ours = [rows.setdefault((False, *sorted(way.items())), Row(way))]
        for row in ours:
            if one.metric == ALONE:
                row.rates[1] = fmean(one.values.values())
            else:
                row.memory[count] = [*one.values.values()]
    shown = [row for row in rows.values() if kind == SWEEP or max(row.rates, default=1) > 1]
    return sorted(shown, key=lambda row: [value for value in row.way.values() if isinstance(value, int)])


def _way(measurement: Measurement) -> dict[str, Condition]:
    way = {key: value for key, value in measurement.conditions.items() if key != "ranks"}
    return {key: value for key, value in way.items() if (key, value) != ("method", EACH_ALONE)}


def _holds(way: dict[str, Condition], row: dict[str, Condition], count: int) -> bool:
    """Whether a figure of each GPU is one of a row: that of GPUs alone, whatever trains them together."""
    return all(row.get(key) == value for key, value in way.items() if count > 1 or key != "method")


def _by_gpus(title: str, rows: Sequence[Row]) -> Table:
    counts = sorted({1, *(count for row in rows for count in row.rates)})
    memory = any(row.memory for row in rows)
    names = [row.words() for row in rows]
    shared = set.intersection(*map(set, names)) if len(rows) > 1 else set()
    lines = []
    for row, words in zip(rows, names, strict=True):
        cells = [_rate(row.rates.get(count), row.efficiencies.get(count)) for count in counts]
        if memory:
            used = row.memory[max(row.memory)] if row.memory else []
            cells.append(Cell(wording.span(used, "GiB", 3) if used else "", figure=True))
        fastest = max(row.rates.values(), default=0.0)
        epoch = wording.duration(EPOCH_IMAGES / fastest) if fastest > 0 else ""
        name = say(", ").join(word for word in words if word not in shared) or say(FROM_MEMORY)
        lines.append(Line(name, (*cells, Cell(epoch, figure=True))))
    heads = [say("1 GPU" if count == 1 else "{gpus} GPUs", gpus=count) for count in counts]
    common = say(", ").join(word for word in names[0] if word in shared)
    columns = (*heads, *([GPU_MEMORY] if memory else []), EPOCH)
    note = say(NOTE, images=f"{EPOCH_IMAGES:,}")
    return Table(wording.capitalised(say(title)), "Conditions", columns, tuple(lines), (note, common))


def _rate(rate: float | None, efficiency: float | None) -> Cell:
    if rate is None:
        return Cell()
    below = wording.percent(efficiency) if efficiency is not None else ""
    return Cell(wording.number(rate), below=below, figure=True)


def _lost(losses: Sequence[Losses]) -> Table:
    rows = []
    for each in losses:
        slowest = say("of {place}", place=wording.place(each.slowest))
        parts = ((each.delivered, ""), (each.gradients, ""), (each.imbalance, slowest), (each.rest, ""))
        cells = tuple(Cell(wording.percent(part), below=below, figure=True) for part, below in parts)
        rows.append(Line(say(", ").join(wording.words(each.conditions)), cells))
    return Table(wording.capitalised(say(TITLE_LOST)), "Conditions", HEADS_LOST, tuple(rows), (say(LOST),))
