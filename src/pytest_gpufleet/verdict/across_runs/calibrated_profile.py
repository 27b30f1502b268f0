"""Calibrated limits as the text of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.metric import Condition, GiB, KiB, Metric, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.vocabulary import MEASURED_UNDER
from pytest_gpufleet.verdict.across_runs.calibration import CAP, FLOOR, CalibratedLimits
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure
from pytest_gpufleet.verdict.across_runs.run_comparison import models

HEAD = """\
# Calibrated on known-good runs of pytest-gpufleet {plugins}.
# Each limit is what 99.9 % of the GPUs of such machines reach, with a confidence of 95 %: k standard
# deviations s from the mean (measured). Machines differ by {floor:.1%} at least. k s is at most {cap:.0%},
# or as far as the worst of these GPUs was.
"""


def profile_text(calibrated: CalibratedLimits, runs: Mapping[str, Record], sums: Mapping[str, str]) -> str:
    """A profile as TOML: the limits, what each of them rests on, and the runs with their GPUs.

    `sums` has the SHA-256 of each run's evidence. The same runs give the same text.
    """
    import tomli_w

    base, model = calibrated.base, models(next(iter(runs.values())))
    plugins = sorted({record.run.plugin for record in runs.values()})
    head = HEAD.format(plugins=", ".join(plugins), floor=FLOOR, cap=CAP)
    if base:
        head += "# Where a shipped limit holds that is not repeated here, it holds on.\n"
    content = {
        "name": f"{base.name if base else model}, calibrated",
        **({"extends": base.name} if base else {"match": [model]}),
        "metric": _metrics(calibrated.figures),
        "limit": [_limit(limit) for limit in calibrated.limits],
        "calibrated_on": [_known_good(name, record, sums[name]) for name, record in runs.items()],
    }
    return f"{head}\n{tomli_w.dumps({key: value for key, value in content.items() if value})}"


def _known_good(name: str, record: Record, digest: str) -> dict[str, Any]:
    """Where the limits come from, so that a machine is not held against itself without a word."""
    return {
        "run": name,
        "host": record.run.host,
        "utc": record.run.utc,
        "uuids": [gpu.uuid for gpu in record.topology.gpus],
        "serials": [gpu.serial for gpu in record.topology.gpus if gpu.serial],
        "evidence_sha256": digest,
    }


def _metrics(figures: Iterable[Figure]) -> dict[str, Any]:
    """The metrics of the author's own checks, which a profile has to declare."""
    own: dict[str, Metric] = {figure.name: figure.metric for figure in figures if figure.name not in MEASURED_UNDER}
    return {name: {"unit": metric.unit, "better": metric.better, "title": metric.title} for name, metric in own.items()}


def _limit(limit: Limit) -> dict[str, Any]:
    rests_on = asdict(limit.calibration) if limit.calibration else {}
    told = {
        "metric": limit.metric,
        limit.sense: limit.value,
        "unit": limit.unit,
        "grade": limit.grade,
        "measured": limit.measured,
        "source": limit.source,
        "calibration": {name: value for name, value in rests_on.items() if value is not None},
        "when": {key: _value(key, given) for key, given in limit.conditions.items()},
    }
    return {key: value for key, value in told.items() if value}


def _value(key: str, value: Condition) -> Condition:
    if key == "bytes" and isinstance(value, int):
        for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
            if value % size == 0:
                return f"{value // size} {unit}"
    return value
