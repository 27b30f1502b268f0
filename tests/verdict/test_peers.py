"""A place is held against what its healthy peers reach, however many of them are not."""

import math
from dataclasses import replace

import pytest

from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import Tolerance
from pytest_gpufleet.model.place import gpu, where as at
from pytest_gpufleet.verdict.judgement import tolerances_of
from pytest_gpufleet.verdict.outliers import MOST_KELVIN, slower_than_peers
from pytest_gpufleet.verdict.profile import for_gpu

NOISE = "three machines"  # whose noise was measured


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


def measured(worse, **more):
    return Tolerance("gemm", worse, source=NOISE, **more)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_half_a_machine_that_is_slow_does_not_hide(n):
    bad = {gpu(i) for i in range(n - n // 2, n)}
    values = [96.0 if gpu(i) in bad else 100.0 for i in range(n)]
    assert slower(values, measured(0.035)) == bad
    assert slower([100.0] * n, measured(0.035)) == set()


@pytest.mark.parametrize(("values", "tolerance", "affinities", "named"), [
    ([100.0, 100.0, 96.0, 96.0, 50.0], measured(0.035), [1] * 5, {2, 3, 4}),  # one that is very slow hides no other
    ([100.0, 100.0, 96.0, 10.0], measured(0.035), [1] * 4, {2, 3}),
    ([103.0, 100.0, 100.0, 100.0], measured(0.035), [1] * 4, set()),  # faster is no fault
    ([100.0, 100.0, 100.0, 96.6], measured(0.035), [1] * 4, set()),  # of the others, without itself
    ([100.0, 100.0, 100.0, 96.4], measured(0.035), [1] * 4, {3}),
    # peers at one NUMA node are those whose processors are the same
    ([55.5, 55.4, 53.1, 51.0], measured(0.03, peers="numa node"), [1, 1, 2, 2], {3}),
    ([55.5, 55.4, 53.1, 51.0], measured(0.03, peers="numa node"), [1] * 4, set()),  # nobody knows who is near
    ([55.5, 55.4, 53.1, 51.0], measured(0.06), [1, 1, 2, 2], {3}),
    ([100.0, 100.0, math.nan], measured(0.03), [1] * 3, {2}),
    ([100.0, math.nan, math.nan], measured(0.03), [1] * 3, {1, 2}),
    ([math.nan] * 3, measured(0.03), [1] * 3, set()),
    ([0.0, 0.0, 0.0, math.nan], measured(0.03), [1] * 4, {3}),
])  # fmt: skip
def test_who_is_slower_than_the_mean_of_the_others_is_named(values, tolerance, affinities, named):
    assert slower(values, tolerance, topology=machine(*affinities)) == set(map(gpu, named))


def test_of_two_the_slower_one_is_named_only_where_the_noise_of_healthy_ones_is_known():
    assert slower([100.0, 96.0], Tolerance("gemm", 0.035)) == set()
    named = [slower(values, measured(0.035)) for values in ([100.0, 96.0], [100.0, 97.0], [100.0])]
    assert named == [{gpu(1)}, set(), set()]


# GB/s of copies on H200 of two part numbers, A and B.
@pytest.mark.parametrize(("boards", "values", "named"), [
    ("AABB", [4261.0, 4263.0, 4288.0, 4287.0], set()),
    ("BBBA", [4288.0, 4288.0, 4287.0, 4261.0], set()),
    ("BA", [4288.0, 4261.0], set()),
    ("AABB", [4261.0, 4225.0, 4288.0, 4287.0], {gpu(1)}),  # 0.8 % less than its like
    ("BBBA", [4288.0, 4288.0, 4287.0, 4000.0], {gpu(3)}),  # so much is no other kind of board
    ("BB", [4288.0, 4251.0], {gpu(1)}),
])  # fmt: skip
def test_boards_of_one_part_number_are_held_closer_than_all_of_a_model(boards, values, named):
    gpus = tuple(Gpu(i, {"name": "NVIDIA H200", "board_part_number": number}) for i, number in enumerate(boards))
    topology = GpuTopology(gpus, (), "nvswitch")
    copies = Measurement("memory_bandwidth", {gpu(i): value for i, value in enumerate(values)}, {"operation": "copy"})
    given = tolerances_of(copies, for_gpu("NVIDIA H200"), topology, 100)
    assert set(slower_than_peers(copies, given, topology)) == named


def test_of_the_two_directions_of_one_pair_the_slower_one_is_named():
    pairs, tolerance = {at("gpu0-gpu1"): 396.0, at("gpu1-gpu0"): 392.0}, measured(0.005)
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
    assert {
        *slower_than_peers(measurement, tolerances_of(measurement, for_gpu("NVIDIA H200"), topology, 100), topology)
    } == named


def test_gpus_that_share_a_pcie_switch_are_not_held_against_those_that_do_not():
    """All at once, two behind one switch have half of what a third at the same NUMA node has."""
    rows = ["X PIX NODE NODE SYS", "PIX X NODE NODE SYS", "NODE NODE X PXB SYS", "NODE NODE PXB X SYS"]
    rows.append("SYS SYS SYS SYS X")
    links = tuple(tuple(row.split()) for row in rows)
    topology = replace(machine(1, 1, 1, 1, 2), links=links, fabric="pcie")
    near = measured(0.1, peers="numa node")
    assert slower([13.0, 13.0, 13.0, 13.0, 25.0], near, topology=topology) == set()
    assert slower([13.0, 13.0, 13.0, 10.0, 25.0], near, topology=topology) == {gpu(3)}
    alone = tuple(tuple(row.replace("PXB", "NODE").split()) for row in rows)
    assert slower([13.0, 13.0, 25.0, 25.0, 25.0], near, topology=replace(topology, links=alone)) == set()
