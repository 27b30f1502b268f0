"""The words of profiles are the words of the probes: a limit that nothing is measured under would be a silent hole."""

from typing import get_args

import pytest
import torch

from pytest_gpufleet.model.conditions import CONDITIONS
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.vocabulary import EXTRAORDINARY, MEASURED_UNDER
from pytest_gpufleet.probes.collectives import table
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.links import host_copies, pairs
from pytest_gpufleet.probes.training import method_comparison, recipes
from pytest_gpufleet.verdict.profiles.profile import shipped

# Every probe that makes figures for limits, as the suite calls it, and training out of the ordinary.
MODULE = """
from pytest_gpufleet import MiB, bus_bandwidth, measure, measure_all, scaling_efficiency
from pytest_gpufleet.probes.collectives import speed
from pytest_gpufleet.probes.training import method_comparison, loop
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.links import host_copies, pairs
from pytest_gpufleet.probes.memory.bandwidth import memory_bandwidth
from pytest_gpufleet.probes.training.loader import fed_throughput, write_photos
from pytest_gpufleet.probes.training.recipes import Workload


def test_everything(nccl_group, world, judge, gpu_topology, tmp_path):
    write_photos(tmp_path, 4)
    one, (every, share) = (
        measure(nccl_group.subset([0]), loop.train_throughput, "fp32"),
        measure_all(nccl_group, loop.train_throughput, "fp32", communication=True),
    )
    copied = [
        host_copies.host_bandwidth(world, "both", "all", MiB),
        pairs.pair_bandwidth(world, gpu_topology, "read", MiB),
        pairs.pair_latency(world, gpu_topology),
    ]
    judge(
        measure(nccl_group, bus_bandwidth, "all_reduce", 1024),
        measure(nccl_group, speed.collective_latency, "all_reduce", 1024),
        measure_all(world, rate.product_rate, "fp32")[0],
        *measure_all(world, memory_bandwidth),
        *(measurement for each in copied for measurement in each.measurements),
        one,
        every,
        share,
        scaling_efficiency(one, every),
        measure(nccl_group, loop.train_throughput, "fp32", together=False),
        measure(nccl_group, loop.train_throughput, "fp32", Workload(optimizer="adam")),
        measure(nccl_group, method_comparison.throughput_by, "ddp", "fp32", places=nccl_group.places),
        measure(nccl_group, fed_throughput, str(tmp_path), "fp32"),
        required=False,
    )
"""
# What a burn-in measures, and what only GPUs have.
NOT_HERE = {"burn_peak_power", "burn_retention", "train_memory"}
# Nobody's limit depends on these.
FREE = {"image"}


@pytest.fixture(scope="module")
def measured(fleet_here):
    """The conditions that each metric was measured under, from the evidence of a rehearsal."""
    run = fleet_here(MODULE)
    assert run.outcomes == {"test_everything": "passed"}, run.text
    conditions = {}
    for finding in run.record.findings:
        conditions.setdefault(finding.measurement.metric, []).append(finding.measurement.conditions)
    return conditions


def test_every_metric_with_limits_is_measured_here(measured):
    assert measured.keys() | NOT_HERE == MEASURED_UNDER.keys()


@pytest.mark.parametrize("metric", sorted(MEASURED_UNDER.keys() - NOT_HERE))
def test_metrics_are_measured_under_the_conditions_that_limits_may_name(measured, metric):
    always = set.intersection(*(set(conditions) for conditions in measured[metric]))
    ever = set.union(*(set(conditions) for conditions in measured[metric]))
    assert always - FREE == set(MEASURED_UNDER[metric]) - {*EXTRAORDINARY, "work", "fabric"}  # that is the machine's
    assert ever - FREE <= set(MEASURED_UNDER[metric])


def test_training_out_of_the_ordinary_says_so(measured):
    seen = set.union(*(set(conditions) for conditions in measured["train_throughput"]))
    assert set(EXTRAORDINARY) <= seen
    assert not any(set(EXTRAORDINARY) & set(conditions) for conditions in measured["solo_train_throughput"])


def test_conditions_have_the_values_that_the_vocabulary_knows(measured):
    for every in measured.values():
        for conditions in every:
            for key, value in conditions.items():
                expected = CONDITIONS[key].values
                if isinstance(expected, tuple):
                    assert value in expected or (key, value) == ("model", recipes.REHEARSAL_MODEL)
                elif expected is not None:
                    assert type(value) is expected


@pytest.mark.parametrize(
    ("condition", "values"),
    [
        ("collective", table.COLLECTIVES),
        ("precision", rate.PRECISIONS),
        ("recipe", recipes.RECIPES),
        ("model", recipes.MODELS),
        ("optimizer", recipes.OPTIMIZERS),
        ("method", method_comparison.METHODS),
        ("direction", {*host_copies.WAYS, *get_args(pairs.PairDirection)}),
    ],
)
def test_the_vocabulary_has_the_words_of_the_probes(condition, values):
    assert set(CONDITIONS[condition].values) == set(values)


def test_types_are_torchs():
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in CONDITIONS["dtype"].values)


def test_every_word_is_used():
    assert {key for under in MEASURED_UNDER.values() for key in under} == {
        key for key, condition in CONDITIONS.items() if condition.values is not None
    }
    assert MEASURED_UNDER.keys() == METRICS.keys() - {"spread"}  # the limit of which is the suite's own


def test_a_shipped_limit_depends_on_nothing_out_of_the_ordinary():
    for profile in shipped():
        assert not any(limit.conditions.keys() & {*EXTRAORDINARY, "work"} for limit in profile.limits)
