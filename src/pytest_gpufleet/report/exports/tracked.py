"""What of a run goes to experiment trackers: figures, curves, losses and telemetry as series of points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from pytest_gpufleet.model.facts import READINGS
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.plots.curves import ALONG
from pytest_gpufleet.report.wording import clean
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure, figures

FEWEST_POINTS = 2  # of a curve
QUANTITIES = tuple(name for name in READINGS if name != "clock_event_reasons")  # whose value is a set of bits
UNITS = {
    "percent": "%", "bytes": "B", "c": "°C", "watts": "W", "mhz": "MHz", "kilobytes_per_second": "kB/s",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """`step`: 0 of a figure; of a curve the size (bytes, batch or nodes); of losses the steps that were done; of
    telemetry milliseconds since the first sample. `time`: seconds since the epoch; of figures and curves when the run
    began, of losses when their check told them."""

    step: int
    value: float
    time: float


@dataclass(frozen=True)
class Series:
    """`kind`: figures, curves, losses or telemetry. `along`: what the steps are, "" of a figure."""

    kind: str
    name: str
    unit: str
    conditions: str
    place: str
    along: str
    points: tuple[Point, ...]

    @property
    def tag(self) -> str:
        """What trackers call it: they group by what stands before the first slash."""
        return "/".join(filter(None, (self.kind, self.name, self.conditions, self.place)))


@dataclass(frozen=True)
class Tracked:
    """`about`: what tells this run from others."""

    about: Mapping[str, str]
    series: tuple[Series, ...]


def tracked(record: Record, sha256: str) -> Tracked:
    """`sha256`: of the evidence."""
    run, topology = record.run, record.topology
    about = {
        "host": run.host,
        "utc": run.utc,
        "level": run.level,
        "verdict": record.verdict or "",
        "gpus": ", ".join(dict.fromkeys(gpu.name for gpu in topology.gpus)),
        "number_of_gpus": str(len(topology.gpus)),
        "driver": topology.driver or "",
        "cuda": topology.cuda or "",
        "nccl": topology.nccl or "",
        "torch": topology.torch or "",
        "pytest_gpufleet": run.plugin,
        "evidence_sha256": sha256,
    }
    series = (*_figures(record), *_curves(record), *_losses(record), *_telemetry(record))
    return Tracked({name: clean(value) for name, value in about.items()}, series)


def _figures(record: Record) -> Iterator[Series]:
    began = _began(record)
    for figure, values in figures(record.findings).items():
        conditions = _words(dict(figure.conditions))
        for place, value in values.items():
            if math.isfinite(value):
                point = Point(0, value, began)
                yield Series("figures", clean(figure.name), figure.metric.unit, conditions, str(place), "", (point,))


def _curves(record: Record) -> Iterator[Series]:
    """The figures that differ in nothing but a size, at least two of them."""
    began = _began(record)
    found: dict[tuple[str, Figure, str], dict[int, float]] = {}
    for figure, values in figures(record.findings).items():
        conditions = dict(figure.conditions)
        for along, changing in ALONG.items():
            size = conditions.get(along)
            if isinstance(size, bool) or not isinstance(size, int):
                continue
            rest = tuple((name, value) for name, value in figure.conditions if name not in changing)
            for place, value in values.items():
                if math.isfinite(value):
                    key = along, Figure(figure.name, rest, figure.metric), str(place)
                    found.setdefault(key, {})[size] = value
    for (along, figure, at), curve in found.items():
        if len(curve) >= FEWEST_POINTS:
            points = tuple(Point(size, curve[size], began) for size in sorted(curve))
            name, rest_told = f"{clean(figure.name)} by {along}", _words(dict(figure.conditions))
            yield Series("curves", name, figure.metric.unit, rest_told, at, along, points)


def _losses(record: Record) -> Iterator[Series]:
    """Named as the check that trains. Of what a check trained several times in the same way the last one."""
    found = {}
    for each in record.losses:
        name, conditions = clean(check_name(each.check)), _words(each.curve.training)
        told = zip(each.curve.steps, each.curve.losses, strict=True)
        points = tuple(Point(step, loss, each.seconds) for step, loss in told)
        found[name, conditions, each.curve.place] = Series(
            "losses", name, "", conditions, str(each.curve.place), "steps", points
        )
    yield from found.values()


def _telemetry(record: Record) -> Iterator[Series]:
    samples = record.telemetry
    for name in QUANTITIES:
        unit = next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")
        for index, gpu in enumerate(record.topology.gpus):
            told = [(each["time"], each["gpus"][index].get(name)) for each in samples if index < len(each["gpus"])]
            points = tuple(
                Point(round(1000 * (time - samples[0]["time"])), float(value), time)
                for time, value in told
                if isinstance(value, int | float) and math.isfinite(value)
            )
            if points:
                yield Series("telemetry", name, unit, "", str(gpu.place), "milliseconds", points)


def _began(record: Record) -> float:
    return datetime.fromisoformat(record.run.utc).timestamp() if record.run.utc else 0.0


def _words(conditions: Mapping[str, Condition]) -> str:
    return clean(", ".join(f"{name}={value}" for name, value in conditions.items()))
