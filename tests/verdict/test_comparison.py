"""Which of many nodes, or of two runs, is worse than it should be."""

import math

import pytest

from pytest_gpufleet.model.events import RunHeader
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.across_runs.run_comparison import Figure, compare, worse_ones

HIGHER = Figure("busbw", (), Metric("busbw", "GB/s", "higher", "bus bandwidth"))
LOWER = Figure("collective_latency", (), Metric("collective_latency", "us", "lower", "latency"))
SHARE = Figure("communication_share", (), Metric("communication_share", "ratio", "lower", "share of communication"))
TOLERANT = Figure("gemm", (), Metric("gemm", "TFLOP/s", "higher", "matrix product", 0.08))


@pytest.mark.parametrize(
    ("figure", "values", "worse"),
    [
        (HIGHER, [100, 100, 100, 96], {3: 0.04}),
        (HIGHER, [100, 100, 100, 98], {}),
        (HIGHER, [100, 100, 100, 104], {}),  # better is nothing bad
        (LOWER, [100, 100, 100, 104], {3: 0.04}),
        (LOWER, [100, 100, 100, 96], {}),
        (TOLERANT, [100, 100, 100, 95], {}),
        (TOLERANT, [100, 100, 100, 91], {3: 0.09}),
        (HIGHER, [104, 98, 100, 102, 96], {}),  # so noisy that 4 % say nothing: sigma is 3 %
        (HIGHER, [104, 98, 100, 102, 96, 80], {5: 19 / 99}),  # and one bad node does not widen it much
        (HIGHER, [100, 100, 100, math.nan], {3: 1.0}),
        (HIGHER, [math.nan, math.nan, math.nan], {}),
        (HIGHER, [100, 96], {1: 0.04}),  # of two, the first is the reference
        (HIGHER, [96, 100], {}),
        (HIGHER, [100, 98], {}),
        (LOWER, [100, 104], {1: 0.04}),
        (HIGHER, [100, math.nan], {1: 1.0}),
        (HIGHER, [math.nan, 100], {}),
        (HIGHER, [100], {}),
        (SHARE, [0.004, 0.006], {}),  # half as much again of next to nothing
        (SHARE, [0.0, 0.05], {1: 0.05}),
        (SHARE, [0.01, 0.02, 0.012, 0.09], {3: 0.074}),
        (HIGHER, [0.0, 100], {}),
    ],
)
def test_a_value_is_an_outlier_on_the_bad_side_only(figure, values, worse):
    found = worse_ones({str(index): value for index, value in enumerate(values)}, figure)
    assert {int(name): fraction for name, (_, fraction) in found.items()} == pytest.approx(worse)


def test_what_no_run_has_measured_is_no_figure_of_the_comparison():
    def run(**values):
        found = [Finding("check", Measurement(name, told, {}), "not judged") for name, told in values.items()]
        return Record(run=RunHeader(rehearsal=True), findings=found)

    nothing = run(soak_temperature={}, memory_bandwidth={gpu(0): 4200.0})
    compared = compare({"a": nothing, "b": nothing})
    assert [row.figure.metric.name for row in compared.rows] == ["memory_bandwidth"]
    assert compare({"a": nothing, "b": run(soak_temperature={gpu(0): 60.0})}).rows == ()
