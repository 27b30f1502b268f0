"""A linter for the shipped profiles: could a healthy GPU meet this limit, and could a broken one miss it?

The loader has already refused unknown words, wrong units and missing sources. This holds the figures against the data
sheet, which finds a GB/s that should be Gb/s, a row from another model's table, or a zero too many.
"""

import math
from dataclasses import replace
from functools import cache

import pytest

from pytest_gpufleet.model import suite
from pytest_gpufleet.model.levels import LEVELS
from pytest_gpufleet.model.metric import METRICS, Measurement, over_network
from pytest_gpufleet.probes.training import transformer
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.judgement import comparisons, judge
from pytest_gpufleet.verdict.profile import for_gpu, holds, load, of_every_gpu, shipped
from tests import dry_suite, runs
from tests.boards import BOARDS

# GB/s in one direction, 16 lanes, after the encoding of the line (8b/10b up to generation 2, 128b/130b from 3 on).
PCIE = {3: 15.75, 4: 31.5, 5: 63.0}
# ResNet-50, an image forward and backward: arithmetic, and memory traffic with 16-bit activations and all operations
# fused that can be. With 32 bits it is twice that.
FLOP, BYTES = 24.3e9, 331e6
PEAKS = {"fp32": "peak_tflops_fp32", "tf32": "peak_tflops_tf32"}  # all other recipes compute with 16 bits
LOWEST, LONGEST = 0.1, 200.0  # of the peak; microseconds
LEAST, MOST = 0.75, 0.99  # of a healthy figure

# Without these a limit would hold for something that it was not made for: an 8-byte message, a link of another kind.
NEEDED = {
    "busbw": {"collective", "bytes", "dtype", "ranks"},
    "node_group_busbw": {"collective", "bytes", "dtype", "ranks", "nodes", "network"},
    "collective_latency": {"collective", "bytes", "ranks", "method"},
    "gemm": {"precision"},
    "host_bandwidth": {"direction", "at_once"},
    "pair_bandwidth": {"direction", "link"},
    "train_throughput": {"model", "recipe", "ranks"},
    "solo_train_throughput": {"model", "recipe", "ranks"},
}


def lint(profile):
    text = profile.path.read_text(encoding="utf-8").split("\n")
    tables = toml_table.read(profile.path).tables("limit")
    problems = []
    for limit, table in zip(profile.limits, tables, strict=True):
        noted = text[table.line() - 2].startswith("#")
        at = f"{table.path}:{table.line()}: {limit.metric} {limit}"
        problems += [f"{at}: {what}" for what in complaints(profile, limit, noted)]
    return problems


def complaints(profile, limit, noted):
    inside = limit.conditions.get("domain") == "inside"  # over NVLink
    between = {"network"} if "nodes" in limit.conditions and not inside else set()
    if missing := (NEEDED.get(limit.metric, set()) | between) - limit.conditions.keys():
        yield f"it does not say for which {', '.join(sorted(missing))}"
        return
    if not (limit.reference or limit).date:
        yield "has no date"
    if limit.measured and not LEAST <= better(limit) <= MOST:
        yield f"is {better(limit):.0%} of the healthy figure {limit.measured:g}"
    if limit.sense == "max":
        if limit.unit == "us" and limit.value > LONGEST:
            yield f"is above {LONGEST} us"
        return
    peak = peak_of(profile.facts, limit)
    if peak is None:
        yield "the facts have no peak to hold it against"
    elif limit.value > peak:
        yield f"is above the peak of {peak:g}"
    elif limit.value < LOWEST * peak < math.inf and not noted:
        yield f"is under a tenth of the peak of {peak:g}, and no comment says why"


def better(limit):
    return limit.value / limit.measured if limit.sense == "min" else limit.measured / limit.value


def peak_of(facts, limit):
    """What the data sheet allows, in the unit of the limit; infinite where it says nothing; None for a missing fact."""
    when, hbm = limit.conditions, facts.get("hbm_terabytes_per_second")
    both = 2 if when.get("direction") == "both" else 1
    link = facts.get("nvlink_gigabytes_per_second")
    match limit.metric:
        case "gemm" | "gemm_full_clock":
            return facts.get(f"peak_tflops_{when['precision']}")
        case "memory_bandwidth":
            return hbm and 1000 * hbm
        case "pair_bandwidth" if when["link"] == "NVLink":
            return link and both * link
        case "host_bandwidth" | "pair_bandwidth":
            return both * PCIE[facts["pcie_generation"]] if "pcie_generation" in facts else math.inf
        case "busbw" | "node_group_busbw":
            ranks = when["ranks"]
            # With NVLS a GPU sends 1 + 1/n of the message instead of 2(n-1)/n, which is what busbw counts.
            return link and link * (2 * (ranks - 1) / (ranks + 1) if when.get("nvls") else 1)
        case "train_throughput" | "solo_train_throughput":
            flops = facts.get(PEAKS.get(when["recipe"], "peak_tflops_fp16"))
            wide = 2 if when["recipe"] in PEAKS else 1
            return flops and hbm and when["ranks"] * min(flops * 1e12 / FLOP, hbm * 1e12 / (wide * BYTES))
        case "decode_throughput" | "solo_decode_throughput":  # weights of 16 bits are read for each step
            weights = 2 * transformer.SHAPES[when["model"]].multiplied
            return hbm and when["ranks"] * when["batch"] * hbm * 1e12 / weights
        case "solo_token_throughput":
            flops = facts.get(f"peak_tflops_{when['recipe']}")
            return flops and flops * 1e12 / transformer.SHAPES[when["model"]].least_flop_a_token
        case _:
            return 1.0 if METRICS[limit.metric].unit == "ratio" else None


@pytest.mark.parametrize("profile", [*shipped(), shipped()[0].base], ids=lambda profile: profile.path.stem)
def test_the_shipped_limits_are_plausible(profile):
    assert lint(profile) == []


@pytest.mark.parametrize("profile", shipped(), ids=lambda profile: profile.path.stem)
def test_gpus_together_are_not_asked_for_more_than_each_alone(profile):
    together = [
        limit for limit in profile.limits if limit.metric == "train_throughput" and limit.conditions["ranks"] > 1
    ]
    for limit in together:
        conditions = {**limit.conditions, "ranks": 1}
        alone = profile.limit_for(Measurement("train_throughput", {"world": 1.0}, conditions))
        assert limit.value / limit.conditions["ranks"] < 1.05 * alone.value


# ---------------- every limit is for something that the suite measures: one that is not judges nobody
GPUS = (1, 2, 4, 8)  # of a machine
NETWORKS = (25, 50, 100, 200, 400, 800)  # Gb/s for each GPU, as nodes are sold
EVERY = (*shipped(), of_every_gpu())
LIMITED = frozenset(limit.metric for profile in EVERY for limit in profile.limits)


def stations(profile, limit):
    """Machines, or clusters of them, that could have what the limit says of hardware: how many GPUs with which fabric,
    on how many nodes with which network, and NVLS. All else that it says must come from the suite."""
    under, nvls = limit.conditions, limit.conditions.get("nvls", False)
    nodes, networks = under.get("nodes", 1), NETWORKS if "nodes" in under else (0,)
    fabrics = ("nvswitch", "nvlink") if profile.facts.get("nvlinks", 1) else ()
    if "nvlinks" not in profile.facts and profile.match:
        fabrics = ("nvlink",)  # by a bridge, where there is one
    if nvls:  # which came with the NVSwitches of Hopper
        fabrics = fabrics[:1] if board_of(profile).capability >= (9, 0) and "nvswitch" in fabrics else ()
    for gpus in GPUS:
        for fabric in fabrics if nvls else (*fabrics, "pcie"):
            for network in networks:
                wanted = {"ranks": gpus * nodes, "fabric": fabric, "network": network}
                if all(under.get(name, value) in (value, 1) for name, value in wanted.items()):
                    yield gpus, fabric, nodes, network, nvls


def board_of(profile):
    return BOARDS[next((name for name in profile.match if name in BOARDS), "NVIDIA H200")]


@cache
def measured(board, gigabytes, station, level):
    gpus, fabric, nodes, network, nvls = station
    topology = board.machine(gpus, fabric, memory_bytes=int(gigabytes * 1e9))
    found = dry_suite.measured(board, topology, nodes, nvls, level, LIMITED)
    for index, each in enumerate(found):
        if over_network(each.metric, each.conditions):  # as `judge` does
            found[index] = replace(each, conditions={"network": network, **each.conditions})
    return tuple(found)


def applies(profile, limit):
    gigabytes = profile.facts.get("memory_gigabytes", 141)
    return any(
        holds(limit, each, station[1], str(limit.conditions.get("part", "")))
        for station in stations(profile, limit)
        for level in LEVELS
        for each in measured(board_of(profile), gigabytes, station, level)
    )


@pytest.mark.parametrize("profile", EVERY, ids=lambda profile: profile.path.stem)
def test_the_suite_measures_what_every_shipped_limit_is_for(profile):
    assert [(limit.metric, dict(limit.conditions)) for limit in profile.limits if not applies(profile, limit)] == []


ONE_WINDOW = ", method = 'one window'"


@pytest.mark.parametrize(("least", "when", "problem", "measures"), [
    (600, ONE_WINDOW, "", True),
    (990, ONE_WINDOW, "above the peak of 989", True),
    (90, ONE_WINDOW, "under a tenth of the peak of 989", True),
    (600, "", "", False),  # one window, today
])  # fmt: skip
def test_a_limit_that_is_not_plausible_or_for_nothing_is_found(tmp_path, least, when, problem, measures):
    limit = runs.limit("gemm", "min", least, "TFLOP/s", f"precision = 'bf16'{when}", "project")
    mine = load(runs.written(tmp_path / "mine.toml", f'name = "mine"\nextends = "H200"\n{limit}date = "2026"'))
    assert [problem in each for each in lint(mine)] == [True] * bool(problem)
    assert applies(mine, *mine.limits) == measures


@pytest.mark.parametrize(("gpus", "nodes", "most"), [(1, 1, 6), (2, 1, 2), (8, 1, 2), (2, 2, 2), (8, 4, 2)])
def test_a_run_counts_with_no_fewer_comparisons_than_it_makes(gpus, nodes, most):
    """With an H200, which has most limits: the machine against each, and each place among peers. A floor follows from
    no spread, and no healthy place misses it by chance. Each of several nodes counts its own in its own run. Too many
    cost little: twice as many move a line by 4 %."""
    board, profile, made = BOARDS["NVIDIA H200"], for_gpu("NVIDIA H200"), 0
    topology = board.machine(gpus, "nvswitch", memory_bytes=141 << 30)
    for each in dry_suite.measured(board, topology, nodes, False, "standard", METRICS):
        finding = judge(each, profile, topology, "check", rehearsal=False, required=False, network=400.0)
        made += len(each.values) * (finding.slower_than_peers is not None) + (finding.limit is not None)
    assert made <= comparisons(suite.shipped(), "standard", gpus * nodes, nodes) <= most * made
