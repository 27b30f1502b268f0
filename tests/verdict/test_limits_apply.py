"""Every limit of every shipped profile is for something that the suite measures: one that is not judges nobody."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from pytest_gpufleet.model import suite
from pytest_gpufleet.model.finding import Limit
from pytest_gpufleet.model.levels import LEVELS
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import METRICS, over_network
from pytest_gpufleet.verdict.judgement import comparisons, judge
from pytest_gpufleet.verdict.profile import Profile, for_gpu, holds, load, of_every_gpu, shipped
from tests import dry_suite
from tests.boards import BOARDS, Board

GPUS = (1, 2, 4, 8)  # of a machine
NETWORKS = (25, 50, 100, 200, 400, 800)  # Gb/s for each GPU, as nodes are sold
EVERY = (*shipped(), of_every_gpu())
LIMITED = frozenset(limit.metric for profile in EVERY for limit in profile.limits)
Station = tuple[int, str, int, int, bool]


def stations(profile: Profile, limit: Limit) -> Iterator[Station]:
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


def board_of(profile: Profile) -> Board:
    return BOARDS[next((name for name in profile.match if name in BOARDS), "NVIDIA H200")]


@cache
def measured(board: Board, gigabytes: float, station: Station, level: str) -> tuple[Measurement, ...]:
    gpus, fabric, nodes, network, nvls = station
    topology = board.machine(gpus, fabric, memory_bytes=int(gigabytes * 1e9))
    found = dry_suite.measured(board, topology, nodes, nvls, level, LIMITED)
    for index, each in enumerate(found):
        if over_network(each.metric, each.conditions):  # as `judge` does
            found[index] = replace(each, conditions={"network": network, **each.conditions})
    return tuple(found)


def applies(profile: Profile, limit: Limit) -> bool:
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


ALL_REDUCE = "collective = 'all_reduce', dtype = 'float32'"
OVER_NODES = f"{ALL_REDUCE}, bytes = '8 GiB', ranks = 16"


@pytest.mark.parametrize(
    ("metric", "when", "measures"),
    [
        ("gemm", "precision = 'bf16'", False),  # one window, today
        ("gemm", "precision = 'bf16', method = 'one window'", True),
        ("scaling_efficiency", "ranks = 8", False),
        ("busbw", f"{ALL_REDUCE}, bytes = '12 GiB', ranks = 8", False),
        ("busbw", f"{ALL_REDUCE}, bytes = '16 GiB', ranks = 8", True),  # in a burn-in
        ("busbw", "collective = 'all_gather', bytes = '8 GiB', ranks = 8, in_place = true", False),
        ("busbw", f"{ALL_REDUCE}, bytes = '8 GiB', ranks = 8, nvls = true, fabric = 'nvlink'", False),
        ("busbw", f"{ALL_REDUCE}, bytes = '32 KiB', ranks = 8", False),  # from a graph
        ("busbw", f"{OVER_NODES}, nodes = 2, network = 400, nvls = false", True),
        ("busbw", f"{OVER_NODES}, nodes = 2, network = 300", False),
        ("node_group_busbw", f"{ALL_REDUCE}, bytes = '1 GiB', ranks = 16, nodes = 2", False),
        ("train_throughput", "recipe = 'amp', ranks = 8, batch = 1024", True),
        ("train_throughput", "recipe = 'amp', ranks = 8, optimizer = 'adam'", False),
        ("pair_bandwidth", "direction = 'read', link = 'PHB', fabric = 'nvswitch'", False),
    ],
)
def test_a_limit_of_what_the_suite_never_measures_is_found(tmp_path, metric, when, measures):
    unit, path = METRICS[metric].unit, tmp_path / "mine.toml"
    limit = f"metric = '{metric}'\nmin = 0.9\nunit = '{unit}'\ngrade = 'project'\nsource = 'me'\nwhen = {{ {when} }}"
    path.write_text(f"name = 'mine'\nextends = 'H200'\n[[limit]]\n{limit}\n", encoding="utf-8")
    mine = load(path)
    assert applies(mine, *mine.limits) == measures


@pytest.mark.parametrize(("gpus", "nodes", "most"), [(1, 1, 6), (2, 1, 2), (8, 1, 2), (2, 2, 2)])
def test_a_run_counts_with_no_fewer_comparisons_than_it_makes(gpus, nodes, most):
    """With an H200, which has most limits: the machine against each, and each place among peers. A floor follows from
    no spread, and no healthy place misses it by chance. Those of nodes are beside those of each node's own run. Too
    many cost little: twice as many move a line by 4 %."""
    board, profile, made = BOARDS["NVIDIA H200"], for_gpu("NVIDIA H200"), 0
    topology = board.machine(gpus, "nvswitch", memory_bytes=141 << 30)
    for on in {1, nodes}:
        for each in dry_suite.measured(board, topology, on, False, "standard", METRICS):
            finding = judge(each, profile, topology, "check", rehearsal=False, required=False, network=400.0)
            made += len(each.values) * (finding.slower_than_peers is not None) + (finding.limit is not None)
    counted = comparisons(suite.shipped(), "standard", gpus, nodes)
    assert made <= counted <= most * made
