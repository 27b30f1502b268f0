"""Runs side by side, and one machine over time: what got worse than noise is named, and a healthy machine is not."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pytest_gpufleet.model.events import RunHeader
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import METRICS, Metric, Tolerance
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.across_runs.drift import Drift, drift, noise
from pytest_gpufleet.verdict.across_runs.run_comparison import compare
from pytest_gpufleet.verdict.outliers import Figure, beside_most
from pytest_gpufleet.verdict.reading import read
from tests import runs

RECORDED = Path(__file__).parent.parent / "recorded"
MEMORY = Metric("memory_bandwidth", "GB/s", "higher", "memory bandwidth", 0.01)
BUSBW = METRICS["busbw"]  # no peers: 3 %
BANKS = {"max": 3072, "high": 0, "partial": 0, "low": 0, "none": 0}  # by spare rows, as an H200 tells them


def machine(host: str = "node7", order: tuple[int, ...] = (0, 1, 2, 3), **facts: object) -> GpuTopology:
    """The four GPUs of node7 in the slots of a host, in this order. `facts`: of GPU 1, wherever it is."""
    whole = runs.topology("node7")
    gpus = (
        Gpu(slot, {**whole.gpus[index].facts, "pci_bus_id": f"{host}:{slot}", **(facts if index == 1 else {})})
        for slot, index in enumerate(order)
    )
    return replace(whole, gpus=tuple(gpus))


def run(day: int, *measurements: Measurement, at: GpuTopology | None = None, host: str = "node7") -> Record:
    return Record(
        run=RunHeader(host=host, utc=f"2026-11-{day:02}T08:00:00+00:00"),
        topology=at or machine(),
        findings=[Finding("acceptance/x.py::test", measurement, "not judged") for measurement in measurements],
    )


def memory(*values: float, metric: Metric = MEMORY, **conditions: str) -> Measurement:
    return Measurement(
        metric.name, {f"gpu{index}": value for index, value in enumerate(values)}, conditions, definition=metric
    )


def pairs(slow: int, value: float) -> Measurement:
    """Of all pairs in both directions: with the GPU `slow` in them this value, else 100."""
    every = ((one, other) for one in range(4) for other in range(4) if one != other)
    values = {f"gpu{one}-gpu{other}": value if slow in (one, other) else 100.0 for one, other in every}
    return Measurement(
        "pair_bandwidth", values, {"direction": "read"}, definition=replace(MEMORY, name="pair_bandwidth")
    )


def together(value: float, **conditions: str | int) -> Measurement:
    return Measurement("busbw", {"world": value}, conditions, definition=BUSBW)


def by_name(*records: Record) -> dict[str, Record]:
    return {f"r{index}": record for index, record in enumerate(records)}


def ids(*indexes: int) -> tuple[str, ...]:
    return tuple(f"GPU-node7-{index}" for index in indexes)


def days(*each: tuple[float, ...]) -> tuple[Record, ...]:
    """Runs in which the four GPUs reached this."""
    return tuple(run(day, memory(*values)) for day, values in enumerate(each, 1))


SAME = (100, 100, 100, 100)
CASES: Mapping[str, tuple[tuple[Record, ...], Mapping[tuple[str, ...], float]]] = {
    "healthy": (days((100, 101, 99, 100), (99.5, 100.4, 99, 100.6)), {}),
    "better": (days((100, 100, 100, 90), SAME), {}),
    "one is slow": (days(SAME, (100, 98, 100, 100)), {ids(1): 0.02}),
    "all are slow": (days(SAME, (98, 98, 98, 98)), {ids(index): 0.02 for index in range(4)}),
    # Each step is less than the tolerance: against the median of all before, 0.9 % would be left of it.
    "slow drift": (days(SAME, (100, 99.4, 100, 100), (100, 98.8, 100, 100)), {ids(1): 0.012}),
    "slow drift of the pairs of one of four GPUs": (
        (run(1, pairs(2, 100)), run(2, pairs(2, 99.3)), run(3, pairs(2, 98.6))),
        {ids(one, other): 0.014 for one in range(4) for other in range(4) if one != other and 2 in (one, other)},
    ),
    "the runs are given in another order": (
        (run(9, memory(100, 98, 100, 100)), run(2, memory(*SAME))), {ids(1): 0.02},
    ),
    "a machine that is always that noisy": (
        days(*((100 + way, 100 - way, 100 + way, 100 - way) for way in (1, -1, 1)), (98.5, 98.5, 98.5, 98.5)), {},
    ),
    "steady drift is no noise": (
        days(*((100 - step,) * 4 for step in (0, 0.5, 1, 1.5))),
        {ids(index): (99.75 - 98.5) / 99.75 for index in range(4)},
    ),
    "another host": (
        (run(1, memory(100, 110, 100, 100)), run(2, memory(100, 107, 100, 100), at=machine("node8"), host="node8")),
        {ids(1): 3 / 110},
    ),
    "another method": ((run(1, memory(*SAME)), run(2, memory(90, 90, 90, 90, method="replayed"))), {}),
    "all ranks together": ((run(1, together(360)), run(2, together(340))), {ids(0, 1, 2, 3): 20 / 360}),
    "all ranks together, within noise": ((run(1, together(360)), run(2, together(356))), {}),
    "two ranks, and they are other GPUs now": (
        (run(1, together(360, ranks=2)), run(2, together(300, ranks=2), at=machine(order=(2, 3, 0, 1)))), {},
    ),
    "no figure any more": (days(SAME, (100, math.nan, 100, 100)), {ids(1): 1}),
    "no figure before": (days((100, math.nan, 100, 100), SAME), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_got_worse_is_named(name: str) -> None:
    records, worse = CASES[name]
    assert {each.gpus: each.worse for each in drift(by_name(*records)).worse} == pytest.approx(worse)


def warm(day: int, warmer: float, *values: float) -> Record:
    """Products of GPUs that lose 0.3 % by each kelvin, the first of them 40 K warmer than the others."""
    states = {f"gpu{index}": GpuState(temperature_c=50.0 + warmer + (40 if index == 0 else 0)) for index in range(4)}
    found = run(day, replace(memory(*values), gpu_states=states))
    tolerance = Tolerance("memory_bandwidth", 0.02, per_kelvin=0.003, source="somewhere")
    return replace(found, findings=[replace(found.findings[0], tolerances=(tolerance,))])


@pytest.mark.parametrize(("warmer", "now", "worse"), [
    (0, 97, ["gpu1"]),
    (5, 97.8, []),  # 1.5 % of 2.2 % are the warmer room's
    (30, 94, ["gpu1"]),  # 10 K at most are a room
    (-5, 101.2, []),
    (-5, 99.8, ["gpu1"]),  # and in a colder one it should be faster
])  # fmt: skip
def test_figures_are_taken_at_the_temperature_of_the_last_run(warmer: float, now: float, worse: list[str]) -> None:
    healthy = 100 - 0.3 * min(warmer, 10)
    cold, later = warm(1, 0, 100, 100, 100, 100), warm(2, warmer, healthy, now, healthy, healthy)
    assert [str(each.place) for each in drift(by_name(cold, later)).worse] == worse


ALONE = METRICS["solo_train_throughput"]


@pytest.mark.parametrize(("lost", "found"), [(0.0, 0), (0.02, 1)])
def test_what_a_gpu_lost_since_its_own_runs_is_found_from_2_percent_on(lost: float, found: int) -> None:
    """By eight runs of a machine that differ by 0.1 %, though GPUs differ by 1 %; and nothing else is."""
    dice = random.Random(31)
    for _ in range(20):
        chips = [dice.gauss(6000, 60) for _ in range(4)]
        runs_of = [[chip * (1 + dice.gauss(0, 0.001)) for chip in chips] for _ in range(8)]
        runs_of[-1][2] *= 1 - lost
        records = (run(day, memory(*values, metric=ALONE)) for day, values in enumerate(runs_of, 1))
        assert [each.gpus for each in drift(by_name(*records)).worse] == [ids(2)] * found


def test_the_place_is_that_of_the_last_run() -> None:
    before, now = run(1, memory(100, 110, 100, 100)), run(2, memory(100, 100, 107, 100), at=machine(order=(0, 2, 1, 3)))
    (worse,) = drift(by_name(before, now)).worse
    assert (worse.gpus, worse.worse) == (ids(1), pytest.approx(3 / 110))
    assert (str(worse.place), "serial node7-S1" in worse.identity) == ("gpu2", True)
    assert worse.history == {"r0": 110.0, "r1": 107.0}


def test_figures_that_are_only_shown_are_not_held_against_anything() -> None:
    only_shown = [
        replace(each, findings=[replace(finding, state="for information", required=False) for finding in each.findings])
        for each in CASES["one is slow"][0]
    ]
    assert drift(by_name(*only_shown)).compared == 0


def counted(first: Mapping[str, object], last: Mapping[str, object]) -> Drift:
    return drift(by_name(run(1, at=machine(**first)), run(2, at=machine(**last))))


def test_rows_remapped_after_uncorrectable_errors_are_a_fault() -> None:
    found = counted({"remapped_rows": [0, 1, 0, 0]}, {"remapped_rows": [0, 3, 0, 0]})
    assert [(fault.name, list(map(str, fault.subjects))) for fault in found.faults] == [("rows_remapped", ["gpu1"])]


@pytest.mark.parametrize(("first", "last", "said"), [
    ({"remapped_rows": [1, 0, 0, 0]}, {"remapped_rows": [4, 0, 0, 0]}, "1 rows remapped after corrected errors"),
    ({"ecc_corrected_volatile": 2}, {"ecc_corrected_volatile": 70}, "2 corrected ECC errors"),
    ({}, {"ecc_corrected_volatile": 70}, "0 corrected ECC errors"),
    ({"spare_rows": BANKS}, {"spare_rows": {**BANKS, "max": 3071, "low": 1}}, "0 banks of memory with few"),
    ({"spare_rows": BANKS}, {"spare_rows": BANKS}, ""),
    ({"ecc_corrected_volatile": 70}, {"ecc_corrected_volatile": 0}, ""),  # the driver was loaded anew
])  # fmt: skip
def test_what_was_corrected_is_told(first: Mapping[str, object], last: Mapping[str, object], said: str) -> None:
    found = counted(first, last)
    assert found.faults == ()
    assert [said in note for note in found.notes] == [True] * bool(said)


def test_gpus_that_moved_came_or_went_are_told() -> None:
    whole = machine()
    other = replace(whole, gpus=(*whole.gpus[:3], Gpu(3, {**runs.topology("node8").gpus[3].facts})))
    moved = drift(by_name(run(1), run(2, at=machine("node8"), host="node8"))).notes
    assert [note.partition(" of node8: ")[2] for note in moved] == [
        f"was at node7:{slot} of node7 in r0" for slot in range(4)
    ]
    came, went = drift(by_name(run(1), run(2, at=other))).notes
    assert ("serial node8-S3" in came, came.endswith("in none of the earlier runs")) == (True, True)
    assert ("serial node7-S3" in went, went.endswith("in r0, and not in r1")) == (True, True)


@pytest.mark.parametrize(("histories", "sigma", "df"), [
    ([], 0.0, 0),
    ([[100.0, 90.0]], 0.0, 0),  # two runs know no noise
    ([[100.0, 99.0, 98.0], [50.0, 51.0, 52.0]], 0.0, 0.4),
    ([[100.0, math.nan, 98.0]], 0.0, 0),
    ([[99.0, 100.0, 99.0]] * 3, 1.4826 * 0.02 / math.sqrt(6), 0.6),
    ([[100.0, 100.0, 100.0]] * 3 + [[100.0, 50.0, 100.0]], 0.0, 0.8),  # one GPU is no noise of the others
])  # fmt: skip
def test_noise_is_what_a_straight_line_leaves(histories: list[list[float]], sigma: float, df: float) -> None:
    assert noise(histories, Figure("memory_bandwidth", (), MEMORY)) == pytest.approx((sigma, df))


def test_two_runs_of_a_real_machine() -> None:
    """Between them another process computed on GPU 2: nothing is worse without it, and GPU 2 is with it."""
    alone, beside = (read(RECORDED / f"h200x4-{name}" / "evidence.jsonl") for name in ("c", "neighbour"))
    healthy = drift({"beside": beside, "alone": alone})
    assert (healthy.compared > 30, healthy.worse, healthy.faults) == (True, (), ())
    later = replace(beside, run=msgspec.structs.replace(beside.run, utc="2026-12-01T00:00:00+00:00"))
    found = drift({"alone": alone, "beside": later})
    assert {str(worse.place) for worse in found.worse if worse.figure.name == "gemm"} == {"gpu2"}


# ----------------------------------------------------------------

HIGHER = Figure("busbw", (), Metric("busbw", "GB/s", "higher", "bus bandwidth"))
LOWER = Figure("collective_latency", (), Metric("collective_latency", "us", "lower", "latency"))
SHARE = Figure("communication_share", (), Metric("communication_share", "ratio", "lower", "share of communication"))
KELVIN = Figure("soak_excess", (), METRICS["soak_excess"])


@pytest.mark.parametrize(("figure", "values", "worse"), [
    (HIGHER, [100, 100, 100, 96], {3: 0.04}),
    (HIGHER, [100, 100, 100, 98], {}),
    (HIGHER, [100, 100, 100, 104], {}),  # better is nothing bad
    (LOWER, [100, 100, 100, 104], {3: 0.04}),
    (LOWER, [100, 100, 100, 96], {}),
    (HIGHER, 2 * [104, 98, 100, 102, 96], {}),  # so noisy that 4 % say nothing
    (HIGHER, [*2 * [104, 98, 100, 102, 96], 80], {10: 0.2}),  # and one bad node does not widen it
    (HIGHER, [100, 100, 94, 10], {2: 0.06, 3: 0.9}),  # nor hides another
    (HIGHER, [100, 100, 100, math.nan], {3: 1.0}),
    (HIGHER, [math.nan, math.nan, math.nan], {}),
    (HIGHER, [94, 100], {0: 0.06}),  # of two the worse one: nothing makes a machine faster than it is
    (HIGHER, [100, math.nan], {1: 1.0}),
    (HIGHER, [100], {}),
    (SHARE, [0.004, 0.006], {}),  # half as much again of next to nothing
    (SHARE, [0.0, 0.05], {1: 0.05}),
    (SHARE, [0.01, 0.02, 0.012, 0.09], {3: 0.078}),
    (KELVIN, [0.0, 2.5], {}),  # many times as much of next to nothing
    (KELVIN, [0.5, 5.5], {1: 0.05}),
])  # fmt: skip
def test_a_value_is_an_outlier_on_the_bad_side_only(figure, values, worse):
    found = beside_most(figure, {(str(index), gpu(0)): value for index, value in enumerate(values)}, 0.005, 10, 0.01)
    assert {int(each.run): each.worse for each in found} == pytest.approx(worse)


def test_what_no_run_has_measured_is_no_figure_of_the_comparison():
    def run(**values):
        found = [Finding("check", Measurement(name, told, {}), "not judged") for name, told in values.items()]
        return Record(run=RunHeader(rehearsal=True), findings=found)

    nothing = run(soak_temperature={}, memory_bandwidth={gpu(0): 4200.0})
    compared = compare({"a": nothing, "b": nothing})
    assert [row.figure.metric.name for row in compared.rows] == ["memory_bandwidth"]
    assert compare({"a": nothing, "b": run(soak_temperature={gpu(0): 60.0})}).rows == ()
