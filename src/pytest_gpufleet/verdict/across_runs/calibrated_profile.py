"""Calibrated limits as the text of a profile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pytest_gpufleet.model.limit import Calibration, Limit
from pytest_gpufleet.model.metric import Condition, GiB, KiB, Metric, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.vocabulary import MEASURED_UNDER
from pytest_gpufleet.verdict.across_runs.calibration import CAP, FLOOR, CalibratedLimits
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure
from pytest_gpufleet.verdict.across_runs.run_comparison import models


def profile_text(calibrated: CalibratedLimits, runs: Mapping[str, Record], sums: Mapping[str, str]) -> str:
    """A profile as TOML: the limits, what each of them rests on, and the runs with their GPUs.

    `sums` has the SHA-256 of each run's evidence. The same runs give the same text.
    """
    limits = map(_limit, calibrated.limits)
    return "\n".join([*_head(runs, calibrated), *_metrics(calibrated.figures), *limits, *_known_good(runs, sums)])


def _head(runs: Mapping[str, Record], calibrated: CalibratedLimits) -> list[str]:
    base, model = calibrated.base, models(next(iter(runs.values())))
    plugins = sorted({record.run.plugin for record in runs.values()})
    return [
        f"# Calibrated on known-good runs of pytest-gpufleet {', '.join(plugins)}.",
        "# Each limit is what 99.9 % of the GPUs of such machines reach, with a confidence of 95 %: k standard",
        f"# deviations s from the mean (measured). Machines differ by {FLOOR:.1%} at least. k s is at most {CAP:.0%},",
        "# or as far as the worst of these GPUs was.",
        *(["# Where a shipped limit holds that is not repeated here, it holds on."] if base else []),
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


def _metrics(figures: Iterable[Figure]) -> list[str]:
    """The metrics of the author's own checks, which a profile has to declare."""
    own: dict[str, Metric] = {figure.name: figure.metric for figure in figures if figure.name not in MEASURED_UNDER}
    return [
        f"[metric.{name if name.isidentifier() else _text(name)}]\n"
        f"unit = {_text(metric.unit)}\nbetter = {_text(metric.better)}\ntitle = {_text(metric.title)}\n"
        for name, metric in own.items()
    ]


def _limit(limit: Limit) -> str:
    when = ", ".join(f"{key} = {_value(key, given)}" for key, given in limit.conditions.items())
    return "\n".join(
        (
            "[[limit]]",
            f"metric = {_text(limit.metric)}",
            f"{limit.sense} = {limit.value!r}",
            f"unit = {_text(limit.unit)}",
            f"grade = {_text(limit.grade)}",
            *([f"measured = {limit.measured!r}"] if limit.measured else []),
            *([f"calibration = {{ {_rests_on(limit.calibration)} }}"] if limit.calibration else []),
            f"source = {_text(limit.source)}",
            *([f"when = {{ {when} }}"] if when else []),
            "",
        )
    )


def _rests_on(calibration: Calibration) -> str:
    parts = {name: getattr(calibration, name) for name in ("runs", "machines", "gpus", "s", "k")}
    return ", ".join(f"{name} = {value!r}" for name, value in parts.items() if value is not None)


def _value(key: str, value: Condition) -> str:
    if key == "bytes" and isinstance(value, int):
        for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
            if value % size == 0:
                return _text(f"{value // size} {unit}")
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    """JSON's escapes are a part of TOML's."""
    return json.dumps(text, ensure_ascii=False)
