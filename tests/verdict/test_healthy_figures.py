"""Nothing that is known to be healthy is rejected: neither what somebody published, nor what was recorded."""

import itertools
import math
import runpy
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev

import pytest

from pytest_gpufleet.model.conditions import ONE_WINDOW
from pytest_gpufleet.model.finding import Limit, Reference, that_count
from pytest_gpufleet.model.metric import GiB, GpuState, Measurement, SpreadRow, Tolerance
from pytest_gpufleet.model.place import Gpu, GpuTopology, gpu, where as at
from pytest_gpufleet.verdict.judgement import judge, read, tolerances_of
from pytest_gpufleet.verdict.outliers import MOST_KELVIN, slower_than_peers
from pytest_gpufleet.verdict.profile import for_gpu, of_every_gpu, shipped
from tests.boards import BOARDS, H200 as H200_BOARD
from tests.conftest import EVIDENCE, ROOT

H200, H100, B200, B300 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA B300 SXM6 AC"
HEALTHY = sorted({each.parent for each in EVIDENCE.glob("h200*/evidence.jsonl")} - {EVIDENCE / "h200x4-neighbour"})


def busbw(nbytes, ranks, nvls, collective="all_reduce"):
    return {"collective": collective, "bytes": nbytes, "dtype": "float32", "ranks": ranks, "nvls": nvls}


def host(direction):
    return {"direction": direction, "at_once": "one"}


READ, TWO_NODES = {"direction": "read", "link": "NVLink"}, {"nodes": 2, "network": 400}
# What the sources that the profiles name call healthy, measured as the suite does: model, metric, conditions, figure,
# source. BabelStream's own copy and runs of a tenth of a second are not here: they are other methods; nor are figures
# that a limit itself names, which the next test takes.
PUBLISHED = [
    (H200, "host_bandwidth", host("host to device"), 52.0, "Azure/AI-benchmarking-guide, rounded"),
    (H200, "host_bandwidth", host("device to host"), 52.0, "Azure/AI-benchmarking-guide, rounded"),
    (H200, "host_bandwidth", host("device to host"), 48.0, "azurehpc-health-checks, nd96isr_h200_v5"),
    (H200, "pair_bandwidth", READ, 393.8, "8x NVIDIA H200, nvbandwidth 0.8, 2026-11-20, every pair"),
    (H100, "pair_bandwidth", READ, 376.0, "NVIDIA/nccl issue 1264, p2pBandwidthLatencyTest"),
    ("NVIDIA GB200", "pair_bandwidth", READ, 744.0, "stas00/ml-engineering"),
    (H100, "memory_bandwidth", {"operation": "copy"}, 2570.0, "NVIDIA/nccl issue 1264, cudaMemcpy"),
    (H100, "busbw", {**busbw(8 * GiB, 16, True), **TWO_NODES}, 449.0, "NVIDIA/nccl issue 2409"),
    (H100, "busbw", {**busbw(GiB, 16, True), **TWO_NODES}, 313.3, "awsome-distributed-ai, EKS, NCCL 2.18"),
    (H100, "busbw", {**busbw(8 * GiB, 16, False), **TWO_NODES}, 365.8, "NVIDIA/nccl-tests issue 309, on four"),
    (B200, "busbw", {**busbw(8 * GiB, 16, False), **TWO_NODES}, 376.1, "stas00/ml-engineering, on four"),
    (H200, "busbw", busbw(8 * GiB, 4, False), 363.0, "stas00/ml-engineering, 4x H200, ring"),
    (H200, "busbw", busbw(8 * GiB, 8, True), 473.0, "Azure/AI-benchmarking-guide and stas00/ml-engineering"),
    (H100, "host_bandwidth", host("host to device"), 51.0, "Azure/AI-benchmarking-guide"),
    (H100, "busbw", busbw(8 * GiB, 8, True), 479.0, "Azure/AI-benchmarking-guide"),
    (H100, "busbw", busbw(GiB, 8, True), 441.8, "awslabs/awsome-distributed-ai, one p5.48xlarge"),
    (H100, "busbw", {**busbw(8 * GiB, 16, True), **TWO_NODES, "network": 200}, 337.4, "two a3-megagpu-8g"),
    ("NVIDIA A100-SXM4-40GB", "busbw", busbw(GiB, 8, False), 230.8, "NVIDIA/nccl issue 527, p4d"),
    ("NVIDIA H100 NVL", "host_bandwidth", host("host to device"), 48.0, "azurehpc-health-checks, since 9897fbd"),
]
# Under load that lasts, healthy H200 keep at least this much of what runs of a tenth of a second give (bf16: 676 of
# 794.5 TFLOP/s): so must the limits of models of which only such runs are published.
SUSTAINED = 0.851
SHORT_RUNS = [
    (B200, 1745.0), (H100, 792.1), ("NVIDIA H100 PCIe", 499.5), ("NVIDIA H100 NVL", 488.5), ("NVIDIA L40S", 252.0),
    ("NVIDIA GeForce RTX 4090", 178.5), ("NVIDIA GeForce RTX 3090", 78.0), ("NVIDIA RTX A6000", 131.0),
]  # fmt: skip
IN_BF16 = {"precision": "bf16", "method": ONE_WINDOW}
PUBLISHED += [
    (model, "gemm", IN_BF16, SUSTAINED * figure, "stas00/ml-engineering or mag-/gpu_benchmark")
    for model, figure in SHORT_RUNS
]


@pytest.mark.parametrize(("model", "metric", "conditions", "figure", "source"), PUBLISHED)
def test_no_limit_rejects_what_its_sources_call_healthy(model, metric, conditions, figure, source):
    measurement = Measurement(metric, {"world" if metric == "busbw" else "gpu0": figure}, conditions)
    topology = GpuTopology(fabric="nvswitch")
    found = judge(measurement, for_gpu(model), topology, "x", rehearsal=False, network=400, comparisons=651)
    assert (found.limit is None, found.missed) == (False, ())


@pytest.mark.parametrize("profile", shipped(), ids=lambda profile: profile.path.stem)
def test_no_limit_rejects_the_figure_that_any_limit_was_made_from(profile):
    """Of all fabrics and by the limit that decides, which is not always the one that the figure belongs to."""
    for limit in [limit for limit in profile.limits if limit.measured]:
        conditions = {key: value for key, value in limit.conditions.items() if key != "fabric"}
        measurement = Measurement(limit.metric, {"world": limit.measured}, conditions)
        decides = profile.limit_for(measurement, str(limit.conditions.get("fabric", "")))
        assert decides is not None
        assert decides.met_by(limit.measured)


@pytest.mark.parametrize("affinities", [[1] * 8, [1] * 4 + [2] * 4], ids=["hidden", "two NUMA nodes"])
def test_host_links_of_a_machine_whose_first_one_was_disturbed_are_healthy(affinities):
    """8x H200, 2026-11-22; minutes later nvbandwidth gave 55.03 GB/s on GPU 0, 55.2 to 55.5 on the others."""
    machine, values = H200_BOARD.machine(8), (53.05, 55.24, 55.22, 55.36, 54.86, 55.22, 55.18, 55.02)
    gpus = [replace(each, facts={**each.facts, "cpu_affinity": [affinities[each.index]]}) for each in machine.gpus]
    measured = Measurement("host_bandwidth", dict(zip(map(gpu, range(8)), values, strict=True)), host("host to device"))
    for profile in (for_gpu(H200), for_gpu(H100)):
        assert judge(measured, profile, replace(machine, gpus=tuple(gpus)), "x", rehearsal=False).state == "met"


def test_host_links_without_an_nvswitch_differ_by_more():
    """Each of 8x RTX 4090, one after the other: NVIDIA/nvbandwidth issue 15."""
    machine, profile = BOARDS["NVIDIA GeForce RTX 4090"].machine(8), for_gpu("NVIDIA GeForce RTX 4090")
    values = (25.50, 24.26, 23.90, 26.30, 26.28, 26.38, 26.09, 26.31)
    measured = Measurement("host_bandwidth", {gpu(i): each for i, each in enumerate(values)}, host("host to device"))
    assert judge(measured, profile, machine, "x", rehearsal=False).slower_than_peers == {}


def _subsets(measurement):
    gpus = sorted({part for place in measurement.values for part in place.parts})
    for size in range(2, len(gpus) + 1):
        for group in itertools.combinations(gpus, size):
            values = {at: value for at, value in measurement.values.items() if set(at.parts) <= set(group)}
            yield replace(measurement, values=values, samples={}, gpu_states={})


@pytest.mark.parametrize("folder", HEALTHY, ids=lambda folder: folder.name)
def test_no_gpu_of_the_recorded_machines_is_slower_than_the_others(folder):
    """Groups of some of the GPUs of a machine too: they could be machines of their own."""
    topology, slower = _record(folder).topology, []
    for measurement in _measured(folder).values():
        for each in _subsets(measurement) if measurement.definition.peer_tolerance else ():
            given = tolerances_of(each, for_gpu(H200), topology, 200)
            slower += (slower_than_peers(each, given, topology) or {}).items()
    assert slower == []


@cache
def _record(folder):
    return read(folder / "evidence.jsonl")


@cache
def _measured(folder):
    findings = that_count(_record(folder).findings)
    return {
        (each.measurement.metric, *sorted(each.measurement.conditions.items())): each.measurement for each in findings
    }


def _spread(metric, machines):
    """How much these machines differ, each the values of its places."""
    means, gpus = [fmean(values) for values in machines], sum(map(len, machines))
    within = [(value / mean - 1) ** 2 for values, mean in zip(machines, means, strict=True) for value in values]
    if gpus > len(means):
        yield SpreadRow(metric, (sum(within) / (gpus - len(means))) ** 0.5, None, len(means), gpus)
    if len(means) > 1:
        yield SpreadRow(metric, None, stdev(means) / fmean(means), len(means))


HELD_OUT = ("busbw", "gemm", "memory_bandwidth", "pair_bandwidth", "solo_train_throughput", "train_throughput")


def test_no_healthy_machine_is_rejected_by_what_the_others_reach():
    """Each machine in turn against reference and spread of all others, as if nobody had ever seen it."""
    cases, rejected = 0, []
    for folder, (key, measurement) in ((each, item) for each in HEALTHY for item in _measured(each).items()):
        others = [
            [*_measured(each)[key].values.values()] for each in HEALTHY if each != folder and key in _measured(each)
        ]
        small = measurement.conditions.get("bytes", GiB) < GiB or measurement.conditions.get("workload")
        if measurement.metric not in HELD_OUT or small or not others:
            continue
        mean, metric = fmean(map(fmean, others)), measurement.metric
        limit = Limit(metric, "min", mean, measurement.unit, "calibrated", "others", measurement.conditions, "")
        limit = replace(limit, reference=Reference(mean, len(others)))
        known = replace(for_gpu(H200), limits=(limit,), spreads=tuple(_spread(metric, others)), base=of_every_gpu())
        found = judge(measurement, known, _record(folder).topology, "x", rehearsal=False)
        assert found.limit.reference.noise.machines in (0, len(others))
        cases += 1
        rejected += [(folder.name, key)] * (found.state != "met")
    assert (cases > 100, rejected) == (True, [])


# ---------------- the page of planted faults says what the program says, and is right
def test_each_planted_fault_is_found_at_its_places_nothing_healthy_is_rejected_and_the_page_says_so():
    make = runpy.run_path(str(ROOT / "docs" / "make_planted_faults.py"))
    rows, wrong = [row for _, rows in make["SUBJECTS"].values() for row in rows], []
    for row in rows:
        named = [[case.named(size) for case in row.cases] for size in row.sizes or (0,)]
        places = [[{place for _, place in found} for found in each] for each in named]
        everywhere = bool(row.cases) and all(
            found == case.at for found, case in zip(places[-1], row.cases, strict=True)
        )
        elsewhere = any(found - case.at for each in places for found, case in zip(each, row.cases, strict=True))
        codes = {code for each in named for found in each for code, _ in found}
        if elsewhere or everywhere == bool(row.later) or (row.code not in codes and not row.later):
            wrong.append((row.planted, named[-1]))
    assert wrong == []
    assert make["PAGE"].read_text(encoding="utf-8") == (page := make["page"]()), f"run `{make['COMMAND']}`"
    assert "**rejected**" not in page  # what is healthy and looks like a fault
    assert "| REJECTED |" not in page  # a recorded machine
    for test in make["ELSEWHERE"].values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


# ---------------- a place is held against what its healthy peers reach, however many are not
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


def test_who_has_no_peers_is_not_told_to_be_like_them_and_of_two_only_where_the_noise_is_known():
    two = Measurement("gemm", {gpu(0): 100.0, gpu(1): 99.0}, {})
    assert slower_than_peers(two, [Tolerance("gemm", 0.08)], machine(1, 1)) is None
    assert slower_than_peers(two, [Tolerance("gemm", 0.08, source=NOISE)], machine(1, 1)) == {}
    assert slower_than_peers(two, [], machine(1, 1)) is None
    assert slower([100.0, 96.0], Tolerance("gemm", 0.035)) == set()
    named = [slower(values, measured(0.035)) for values in ([100.0, 96.0], [100.0, 97.0], [100.0])]
    assert named == [{gpu(1)}, set(), set()]


def measured(worse, **more):
    return Tolerance("gemm", worse, source=NOISE, **more)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_half_a_machine_that_is_slow_does_not_hide(n):
    bad = {gpu(i) for i in range(n - n // 2, n)}
    assert slower([96.0 if gpu(i) in bad else 100.0 for i in range(n)], measured(0.035)) == bad
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
    ([100.0, 90.0, 100.0, math.inf, -math.inf], measured(0.03), [1] * 5, {1, 3, 4}),
])  # fmt: skip
def test_who_is_slower_than_the_mean_of_the_others_is_named(values, tolerance, affinities, named):
    assert slower(values, tolerance, topology=machine(*affinities)) == set(map(gpu, named))


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
    topology = replace(machine(1, 1, 1, 1, 2), links=tuple(tuple(row.split()) for row in rows), fabric="pcie")
    near = measured(0.1, peers="numa node")
    assert slower([13.0, 13.0, 13.0, 13.0, 25.0], near, topology=topology) == set()
    assert slower([13.0, 13.0, 13.0, 10.0, 25.0], near, topology=topology) == {gpu(3)}
    alone = tuple(tuple(row.replace("PXB", "NODE").split()) for row in rows)
    assert slower([13.0, 13.0, 25.0, 25.0, 25.0], near, topology=replace(topology, links=alone)) == set()
