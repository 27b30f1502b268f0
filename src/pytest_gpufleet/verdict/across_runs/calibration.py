"""Limits from machines that are known to be good, where nobody published any or a contract asks for more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from statistics import median

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import METRICS, Condition, GiB, KiB, Metric, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.model.vocabulary import MEASURED_UNDER
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure, figures, held_to_limits
from pytest_gpufleet.verdict.across_runs.run_comparison import differences, models
from pytest_gpufleet.verdict.profiles.profile import Profile, for_gpu

DISAGREEMENT = 0.10
FEWEST_RUNS, FEWEST_MACHINES = 3, 2
DIGITS = 4


class CannotCalibrate(ValueError):
    """The runs are no ground for limits; the message says which and why."""


@dataclass(frozen=True)
class _Worst:
    """The worst value of a figure over all places, for each run that has it."""

    figure: Figure
    by_run: Mapping[str, float]

    @property
    def worst(self) -> float:
        return self.figure.worst(self.by_run.values())


def calibrate(runs: Mapping[str, Record], margin: float, sums: Mapping[str, str]) -> str:
    """A profile as TOML text: for each figure that the suite judges, the worst value of all runs and places with a
    margin below it (above it, where lower is better; a ratio then by 1 - margin).

    Extends the shipped profile of the GPU model, if there is one, and leaves out limits that would be weaker than its.
    `sums` has the SHA-256 of each run's evidence. The same runs give the same text. CannotCalibrate if a run was not
    clean, or if the runs are not of one GPU model and software or differ by more than 10 % in a figure.
    """
    problems = [f"{name} {problem}" for name, record in runs.items() for problem in _unclean(record)]
    if problems or (problems := _unlike(runs)):
        raise CannotCalibrate("; ".join(problems))
    worst = [one for one in _worst(runs) if not one.worst <= 0]  # which no limit can be; NaN is refused below
    if not worst:
        raise CannotCalibrate("the runs have no figure that a limit could rest on")
    if problems := [problem for one in worst if (problem := _disagreement(one))]:
        raise CannotCalibrate("; ".join(problems))
    first = next(iter(runs.values()))
    base, fabric, origin = for_gpu(models(first)), first.topology.fabric, _origin(runs.values())
    limits = [(one, _limit_value(one, margin)) for one in worst]
    limits = [
        (one, value) for one, value in limits if base is None or not _weaker(one.figure, float(value), base, fabric)
    ]
    tables = [_limit(one, value, margin, origin) for one, value in limits]
    return "\n".join(
        [*_head(runs, margin, base), *_metrics(one for one, _ in limits), *tables, *_known_good(runs, sums)]
    )


def _unclean(record: Record) -> list[str]:
    """Why a run does not show that its machine is good."""
    failed = [check.id for check in record.checks.values() if check.outcome == "failed"]
    missed = [finding.check for finding in record.findings if finding.state == "missed"]
    proving = {name.partition("::")[0]: name for name, check in shipped().checks.items() if check.proves_sound}
    ran = {levels.check_name(check).partition("::")[0] for check in record.checks}
    unseen = [file for file in proving if file not in ran]  # however fast the machine was
    rules = (
        (record.run.rehearsal, "is a rehearsal: its figures are those of CPU ranks"),
        (record.verdict is None, "did not come to its end"),
        (record.broken, f"was cut short: {record.broken}"),
        (record.spoiled, f"is not complete: {'; '.join(record.spoiled)}"),
        (failed, f"was rejected: {', '.join(failed[:3])}{' and others' if len(failed) > 3 else ''} failed"),
        (unseen, f"did not show that its machine is sound: nothing of {' and '.join(unseen)} ran"),
        (missed and not failed, f"was rejected: {', '.join(dict.fromkeys(missed))} missed a limit"),
    )
    return [problem for holds, problem in rules if holds][:1]


def _unlike(runs: Mapping[str, Record]) -> list[str]:
    """In what the runs' machines and software differ, so that one limit cannot hold for all."""
    begun: dict[tuple[object, object], str] = {}
    for name, record in runs.items():
        run = begun.setdefault((record.run.host, record.run.utc), name)
        if run != name:
            return [f"{run} and {name} are one and the same run"]
    mixed = {
        name: models(record) for name, record in runs.items() if len({gpu.name for gpu in record.topology.gpus}) != 1
    }
    return [f"{name} is not of one GPU model: {found}" for name, found in mixed.items()] or differences(runs)


def _worst(runs: Mapping[str, Record]) -> list[_Worst]:
    """What limits can be made for: figures that require one or had one, under conditions that a profile knows."""
    by_figure: dict[Figure, dict[str, float]] = {}
    for name, record in runs.items():
        for figure, values in figures(held_to_limits(record.findings)).items():
            known = MEASURED_UNDER.get(figure.name)
            conditions = tuple((key, value) for key, value in figure.conditions if known is None or key in known)
            if known and "fabric" in known and record.topology.fabric != "none":
                conditions = tuple(sorted((*conditions, ("fabric", record.topology.fabric))))
            of_runs = by_figure.setdefault(Figure(figure.name, conditions, figure.metric), {})
            of_runs[name] = figure.worst((*values.values(), of_runs.get(name, next(iter(values.values())))))
    order = {metric: index for index, metric in enumerate(METRICS)}
    return sorted(
        (_Worst(figure, of_runs) for figure, of_runs in by_figure.items()),
        key=lambda one: (order.get(one.figure.name, len(order)), one.figure.name, _sortable(one.figure.conditions)),
    )


def _sortable(conditions: Iterable[tuple[str, Condition]]) -> list[tuple[str, bool, float, str]]:
    return [
        (key, True, 0.0, value) if isinstance(value, str) else (key, False, float(value), "")
        for key, value in conditions
    ]


def _disagreement(one: _Worst) -> str:
    """Why the runs are no ground for a limit of this figure; empty if they are."""
    unit = one.figure.metric.unit
    what = f"{one.figure.metric.title} ({', '.join(f'{key}={value}' for key, value in one.figure.conditions)})"
    values = ", ".join(f"{value:,.4g} {unit} in {name}" for name, value in one.by_run.items())
    numbers = one.by_run.values()
    if not all(map(math.isfinite, numbers)):
        return f"{what} is no number: {values}"
    apart = one.figure.share(max(numbers) - min(numbers), median(numbers))
    return f"{what} differs by {apart:.0%}: {values}" if apart > DISAGREEMENT else ""


def _origin(records: Iterable[Record]) -> str:
    """Where the figures come from: hosts, days, software."""
    records = list(records)
    hosts = sorted({record.run.host for record in records})
    days = sorted({record.run.utc[:10] for record in records})
    topology = records[0].topology
    counts = sorted({len(record.topology.gpus) for record in records})
    return (
        f"{'/'.join(map(str, counts))}x {topology.gpus[0].name}, {', '.join(hosts)}, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}, driver {topology.driver}, "
        f"NCCL {topology.nccl}, torch {topology.torch}"
    )


def _weaker(figure: Figure, value: float, base: Profile, fabric: str) -> bool:
    """Whether a limit of `base` that holds for this figure already asks for as much: such runs met it."""
    limit = base.limit_for(Measurement(figure.name, {}, dict(figure.conditions), definition=figure.metric), fabric)
    return limit is not None and not (value > limit.value if limit.sense == "min" else value < limit.value)


def _head(runs: Mapping[str, Record], margin: float, base: Profile | None) -> list[str]:
    model = models(next(iter(runs.values())))
    plugins = sorted({record.run.plugin for record in runs.values()})
    return [
        f"# Calibrated on known-good runs of pytest-gpufleet {', '.join(plugins)}.",
        f"# Each limit is the worst figure of all runs and places with a margin of {margin:g}.",
        *(["# Where the shipped limit is as strict, it is not repeated here, and holds."] if base else []),
        "# The runs:",
        *(f"# {name}: {record.run.host}, {record.run.utc}" for name, record in runs.items()),
        "",
        f"name = {_text(f'{base.name if base else model}, calibrated')}",
        f"extends = {_text(base.name)}" if base else f"match = [{_text(model)}]",
        "",
    ]


def _known_good(runs: Mapping[str, Record], sums: Mapping[str, str]) -> list[str]:
    """Where the limits come from, so that a machine is not held against itself without a word."""
    return [
        "\n".join(
            (
                "[[calibrated_on]]",
                f"run = {_text(name)}",
                f"host = {_text(record.run.host)}",
                f"utc = {_text(record.run.utc)}",
                f"uuids = {_texts(gpu.uuid for gpu in record.topology.gpus)}",
                f"serials = {_texts(gpu.serial for gpu in record.topology.gpus if gpu.serial)}",
                f"evidence_sha256 = {_text(sums[name])}",
                "",
            )
        )
        for name, record in runs.items()
    ]


def _texts(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_text, texts))}]"


def too_few(runs: Mapping[str, Record]) -> str:
    """Why limits of these runs may say more of the machines at hand than of good ones; "" if there are enough."""
    machines = len({frozenset(gpu.uuid for gpu in record.topology.gpus) for record in runs.values()})
    if machines >= FEWEST_MACHINES and len(runs) >= FEWEST_RUNS:
        return ""
    sources = f"{len(runs)} run{'s' * (len(runs) > 1)} of {machines} machine{'s' * (machines > 1)}"
    return (
        f"these limits come from {sources}: take {FEWEST_RUNS} runs and {FEWEST_MACHINES} machines at least, or what "
        "is weak in one of them becomes the limit of all"
    )


def _metrics(worst: Iterable[_Worst]) -> list[str]:
    """The metrics of the author's own checks, which a profile has to declare."""
    own: dict[str, Metric] = {
        one.figure.name: one.figure.metric for one in worst if one.figure.name not in MEASURED_UNDER
    }
    return [
        f"[metric.{name if name.isidentifier() else _text(name)}]\n"
        f"unit = {_text(metric.unit)}\nbetter = {_text(metric.better)}\ntitle = {_text(metric.title)}\n"
        for name, metric in own.items()
    ]


def _limit_value(one: _Worst, margin: float) -> str:
    metric = one.figure.metric
    if metric.better == "higher":
        return _rounded(one.worst * margin, True, metric.unit)
    # A ratio can be next to nothing, and 5 % of that would be no margin.
    above = one.worst + (1 - margin) if metric.unit == "ratio" else one.worst / margin
    return _rounded(above, False, metric.unit)


def _limit(one: _Worst, value: str, margin: float, origin: str) -> str:
    figure, unit = one.figure, one.figure.metric.unit
    higher = figure.metric.better == "higher"
    runs = "1 run" if len(one.by_run) == 1 else f"{len(one.by_run)} runs"
    extreme = "lowest" if higher else "highest"
    when = ", ".join(f"{key} = {_value(key, given)}" for key, given in figure.conditions)
    return "\n".join(
        (
            "[[limit]]",
            f"metric = {_text(figure.name)}",
            f"{'min' if higher else 'max'} = {value}",
            f"unit = {_text(unit)}",
            'grade = "calibrated"',
            f"measured = {one.worst:.4g}",
            f"source = {_text(f'{origin}: {extreme} of {runs}, margin {margin:g}')}",
            *([f"when = {{ {when} }}"] if when else []),
            "",
        )
    )


def _rounded(value: float, higher: bool, unit: str) -> str:
    """Towards the side on which the run that it comes from still meets it. A ratio is at most 1."""
    if unit == "ratio":
        value = min(value, 1.0)
    rounding = ROUND_FLOOR if higher else ROUND_CEILING
    return format(Context(prec=DIGITS, rounding=rounding).create_decimal(repr(value)), "f")


def _value(key: str, value: Condition) -> str:
    if key == "bytes" and isinstance(value, int):
        for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
            if value % size == 0:
                return _text(f"{value // size} {unit}")
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    """JSON's escapes are a part of TOML's."""
    return json.dumps(text, ensure_ascii=False)
