"""Figures as broken machines and broken probes make them: whatever they are, they do not cost the report."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as some

from pytest_gpufleet.model import place
from pytest_gpufleet.model.events import Check, RunHeader
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.measurement import Measurement, Sample
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import page as report_page, several_runs, wording
from pytest_gpufleet.report.figures import heat_tables
from pytest_gpufleet.report.plots.telemetry_plots import svgs
from pytest_gpufleet.report.tables import Table
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
    measured = [
        Measurement("gemm", dict(zip(PLACES, figures, strict=False)), {"precision": "fp16"}),
        Measurement("pair_bandwidth", dict(zip(PAIRS, figures, strict=False)), {"direction": "both"}),
        Measurement("scaling_efficiency", {"world": next(figures)}, {"ranks": 2}),
        *(
            Measurement("busbw", {"world": next(figures)}, {"collective": "all_reduce", "bytes": size})
            for size in (MiB, GiB, 8 * GiB)
        ),
        *(Measurement("train_throughput", {"world": next(figures)}, {**training, "ranks": n}) for n in (1, 2, 4)),
        *(
            measurement
            for method in ("ddp", "fsdp")
            for measurement in (
                Measurement("train_throughput", {"world": next(figures)}, {**training, "method": method}),
                Measurement("scaling_efficiency", {"world": next(figures)}, {**training, "method": method}),
                Measurement("train_memory", dict(zip(PLACES, figures, strict=False)), {**training, "method": method}),
            )
        ),
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


def endless(values: list[float]) -> Iterator[float]:
    while True:
        yield from values


def assert_shown_everywhere(figures: Iterator[float]) -> None:
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


@pytest.mark.parametrize("value", NASTY)
def test_any_figure_can_be_shown_everywhere(value: float) -> None:
    assert_shown_everywhere(endless([value]))


@settings(derandomize=True, deadline=None, max_examples=4, database=None)
@given(some.lists(some.sampled_from(NASTY), min_size=2, max_size=20))
def test_any_mixture_of_figures_can_be_shown(values: list[float]) -> None:
    assert_shown_everywhere(endless(values))


def matrix_of(*values: float) -> Table:
    measurement = Measurement("pair_bandwidth", dict(zip(PAIRS, values, strict=True)), {})
    (matrix,) = heat_tables([Finding(CHECK, measurement, "for information")])
    return matrix


def test_a_matrix_with_an_infinite_pair_shows_it_and_colours_the_others_by_the_largest_figure() -> None:
    matrix = matrix_of(math.inf, 400.0, 200.0)
    first, second, _ = matrix.rows
    assert [(cell.text, cell.heat) for cell in first.cells[1:]] == [("inf", 100), ("400", 100)]
    assert (second.cells[2].text, second.cells[2].heat) == ("200", 50)
    assert matrix.foot.startswith("200 to inf;")


def test_figures_that_nobody_would_write_out_stay_short() -> None:
    assert [wording.number(value) for value in (1e308, 5e-324, 366.92)] == ["1e+308", "4.941e-324", "366.9"]
