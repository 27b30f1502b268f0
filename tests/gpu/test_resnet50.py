"""ResNet training on real GPUs: what it computes, and what it leaves behind. Skipped without them."""

import os
import sys

import pytest
import torch

from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.measure import measure, measure_all
from pytest_gpufleet.probes.training import cuda_graph, loop, ways
from pytest_gpufleet.probes.training.recipes import RECIPES, Workload
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.world.call import ship_by_value
from tests.gpu.present import COUNT, needs_gpus
from tests.probes import test_training

STEPS = 150
SMALL = Workload(batch=64, warm_up=2, steps=5)
SEARCHING_SECONDS = 900

pytestmark = needs_gpus(1)


@pytest.fixture(scope="module")
def group():
    for module in (sys.modules[__name__], test_training):
        ship_by_value(module)
    run = Run(Options(gpus="all", timeout=SEARCHING_SECONDS))
    yield run.ranks.world(with_group=True)
    run.close()


@pytest.fixture(scope="module")
def usual(group):
    return group.run(test_training.few_steps, "fp32", SMALL, STEPS)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp32"])
def test_every_recipe_learns_as_fp32_does(group, usual, recipe):
    learned = group.run(test_training.few_steps, recipe, SMALL, STEPS)
    ahead = cuda_graph.WARM_UP if RECIPES[recipe].graph else 0  # steps that were done before the first one that is seen
    for (expected, _), (losses, different) in zip(usual, learned, strict=True):
        assert not different
        assert max(expected[-1], losses[-1]) < 0.2 * expected[0], (losses, expected)
        while losses[0] == losses[1]:  # gradient scaling begins too high, and skips steps until it has come down
            losses.pop(0)
        # Rounding lets trainings drift apart; at first they go the same way.
        pairs = list(zip(losses, expected[ahead:], strict=False))[:20]
        assert max(abs(ours - theirs) for ours, theirs in pairs) < 0.1 * expected[0], pairs


def test_peak_is_faster_than_amp_and_its_memory_comes_back(group):
    asked = Workload(batch=256, warm_up=10, steps=10)
    (amp,) = measure_all(group, loop.train_throughput, "amp", asked)
    before = group.run(lambda rank: torch.cuda.mem_get_info()[0])
    fast, *shares, busy = measure_all(group, loop.train_throughput, "peak", asked, closely=True)
    after = group.run(lambda rank: torch.cuda.mem_get_info()[0])
    assert fast.values[WORLD] > amp.values[WORLD]
    assert all(share.values[WORLD] < 0.2 for share in shares)  # of one GPU there is none
    assert list(busy.values) == list(group.places)
    assert all(value >= 0.9 for value in busy.values.values()), busy
    assert all(now > 0.98 * then for then, now in zip(before, after, strict=True))


def test_full_memory_is_found_without_losing_a_rank(group):
    pids = group.run(lambda rank: os.getpid())
    for (rate, _), trouble in group.run(ways.fill_memory, "tf32", seconds=10):
        assert not trouble
        assert rate.details["steps"] >= 2
    assert group.run(lambda rank: os.getpid()) == pids


def test_memory_that_does_not_come_back_shows(group):
    kept = 4 << 30

    def leak(rank):
        genuine, held = ways.largest, []

        def leaking(*args):
            held.append(torch.empty(kept, dtype=torch.uint8, device=rank.device))
            return genuine(*args)

        ways.largest = leaking
        try:
            return ways.fill_memory(rank, "tf32", seconds=1)
        finally:
            ways.largest = genuine

    assert [trouble for _, trouble in group.run(leak)] == [["memory was not returned"]] * group.size


def test_photos_feed_training(group, tmp_path):
    ways.write_photos(tmp_path, 64)
    assert measure(group, ways.fed_throughput, str(tmp_path), "amp", SMALL, workers=2).values[WORLD] > 0


@needs_gpus(2)
def test_data_parallel_uses_all_gpus(group):
    fast, *memory = measure_all(
        group.subset([0]), ways.throughput_of, ways.Way("dp", 64), "bf16", SMALL, places=group.places
    )
    assert fast.conditions["ranks"] == COUNT
    (used,) = (each.values for each in memory)
    assert set(used) == set(group.places)
    assert min(used.values()) > 0.5  # GiB
