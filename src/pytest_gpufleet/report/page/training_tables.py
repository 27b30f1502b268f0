"""Training on 1, 2, 4 ... GPUs: throughput, efficiency and time of an epoch, made of the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_gpufleet.model.conditions import EACH_ALONE, METHODS
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.efficiency_losses import Losses, efficiency_losses
from pytest_gpufleet.report.page.figure_tables import FigureCell, FigureRow, FigureTable

# Images of ImageNet's training set (ILSVRC 2012): https://image-net.org/download.php
EPOCH_IMAGES = 1_281_167
ALONE, TOGETHER, EFFICIENCY, FED = (
    "solo_train_throughput", "train_throughput", "scaling_efficiency", "loader_throughput",
)  # fmt: skip
# A table for each kind of workload.
TITLES: dict[Condition, str] = {
    "": "Throughput and efficiency by number of GPUs",
    "custom": "Throughput and efficiency by number of GPUs, of work that was asked for",
    "sweep": "Throughput and efficiency by batch size",
    "accumulation": "Throughput and efficiency with accumulated gradients",
    "comparison": "DataParallel, DDP and FSDP by number of GPUs",
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
EPOCH = "Epoch of ImageNet"
BY_LOADER, FROM_MEMORY = "fed by a data loader", "images that stay on the GPU"
METHOD_WORDS = {*METHODS.values()}


@dataclass(frozen=True)
class Row:
    """What is trained in one way: images/s and efficiency by the number of GPUs; 1: each alone, on average."""

    name: tuple[str, ...]
    rates: dict[int, float]
    efficiencies: dict[int, float]


def training_tables(findings: Sequence[Finding], say: Say = english) -> list[FigureTable]:
    """The tables of a group of checks; none where nothing was trained on several GPUs, or no efficiency measured."""
    measured = [finding.measurement for finding in findings if finding.measurement.values]
    tables = []
    for workload, title in TITLES.items():
        rows = _rows([one for one in measured if one.conditions.get("workload", "") == workload])
        if any(row.efficiencies for row in rows):
            tables.append(_by_gpus(title, rows, say))
    losses = efficiency_losses(findings)
    return [*tables, *([_lost(losses, say)] if losses else [])]


def _rows(measured: Sequence[Measurement]) -> list[Row]:
    """By all that training depends on but the number of GPUs; those that differ by numbers in their order."""
    rows: dict[tuple[str, ...], Row] = {}
    order: dict[tuple[str, ...], list[float]] = {}
    for one in measured:
        count = one.conditions.get("ranks")
        if one.metric in (TOGETHER, FED, EFFICIENCY) and isinstance(count, int) and WORLD in one.values:
            name = (*_words(one), *([BY_LOADER] if one.metric == FED else []))
            row = rows.setdefault(name, Row(name, {}, {}))
            order[name] = [value for value in one.conditions.values() if isinstance(value, int) and value != count]
            (row.efficiencies if one.metric == EFFICIENCY else row.rates)[count] = one.values[WORLD]
    for one in measured:
        for row in rows.values() if one.metric == ALONE else ():
            if {*_words(one)} - METHOD_WORDS <= {*row.name} and BY_LOADER not in row.name:
                row.rates[1] = fmean(one.values.values())
    return sorted((row for row in rows.values() if max(row.rates, default=1) > 1), key=lambda row: order[row.name])


def _words(measurement: Measurement) -> list[str]:
    """The conditions of a figure in words, without the number of GPUs."""
    conditions = dict(measurement.conditions)
    for name in ("ranks", "workload", *(["method"] if conditions.get("method") == EACH_ALONE else [])):
        conditions.pop(name, None)
    return wording.words(conditions)


def _by_gpus(title: str, rows: Sequence[Row], say: Say) -> FigureTable:
    counts = sorted({1, *(count for row in rows for count in row.rates)})
    shared = set.intersection(*({*row.name} for row in rows)) if len(rows) > 1 else set()
    lines = []
    for row in rows:
        cells = [_rate(row.rates.get(count), row.efficiencies.get(count)) for count in counts]
        fastest = max(row.rates.values(), default=0.0)
        epoch = wording.duration(EPOCH_IMAGES / fastest) if fastest > 0 else ""
        name = say(", ").join(say(word) for word in row.name if word not in shared) or say(FROM_MEMORY)
        lines.append(FigureRow(name, "", (*cells, FigureCell(epoch, kind="figure")), for_information=False))
    heads = tuple(say("1 GPU" if count == 1 else "{gpus} GPUs", gpus=count) for count in counts)
    common = say(", ").join(say(word) for word in rows[0].name if word in shared)
    return FigureTable(title, "", say(NOTE, images=f"{EPOCH_IMAGES:,}"), common, (*heads, EPOCH), tuple(lines))


def _rate(rate: float | None, efficiency: float | None) -> FigureCell:
    if rate is None:
        return FigureCell()
    below = wording.percent(efficiency) if efficiency is not None else ""
    return FigureCell(wording.number(rate), below=below, kind="figure")


def _lost(losses: Sequence[Losses], say: Say) -> FigureTable:
    rows = []
    for each in losses:
        cells = [FigureCell(wording.percent(part), kind="figure") for part in (each.delivered, each.gradients)]
        pace = FigureCell(
            wording.percent(each.imbalance),
            below=say("of {place}", place=wording.place(each.slowest, say=say)),
            kind="figure",
        )
        rest = FigureCell(wording.percent(each.rest), kind="figure")
        rows.append(
            FigureRow(
                say(", ").join(wording.words(each.conditions, say)), "", (*cells, pace, rest), for_information=False
            )
        )
    return FigureTable(TITLE_LOST, "", LOST, "", HEADS_LOST, tuple(rows))
