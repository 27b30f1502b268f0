"""Runs side by side, and one machine over time: what got worse than noise is named, and a healthy machine is not."""

import math
import random
from dataclasses import replace

import msgspec
import pytest

from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.events import Fingerprint, Part, RunHeader
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import METRICS, GpuState, Measurement, Metric, Tolerance
from pytest_gpufleet.model.place import Gpu, Place, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift, noise
from pytest_gpufleet.verdict.fleet.equality import gpus_apart, not_compared, nothing_repeats, other_bits
from pytest_gpufleet.verdict.fleet.fleet_peers import fingerprints_in_common, nodes_differ
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.outliers import Figure, beside_most
from tests import runs
from tests.conftest import EVIDENCE
from tests.fleets import fleet_of, healthy, host_run

MEMORY = Metric("memory_bandwidth", "GB/s", "higher", "memory bandwidth", 0.01)
BUSBW = METRICS["busbw"]  # no peers: 3 %


def machine(host="node7", order=(0, 1, 2, 3), **facts):
    """The four GPUs of node7 in the slots of a host, in this order. `facts`: of GPU 1, wherever it is."""
    whole = runs.topology("node7")
    gpus = (
        Gpu(slot, {**whole.gpus[index].facts, "pci_bus_id": f"{host}:{slot}", **(facts if index == 1 else {})})
        for slot, index in enumerate(order)
    )
    return replace(whole, gpus=tuple(gpus))


def run(day, *measurements, at=None, host="node7"):
    return Record(
        run=RunHeader(host=host, utc=Moment(f"2026-11-{day:02}T08:00:00+00:00")),
        topology=at or machine(),
        findings=[Finding("acceptance/x.py::test", measurement, "not judged") for measurement in measurements],
    )


def memory(*values, metric=MEMORY, **conditions):
    return Measurement(
        metric.name, {f"gpu{index}": value for index, value in enumerate(values)}, conditions, definition=metric
    )


def pairs(slow, value):
    """Of all pairs in both directions: with the GPU `slow` in them this value, else 100."""
    every = ((one, other) for one in range(4) for other in range(4) if one != other)
    values = {f"gpu{one}-gpu{other}": value if slow in (one, other) else 100.0 for one, other in every}
    return Measurement(
        "pair_bandwidth", values, {"direction": "read"}, definition=replace(MEMORY, name="pair_bandwidth")
    )


def together(value, **conditions):
    return Measurement("busbw", {"world": value}, conditions, definition=BUSBW)


def by_name(*records):
    return {f"r{index}": record for index, record in enumerate(records)}


def ids(*indexes):
    return tuple(f"GPU-node7-{index}" for index in indexes)


def days(*each):
    return tuple(run(day, memory(*values)) for day, values in enumerate(each, 1))


SAME = (100, 100, 100, 100)
CASES = {
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
    "the runs are given in another order": ((run(9, memory(100, 98, 100, 100)), run(2, memory(*SAME))), {ids(1): 0.02}),
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
def test_what_got_worse_is_named(name):
    records, worse = CASES[name]
    assert {each.gpus: each.worse for each in drift(by_name(*records)).worse} == pytest.approx(worse)


def warm(day, warmer, *values):
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
def test_figures_are_taken_at_the_temperature_of_the_last_run(warmer, now, worse):
    healthy = 100 - 0.3 * min(warmer, 10)
    cold, later = warm(1, 0, 100, 100, 100, 100), warm(2, warmer, healthy, now, healthy, healthy)
    assert [str(each.place) for each in drift(by_name(cold, later)).worse] == worse


@pytest.mark.parametrize(("lost", "found"), [(0.0, 0), (0.02, 1)])
def test_what_a_gpu_lost_since_its_own_runs_is_found_from_2_percent_on(lost, found):
    """By eight runs of a machine that differ by 0.1 %, though GPUs differ by 1 %; and nothing else is."""
    dice = random.Random(31)
    for _ in range(20):
        chips = [dice.gauss(6000, 60) for _ in range(4)]
        runs_of = [[chip * (1 + dice.gauss(0, 0.001)) for chip in chips] for _ in range(8)]
        runs_of[-1][2] *= 1 - lost
        records = (
            run(day, memory(*values, metric=METRICS["solo_train_throughput"])) for day, values in enumerate(runs_of, 1)
        )
        assert [each.gpus for each in drift(by_name(*records)).worse] == [ids(2)] * found


def test_the_place_is_that_of_the_last_run_and_gpus_that_moved_came_or_went_are_told():
    before, now = run(1, memory(100, 110, 100, 100)), run(2, memory(100, 100, 107, 100), at=machine(order=(0, 2, 1, 3)))
    (worse,) = drift(by_name(before, now)).worse
    assert (worse.gpus, worse.worse) == (ids(1), pytest.approx(3 / 110))
    assert (str(worse.place), "serial node7-S1" in worse.identity) == ("gpu2", True)
    assert worse.history == {"r0": 110.0, "r1": 107.0}
    whole = machine()
    other = replace(whole, gpus=(*whole.gpus[:3], Gpu(3, {**runs.topology("node8").gpus[3].facts})))
    moved = drift(by_name(run(1), run(2, at=machine("node8"), host="node8"))).notes
    assert [note.partition(" of node8: ")[2] for note in moved] == [
        f"was at node7:{slot} of node7 in r0" for slot in range(4)
    ]
    came, went = drift(by_name(run(1), run(2, at=other))).notes
    assert ("serial node8-S3" in came, came.endswith("in none of the earlier runs")) == (True, True)
    assert ("serial node7-S3" in went, went.endswith("in r0, and not in r1")) == (True, True)
    unknown = [machine(uuid=None, serial=None, pci_bus_id=f"{bus}") for bus in range(2)]  # of whom nobody can say that
    assert drift(by_name(*(run(day, at=at) for day, at in enumerate(unknown, 1)))).notes == ()


def test_figures_that_are_only_shown_are_not_held_against_anything():
    only_shown = [
        replace(each, findings=[replace(finding, state="for information", required=False) for finding in each.findings])
        for each in CASES["one is slow"][0]
    ]
    assert drift(by_name(*only_shown)).compared == 0


@pytest.mark.parametrize(("first", "last", "faults"), [
    ({"remapped_rows": [0, 1, 0, 0]}, {"remapped_rows": [0, 3, 0, 0]}, ["rows_remapped gpu1"]),
    ({"remapped_rows": [1, 0, 0, 0]}, {"remapped_rows": [4, 0, 0, 0]}, []),  # after corrected errors
    ({"ecc_corrected_volatile": 2}, {"ecc_corrected_volatile": 70}, []),
])  # fmt: skip
def test_rows_remapped_after_uncorrectable_errors_are_a_fault(first, last, faults):
    found = drift(by_name(run(1, at=machine(**first)), run(2, at=machine(**last))))
    assert ([f"{each.name} {each.subjects[0]}" for each in found.faults], found.notes) == (faults, ())


@pytest.mark.parametrize(("histories", "sigma", "df"), [
    ([], 0.0, 0),
    ([[100.0, 90.0]], 0.0, 0),  # two runs know no noise
    ([[100.0, 99.0, 98.0], [50.0, 51.0, 52.0]], 0.0, 0.4),
    ([[100.0, math.nan, 98.0]], 0.0, 0),
    ([[99.0, 100.0, 99.0]] * 3, 1.4826 * 0.02 / math.sqrt(6), 0.6),
    ([[100.0, 100.0, 100.0]] * 3 + [[100.0, 50.0, 100.0]], 0.0, 0.8),  # one GPU is no noise of the others
])  # fmt: skip
def test_noise_is_what_a_straight_line_leaves(histories, sigma, df):
    assert noise(histories, Figure("memory_bandwidth", (), MEMORY)) == pytest.approx((sigma, df))


def test_two_runs_of_a_real_machine():
    """Between them another process computed on GPU 2: nothing is worse without it, and GPU 2 is with it."""
    alone, beside = (read(EVIDENCE / f"h200x4-{name}" / "evidence.jsonl") for name in ("c", "neighbour"))
    healthy = drift({"beside": beside, "alone": alone})
    assert (healthy.compared > 30, healthy.worse, healthy.faults) == (True, (), ())
    later = replace(beside, run=msgspec.structs.replace(beside.run, utc=Moment("2026-12-01T00:00:00+00:00")))
    found = drift({"alone": alone, "beside": later})
    assert {str(worse.place) for worse in found.worse if worse.figure.name == "gemm"} == {"gpu2"}


# ----------------------------------------------------------------
HIGHER = Figure("busbw", (), Metric("busbw", "GB/s", "higher", "bus bandwidth"))
LOWER = Figure("collective_latency", (), Metric("collective_latency", "us", "lower", "latency"))
SHARE = Figure("communication_share", (), Metric("communication_share", "ratio", "lower", "share of communication"))
KELVIN = Figure("soak_excess", (), METRICS["soak_excess"])


@pytest.mark.parametrize(("figure", "values", "worse"), [
    (HIGHER, [100, 100, 100, 96], {3: 0.04}),
    (HIGHER, [100, 100, 100, 104], {}),  # better is nothing bad
    (LOWER, [100, 100, 100, 104], {3: 0.04}),
    (HIGHER, 2 * [104, 98, 100, 102, 96], {}),  # so noisy that 4 % say nothing
    (HIGHER, [*2 * [104, 98, 100, 102, 96], 80], {10: 0.2}),  # and one bad node does not widen it
    (HIGHER, [100, 100, 94, 10], {2: 0.06, 3: 0.9}),  # nor hides another
    (HIGHER, [100, 100, 100, math.nan], {3: 1.0}),
    (HIGHER, [94, 100], {0: 0.06}),  # of two the worse one: nothing makes a machine faster than it is
    (HIGHER, [100, math.nan], {1: 1.0}),
    (HIGHER, [100], {}),
    (SHARE, [0.004, 0.006], {}),  # half as much again of next to nothing
    (SHARE, [0.0, 0.05], {1: 0.05}),
    (KELVIN, [0.0, 2.5], {}),  # many times as much of next to nothing
    (KELVIN, [0.5, 5.5], {1: 0.05}),
])  # fmt: skip
def test_a_value_is_an_outlier_on_the_bad_side_only(figure, values, worse):
    found = beside_most(figure, {(str(index), gpu(0)): value for index, value in enumerate(values)}, 0.005, 10, 0.01)
    assert {int(each.run): each.worse for each in found} == pytest.approx(worse)


def test_a_board_that_no_other_run_has_hides_nothing_among_the_others():
    def copied(host, part, value):
        return run(1, memory(*[value] * 4, operation="copy"), at=machine(host, board_part_number=part), host=host)

    runs = {host: copied(host, "A", value) for host, value in (("a", 4260.0), ("b", 4260.0), ("slow", 4090.0))}
    alone = {host: copied(host, host, value) for host, value in (("other", 4287.0), ("broken", 3900.0))}
    assert [(each.run, each.place) for each in compare(runs).worse if each.place == gpu(1)] == [("slow", gpu(1))]
    found = {each.run for each in compare({**runs, **alone}).worse if each.place == gpu(1)}
    assert found == {"slow", "broken"}


def test_measurements_in_other_units_are_not_compared():
    mine = Metric("my_rate", "GB/s", "higher", "mine")
    before, now = (run(day, memory(value, metric=replace(mine, unit=unit))) for day, value, unit in (
        (1, 10.0, "GB/s"), (2, 9000.0, "MB/s"),
    ))  # fmt: skip
    assert (drift({"a": before, "b": now}).compared, compare({"a": before, "b": now}).compared) == (0, 0)
    assert drift({"a": before, "b": run(2, memory(9.0, metric=replace(mine, title="reworded")))}).bad


def test_what_no_run_has_measured_is_no_figure_of_the_comparison():
    def run(**values):
        found = [Finding("check", Measurement(name, told, {}), "not judged") for name, told in values.items()]
        return Record(run=RunHeader(rehearsal=True), findings=found)

    nothing = run(soak_temperature={}, memory_bandwidth={gpu(0): 4200.0})
    compared = compare({"a": nothing, "b": nothing})
    assert [row.figure.metric.name for row in compared.rows] == ["memory_bandwidth"]
    assert compare({"a": nothing, "b": run(soak_temperature={gpu(0): 60.0})}).rows == ()


# ---------------- who computes other bits: a GPU beside its machine's, a machine beside others
CHECK = "acceptance/test_3_fingerprint.py::test_gpus_compute_the_same_bits[products]"
H200, H100 = "NVIDIA H200, 132 SMs, compute capability 9.0", "NVIDIA H100 PCIe, 114 SMs, compute capability 9.0"
LIBRARIES = {"torch": "2.9.0", "cuda": "13.0", "cudnn": "9.13.0", "cublas": "130002"}
DATA, RIGHT, WRONG, UNSTEADY = "d" * 64, "a" * 64, "b" * 64, ""


def fingerprints(*outputs, kind=H200, libraries=LIBRARIES, data=DATA, ranks=0):
    """Of a machine whose GPUs compute these hashes in one part, and all the same in another; with ranks, also their
    sum."""
    together = {f"all_reduce of {ranks} ranks, float32": Part(data, RIGHT)} if ranks else {}
    return tuple(
        Fingerprint(gpu(index), kind, libraries, {"product": Part(data, output), "sum": Part(data, RIGHT), **together})
        for index, output in enumerate(outputs)
    )


@pytest.mark.parametrize(("outputs", "named"), [
    ([RIGHT] * 8, []),
    ([RIGHT], []),
    ([RIGHT] * 3 + [WRONG], [(gpu(3),)]),
    ([RIGHT, UNSTEADY], [(gpu(1),)]),
    ([RIGHT, WRONG], [(gpu(0), gpu(1))]),  # nobody can say which
    ([RIGHT, RIGHT, WRONG, WRONG], [(gpu(0), gpu(1), gpu(2), gpu(3))]),
    ([RIGHT, RIGHT, WRONG, UNSTEADY], [(gpu(2),), (gpu(3),)]),
    ([UNSTEADY] * 4, []),  # it is the software that does not repeat it
    ([RIGHT, UNSTEADY, UNSTEADY], []),
])  # fmt: skip
def test_a_gpu_that_computes_otherwise_is_named(outputs, named):
    faults = gpus_apart(fingerprints(*outputs))
    assert [fault.subjects for fault in faults] == named
    assert all("product" in fault.what and "sum" not in fault.what for fault in faults)


def test_other_models_and_libraries_are_no_peers_within_a_machine_and_other_data_are_found():
    mixed = fingerprints(RIGHT, RIGHT) + tuple(
        Fingerprint(gpu(2 + index), H100, LIBRARIES, {"product": Part(DATA, WRONG)}) for index in range(2)
    )
    assert gpus_apart(mixed) == []
    two, (one, _) = fingerprints(RIGHT, RIGHT), fingerprints(RIGHT, RIGHT, data="e" * 64)
    (fault,) = gpus_apart([*two, *(Fingerprint(gpu(2), H200, LIBRARIES, one.parts),)])
    assert (fault.subjects, "the data of product" in fault.what) == ((gpu(2),), True)


def test_where_nothing_repeats_there_is_nothing_to_compare():
    once = tuple(Fingerprint(gpu(0), H200, LIBRARIES, {"product": Part(DATA, UNSTEADY)}) for _ in range(2))
    assert nothing_repeats(once)
    assert not nothing_repeats(fingerprints(UNSTEADY))


# ---------------------------------------------------------------- machines
def record(*outputs, driver="580.159.04", **how):
    base = healthy()
    found = fingerprints(*outputs, **how)
    return replace(base, topology=replace(base.topology, driver=driver), fingerprints={CHECK: found})


A, ALSO_A, B = record(*[RIGHT] * 4), record(*[RIGHT] * 4), record(*[WRONG] * 4)


@pytest.mark.parametrize(("machines", "named", "usual"), [
    ([A, A, ALSO_A], None, None),
    ([A, B, ALSO_A], {"1"}, RIGHT[:12]),
    ([A, B], {"0", "1"}, None),  # nobody can say which
    ([record(*[WRONG] * 8), record(RIGHT), record(RIGHT)], {"0"}, RIGHT[:12]),  # a large one has one vote
    ([record(RIGHT, RIGHT, RIGHT, WRONG), A], None, None),  # a bad GPU is no bad machine
    ([record(RIGHT, WRONG), A], None, None),  # and without a majority it has no vote
])  # fmt: skip
def test_a_machine_whose_gpus_agree_on_wrong_bits_is_named(machines, named, usual):
    records = {str(number): each for number, each in enumerate(machines)}
    found = other_bits(records)
    assert [({*each.hosts}, each.usual, each.code) for each in found] == (
        [(named, usual, "machine_bits_differ")] if named else []
    )
    assert all("product" in each.fact and "sum" not in each.fact for each in found)
    assert not_compared(records) == []


@pytest.mark.parametrize(
    "how", [{"libraries": {**LIBRARIES, "torch": "2.8.0"}}, {"kind": H100}, {"driver": "570.86.15"}]
)
def test_other_models_and_versions_are_not_compared_and_it_is_said(how):
    runs = {"a": A, "b": record(*[WRONG] * 4, **how)}
    assert other_bits(runs) == []
    assert not_compared(runs) != []
    assert other_bits({"a": A, "b": record(*[WRONG] * 4, driver="580.65.06")}) != []  # another minor version


def test_of_other_numbers_of_gpus_only_what_each_does_alone_is_compared():
    eight, two = record(*[RIGHT] * 8, ranks=8), record(WRONG, WRONG, ranks=2)
    (found,) = other_bits({"a": eight, "b": eight, "c": two})
    assert (found.hosts, "all_reduce" in found.fact) == (("c",), False)
    assert other_bits({"a": eight, "b": record(RIGHT, RIGHT, ranks=2)}) == []


def test_a_run_without_a_fingerprint_is_told_beside_others():
    assert not_compared({"a": healthy(), "b": healthy()}) == []
    assert "none (a)" in not_compared({"a": healthy(), "b": A})[0]


def test_a_fleet_with_such_a_machine_is_rejected():
    taken = {"fingerprints": A.fingerprints}
    hosts = [host_run(f"node-00{number}", **taken) for number in range(3)]
    assert judge_fleet(hosts).verdict == "ACCEPTED"
    fleet = judge_fleet([*hosts, host_run("node-003", fingerprints=B.fingerprints)])
    found = [(fault.name, fault.subjects) for fault in fleet.faults]
    assert (fleet.verdict, found) == ("REJECTED", [("machine_bits_differ", (Place(3, "node"),))])


def test_a_node_of_one_run_is_named_by_its_number():
    nodes = dict(zip((0, 2, 5), fleet_of(3), strict=True))
    assert not fingerprints_in_common(nodes)
    taken = {0: A, 2: B, 5: A}
    nodes = {
        number: replace(run, record=replace(run.record, fingerprints=taken[number].fingerprints))
        for number, run in nodes.items()
    }
    assert fingerprints_in_common(nodes)
    assert [fault.subjects for fault in nodes_differ(nodes, other_bits)] == [(Place(2, "node"),)]
