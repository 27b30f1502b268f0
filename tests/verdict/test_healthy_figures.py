"""Nothing that is known to be healthy is rejected: neither what somebody published, nor what was recorded."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import pytest

from pytest_gpufleet.model.conditions import ONE_WINDOW
from pytest_gpufleet.model.finding import Limit, Reference, that_count
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import GiB, SpreadRow
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.verdict.judgement import judge, tolerances_of
from pytest_gpufleet.verdict.noise import gpu_line, machine_line
from pytest_gpufleet.verdict.outliers import slower_than_peers
from pytest_gpufleet.verdict.profile import for_gpu, of_every_gpu, shipped
from pytest_gpufleet.verdict.reading import read
from tests.boards import BOARDS, H200 as H200_BOARD

H200, H100, B200, B300 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA B300 SXM6 AC"
RECORDED = Path(__file__).parents[1] / "recorded"
HEALTHY = sorted({each.parent for each in RECORDED.glob("h200*/evidence.jsonl")} - {RECORDED / "h200x4-neighbour"})


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
    made = [limit for limit in profile.limits if limit.measured]
    for limit in made:
        conditions = {key: value for key, value in limit.conditions.items() if key != "fabric"}
        measurement = Measurement(limit.metric, {"world": limit.measured}, conditions)
        decides = profile.limit_for(measurement, str(limit.conditions.get("fabric", "")))
        assert decides is not None
        assert decides.met_by(limit.measured)


@pytest.mark.parametrize("affinities", [[1] * 8, [1] * 4 + [2] * 4], ids=["hidden", "two NUMA nodes"])
@pytest.mark.parametrize(("direction", "values"), [
    ("host to device", (53.05, 55.24, 55.22, 55.36, 54.86, 55.22, 55.18, 55.02)),
    ("device to host", (54.24, 55.21, 54.99, 55.28, 55.22, 55.24, 55.29, 55.17)),
])  # fmt: skip
def test_host_links_of_a_machine_whose_first_one_was_disturbed_are_healthy(direction, values, affinities):
    """8x H200, 2026-11-22; minutes later nvbandwidth gave 55.03 and 55.20 GB/s on GPU 0, 55.2 to 55.5 on the others."""
    machine = H200_BOARD.machine(8)
    gpus = tuple(
        replace(gpu, facts={**gpu.facts, "cpu_affinity": [mask]})
        for gpu, mask in zip(machine.gpus, affinities, strict=True)
    )
    measurement = Measurement("host_bandwidth", {f"gpu{i}": value for i, value in enumerate(values)}, host(direction))
    for profile in (for_gpu(H200), for_gpu(H100)):
        assert judge(measurement, profile, replace(machine, gpus=gpus), "x", rehearsal=False).state == "met"


def test_host_links_without_an_nvswitch_differ_by_more():
    """Each of 8x RTX 4090, one after the other: NVIDIA/nvbandwidth issue 15."""
    machine, profile = BOARDS["NVIDIA GeForce RTX 4090"].machine(8), for_gpu("NVIDIA GeForce RTX 4090")
    values = (25.50, 24.26, 23.90, 26.30, 26.28, 26.38, 26.09, 26.31)
    measured = Measurement("host_bandwidth", {gpu(i): each for i, each in enumerate(values)}, host("host to device"))
    assert judge(measured, profile, machine, "x", rehearsal=False).slower_than_peers == {}


# Per cent, on 8 GPUs with 275 comparisons: machines and GPUs that were seen, how much they differ within a machine and
# between machines, and by how much a GPU may be worse than the others and a machine than its reference.
LINES = [
    ("gemm", "", (5, 16), (0.48, 0.27), (4.9, 6.9)),
    ("gemm", "", (5, 16), (1.06, 0.68), (6.4, 7.7)),
    ("gemm", "", (5, 16), (0.86, 1.03), (5.8, 7.9)),
    ("gemm", "", (5, 16), (1.32, 1.5), (7.3, 9.2)),
    ("solo_train_throughput", "", (6, 17), (0.63, 0.67), (5.1, 7.0)),
    ("memory_bandwidth", "same", (6, 17), (0.03, 0.03), (0.5, 0.55)),
    ("pair_bandwidth", "", (4, 14), (0.03, 0.06), (0.5, 0.6)),
    ("busbw", "", (3, 4), (0.0, 0.03), (None, 3.1)),
    ("all_gather", "", (3, 4), (0.0, 0.65), (None, 7.6)),
]


@pytest.mark.parametrize(("metric", "part", "seen", "differ", "lines"), LINES)
def test_the_defaults_give_the_lines_that_the_recorded_machines_were_tried_with(metric, part, seen, differ, lines):
    under = {"collective": metric, "link": "NVLink"}
    measurement = Measurement("busbw" if metric == "all_gather" else metric, {"gpu0": 1.0}, under)
    machines, gpus = seen
    within, between = (each / 100 for each in differ)
    row = SpreadRow(measurement.metric, within, between, machines, gpus)
    known = replace(of_every_gpu(), spreads=(row,)).spread_for(measurement, "nvswitch", part)
    gpu_floor, machine_floor = lines
    assert 100 * machine_line(known.spread, machines, 8, 275, known.matters) == pytest.approx(machine_floor, abs=0.3)
    if gpu_floor:
        assert 100 * gpu_line(known.spread, 8, 275, known.matters) == pytest.approx(gpu_floor, abs=0.3)


def _subsets(measurement):
    """What groups of 2 to 4 of its GPUs gave."""
    gpus = sorted({part for place in measurement.values for part in place.parts})
    for size in range(2, len(gpus) + 1):
        for group in itertools.combinations(gpus, size):
            values = {at: value for at, value in measurement.values.items() if set(at.parts) <= set(group)}
            yield replace(measurement, values=values, samples={}, gpu_states={})


@pytest.mark.parametrize("folder", HEALTHY, ids=lambda folder: folder.name)
def test_no_gpu_of_the_recorded_machines_is_slower_than_the_others(folder):
    """Groups of some of the GPUs of a machine too: they could be machines of their own."""
    topology, slower = read(folder / "evidence.jsonl").topology, []
    for measurement in _measured(folder).values():
        for each in _subsets(measurement) if measurement.definition.peer_tolerance else ():
            given = tolerances_of(each, for_gpu(H200), topology, 200)
            slower += (slower_than_peers(each, given, topology) or {}).items()
    assert slower == []


@cache
def _measured(folder):
    findings = that_count(read(folder / "evidence.jsonl").findings)
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
        found = judge(measurement, known, read(folder / "evidence.jsonl").topology, "x", rehearsal=False)
        assert found.limit.reference.noise.machines in (0, len(others))
        cases += 1
        rejected += [(folder.name, key)] * (found.state != "met")
    assert (cases > 100, rejected) == (True, [])
