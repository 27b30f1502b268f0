"""Figures as broken machines and broken probes make them: whatever they are, they do not cost the report."""

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from pytest_gpufleet.model import place
from pytest_gpufleet.model.events import Check, RunHeader
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.measurement import Measurement, Sample
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import page as report_page, several_runs
from pytest_gpufleet.report.plots.telemetry_plots import svgs
from pytest_gpufleet.report.terminal import summary_lines
from pytest_gpufleet.verdict.across_runs.drift import drift
from pytest_gpufleet.verdict.across_runs.run_comparison import compare

NASTY = (math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324, 0.0, -0.0, -1.0, 400.0)
PLACES = ("gpu0", "gpu1", "gpu2")
PAIRS = ("gpu0-gpu1", "gpu0-gpu2", "gpu1-gpu2")
CHECK = "acceptance/test_8_resnet50.py::test_all_gpus"


def findings(figures: Iterator[float]) -> list[Finding]:
    """Every form that figures have in the report, all of them filled from `figures`."""
    training = {"model": "resnet50", "recipe": "amp"}
    sizes: tuple[dict[str, Any], ...] = tuple(
        {"collective": "all_reduce", "bytes": size} for size in (MiB, GiB, 8 * GiB)
    )
    ways: tuple[dict[str, Any], ...] = tuple({**training, "method": method} for method in ("ddp", "fsdp"))
    forms: list[tuple[str, tuple[str, ...], tuple[dict[str, Any], ...]]] = [
        ("gemm", PLACES, ({"precision": "fp16"},)),
        ("pair_bandwidth", PAIRS, ({"direction": "both"},)),
        ("scaling_efficiency", ("world",), ({"ranks": 2}, *ways)),
        ("busbw", ("world",), sizes),
        ("train_throughput", ("world",), (*({**training, "ranks": n} for n in (1, 2, 4)), *ways)),
        ("train_memory", PLACES, ways),
    ]
    measured = [
        Measurement(metric, dict(zip(places, figures, strict=False)), conditions)
        for metric, places, every in forms
        for conditions in every
    ]
    return [
        Finding(
            CHECK,
            Measurement(
                each.metric, each.values, each.conditions, {place: (1.0, next(figures)) for place in each.values}
            ),
            state,
            Limit(each.metric, "min", next(figures), each.unit, "calibrated", "a run", {}, "x.toml"),
            (next(iter(each.values)),),
            {next(iter(each.values)): next(figures)} if state == "missed" else None,
        )
        for state in ("met", "missed")
        for each in measured
    ]


@pytest.mark.parametrize("values", [*((value,) for value in NASTY), NASTY, NASTY[::-3], NASTY[::7]])
def test_figures_can_be_shown_everywhere(values: tuple[float, ...]) -> None:
    figures = cycle(values)
    checks = {CHECK: Check(CHECK, "failed", next(figures), message="it missed")}
    samples = [Sample(float(at), tuple({"power_watts": next(figures)} for _ in PLACES)) for at in range(4)]
    record = Record(
        run=RunHeader(host="x"), findings=findings(figures), checks=checks, verdict="REJECTED", telemetry=samples
    )
    assert "fleet-verdict" in report_page.summary(record)
    assert svgs(samples, [place.gpu(index) for index in range(3)], []) is not None
    list(summary_lines.summary_lines(record))
    runs = {"one": record, "other": record}
    several_runs.page(several_runs.compared(compare(runs), 2))
    several_runs.page(several_runs.drifted(drift(runs)))
