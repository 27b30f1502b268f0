"""A place is held against what its healthy peers reach, however many of them are not."""

import math
from dataclasses import replace

import pytest

from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import Tolerance
from pytest_gpufleet.model.place import gpu, where as at
from pytest_gpufleet.verdict.judgement import tolerances_of
from pytest_gpufleet.verdict.peers import MOST_KELVIN, slower_than_peers

NOISE = "three machines"  # whose noise was measured
REFERENCES = ("best", "better half", "median")


def machine(*affinities):
    return GpuTopology(
        tuple(Gpu(i, {"name": "Card", "cpu_affinity": [mask]}) for i, mask in enumerate(affinities)),
        tuple(tuple("X" if i == j else "NV18" for j in range(len(affinities))) for i in range(len(affinities))),
        "nvswitch",
    )


def slower(values, tolerance, temperatures=(), topology=None, metric="gemm"):
    if not isinstance(values, dict):
        values = {gpu(i): value for i, value in enumerate(values)}
    states = {gpu(i): GpuState(temperature_c=each) for i, each in enumerate(temperatures)}
    measurement = Measurement(metric, values, {}, gpu_states=states)
    return set(slower_than_peers(measurement, [tolerance], topology or machine(*[1] * 8)) or ())


def test_who_has_no_peers_is_not_told_to_be_like_them():
    two = Measurement("gemm", {gpu(0): 100.0, gpu(1): 99.0}, {})
    assert slower_than_peers(two, [Tolerance("gemm", 0.08)], machine(1, 1)) is None
    assert slower_than_peers(two, [Tolerance("gemm", 0.08, source=NOISE)], machine(1, 1)) == {}
    assert slower_than_peers(two, [], machine(1, 1)) is None


def measured(worse, reference="better half", **more):
    return Tolerance("gemm", worse, reference, source=NOISE, **more)


@pytest.mark.parametrize("reference", ["best", "better half"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_half_a_machine_that_is_slow_does_not_hide(n, reference):
    bad = {gpu(i) for i in range(n - n // 2, n)}
    values = [96.0 if gpu(i) in bad else 100.0 for i in range(n)]
    assert slower(values, measured(0.035, reference)) == bad
    assert slower([100.0] * n, measured(0.035, reference)) == set()


@pytest.mark.parametrize(
    ("values", "tolerance", "affinities", "named"),
    [
        ([100.0, 96.0, 96.0, 96.0], measured(0.035, "best"), [1] * 4, {1, 2, 3}),  # most of them do not hide
        ([103.0, 100.0, 100.0, 100.0], measured(0.035, "best"), [1] * 4, set()),  # faster is no fault
        ([55.5, 55.5, 53.1, 53.1], measured(0.03, "median"), [1] * 4, set()),  # the median hides half
        ([55.5, 55.5, 55.5, 53.1], measured(0.03, "median"), [1] * 4, {3}),
        # peers at one NUMA node are those whose processors are the same
        ([55.5, 55.4, 53.1, 51.0], measured(0.03, "best", within="numa node"), [1, 1, 2, 2], {3}),
        ([55.5, 55.4, 53.1, 51.0], measured(0.03, "best", within="numa node"), [1] * 4, set()),  # not told
        ([55.5, 55.4, 53.1, 51.0], measured(0.05, "best"), [1, 1, 2, 2], {3}),
        *(([100.0, 100.0, math.nan], measured(0.03, each), [1] * 3, {2}) for each in REFERENCES),
        *(([math.nan] * 3, measured(0.03, each), [1] * 3, set()) for each in REFERENCES),
        *(([0.0, 0.0, 0.0, math.nan], measured(0.03, each), [1] * 4, {3}) for each in REFERENCES),
    ],
)
def test_who_is_slower_is_named_by_the_reference(values, tolerance, affinities, named):
    assert slower(values, tolerance, topology=machine(*affinities)) == set(map(gpu, named))


def test_of_two_the_slower_one_is_named_only_where_the_noise_of_healthy_ones_is_known():
    assert slower([100.0, 96.0], Tolerance("gemm", 0.035)) == set()
    named = [slower(values, measured(0.035)) for values in ([100.0, 96.0], [100.0, 97.0], [100.0])]
    assert named == [{gpu(1)}, set(), set()]


# GB/s of copies on H200 of two part numbers, A and B.
@pytest.mark.parametrize(
    ("boards", "values", "named"),
    [
        ("AABB", [4261.0, 4263.0, 4288.0, 4287.0], set()),
        ("BBBA", [4288.0, 4288.0, 4287.0, 4261.0], set()),
        ("BA", [4288.0, 4261.0], set()),
        ("AABB", [4261.0, 4239.0, 4288.0, 4287.0], {gpu(1)}),  # 0.5 % less than its like
        ("BBBA", [4288.0, 4288.0, 4287.0, 4236.0], {gpu(3)}),  # 1.2 % less than all
        ("BB", [4288.0, 4261.0], {gpu(1)}),
    ],
)
def test_boards_of_one_part_number_are_held_closer_than_all_of_a_model(boards, values, named):
    gpus = tuple(Gpu(i, {"name": "Card", "board_part_number": number}) for i, number in enumerate(boards))
    topology = GpuTopology(gpus, (), "nvswitch")
    given = Tolerance("memory_bandwidth", 0.005, across=0.012, source=NOISE)
    assert slower(values, given, topology=topology, metric="memory_bandwidth") == named
    usual = replace(given, across=None)  # then the metric's own 3 %
    assert slower(values, usual, topology=topology, metric="memory_bandwidth") == named - {gpu(3)}


def test_of_the_two_directions_of_one_pair_the_slower_one_is_named():
    pairs, tolerance = {at("gpu0-gpu1"): 396.0, at("gpu1-gpu0"): 392.0}, measured(0.005, "best")
    assert slower(pairs, tolerance, metric="pair_bandwidth") == {at("gpu1-gpu0")}


def test_a_warmer_gpu_is_held_against_what_it_would_reach_at_the_temperature_of_its_peers():
    tolerance = measured(0.02, per_kelvin=0.003)
    values, temperatures = [100.0, 100.0, 100.0, 97.6], [55.0, 55.0, 55.0, 63.0]
    assert slower(values, tolerance) == {gpu(3)}
    assert slower(values, tolerance, temperatures) == set()
    assert slower([100.0, 100.0, 100.0, 94.0], tolerance, temperatures) == {gpu(3)}
    assert slower(values, tolerance, temperatures[:3]) == {gpu(3)}  # the temperature of one is unknown
    # No more warmth is excused than healthy boards have.
    hot = 55.0 + 3 * MOST_KELVIN
    assert slower([100.0, 100.0, 100.0, 92.0], tolerance, [55.0, 55.0, 55.0, hot]) == {gpu(3)}
    # And where less is better.
    latencies = [100.0, 100.0, 100.0, 102.4]
    assert slower(latencies, tolerance, metric="pair_latency") == {gpu(3)}
    assert slower(latencies, tolerance, temperatures, metric="pair_latency") == set()


@pytest.mark.parametrize(("last", "named"), [(31.0, set()), (15.0, {gpu(7)})])
def test_gpus_that_copy_at_once_share_the_way_out_of_their_socket_and_not_alike(last, named):
    """As a healthy 8x H200 gave, and as with half of the lanes."""
    topology, conditions = machine(*[1] * 4, *[2] * 4), {"direction": "host to device", "at_once": "all"}
    values = dict(zip(map(gpu, range(8)), [29.0, 30.0, 43.0, 30.0, 32.0, 34.0, 32.0, last], strict=True))
    measurement = Measurement("host_bandwidth", values, {**conditions, "method": "lined up"})
    assert {*slower_than_peers(measurement, tolerances_of(measurement, ()), topology)} == named


def test_gpus_that_share_a_pcie_switch_are_not_held_against_those_that_do_not():
    """All at once, two behind one switch have half of what a third at the same NUMA node has."""
    rows = ["X PIX NODE NODE SYS", "PIX X NODE NODE SYS", "NODE NODE X PXB SYS", "NODE NODE PXB X SYS"]
    rows.append("SYS SYS SYS SYS X")
    links = tuple(tuple(row.split()) for row in rows)
    topology = replace(machine(1, 1, 1, 1, 2), links=links, fabric="pcie")
    near = measured(0.1, within="numa node")
    assert slower([13.0, 13.0, 13.0, 13.0, 25.0], near, topology=topology) == set()
    assert slower([13.0, 13.0, 13.0, 10.0, 25.0], near, topology=topology) == {gpu(3)}
    alone = tuple(tuple(row.replace("PXB", "NODE").split()) for row in rows)
    assert slower([13.0, 13.0, 25.0, 25.0, 25.0], near, topology=replace(topology, links=alone)) == set()
