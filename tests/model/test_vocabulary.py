"""The words of profiles are the words of the probes: a limit that nothing is measured under would be a silent hole."""

from typing import get_args

import pytest
import torch

from pytest_gpufleet.model import conditions as words
from pytest_gpufleet.model.conditions import CONDITIONS, METHODS
from pytest_gpufleet.model.metric import BETWEEN_NODES, EXTRAORDINARY, MEASURED_UNDER, METRICS
from pytest_gpufleet.probes.collectives import table
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.links import host_copies, pairs
from pytest_gpufleet.probes.training import recipes, transformer
from pytest_gpufleet.verdict.profile import shipped
from tests.conftest import INNER

# What a burn-in measures, what only GPUs have, and what takes several nodes.
NOT_HERE = {
    "burn_power", "burn_retention", "train_memory", "soak_temperature", "soak_excess", "soak_clock", "soak_power",
    "step_power", "power_swing", "step_skew", "step_retention",
    "node_group_busbw", "rail_bandwidth", "port_events", "nic_bandwidth", "drive_bandwidth", "drive_iops",
    "model_flops_utilization", "corruption_bound",
}  # fmt: skip
BEFORE = {"burn_peak_power"}  # that this version measures no more
NOT_TIMED = {"transformer-check", transformer.REHEARSAL}
REHEARSED_MODELS = (recipes.REHEARSAL_MODEL, transformer.REHEARSAL)
# Nobody's limit depends on these.
FREE = {"image", "sequence", "accumulated"}


@pytest.fixture(scope="module")
def measured(fleet):
    """The conditions that each metric was measured under, from the evidence of a rehearsal."""
    run = fleet(INNER / "every_probe.py")
    assert run.outcomes == {"test_everything": "passed"}, run.text
    conditions = {}
    for finding in run.record.findings:
        conditions.setdefault(finding.measurement.metric, []).append(finding.measurement.conditions)
    return conditions


def test_every_metric_with_limits_is_measured_here(measured):
    assert measured.keys() | NOT_HERE | BEFORE == MEASURED_UNDER.keys()


@pytest.mark.parametrize("metric", sorted(MEASURED_UNDER.keys() - NOT_HERE - BEFORE))
def test_metrics_are_measured_under_the_conditions_that_limits_may_name(measured, metric):
    always = set.intersection(*(set(conditions) for conditions in measured[metric]))
    ever = set.union(*(set(conditions) for conditions in measured[metric]))
    of_machine, elsewhere = {"fabric", "links", "part"}, {*EXTRAORDINARY, *BETWEEN_NODES, "work"}
    assert always - FREE - {*EXTRAORDINARY} == set(MEASURED_UNDER[metric]) - elsewhere - of_machine
    assert ever - FREE <= set(MEASURED_UNDER[metric])


def test_training_out_of_the_ordinary_says_so(measured):
    seen = set.union(*(set(conditions) for conditions in measured["train_throughput"]))
    assert {*EXTRAORDINARY} - {*BETWEEN_NODES} <= seen
    assert not any(set(EXTRAORDINARY) & set(conditions) for conditions in measured["solo_train_throughput"])


def test_conditions_have_the_values_that_the_vocabulary_knows(measured):
    for every in measured.values():
        for conditions in every:
            for key, value in conditions.items():
                expected = CONDITIONS[key].values
                if isinstance(expected, tuple):
                    assert value in expected or (key, value) in (("model", each) for each in REHEARSED_MODELS)
                elif expected is not None:
                    assert type(value) is expected


@pytest.mark.parametrize(
    ("condition", "values"),
    [
        ("collective", table.COLLECTIVES),
        ("precision", rate.PRECISIONS),
        ("recipe", {*recipes.RECIPES, *transformer.PRECISIONS}),
        ("model", {*recipes.MODELS, *transformer.SHAPES.keys() - NOT_TIMED}),
        ("optimizer", recipes.OPTIMIZERS),
        (
            "method",
            {*METHODS, "replayed", "eager", "ib_write_bw", "nccl", "nccl at once", words.EACH_ALONE, words.NO_SYNC}
            | {words.ONE_WINDOW, words.WARMED_THROUGH, words.LINED_UP, words.SHARED_SPAN},
        ),
        (
            "direction",
            {*host_copies.WAYS, *get_args(pairs.PairDirection)}
            | {f"{way} both ways" for way in (*host_copies.ONE_WAY, "write")},
        ),
    ],
)
def test_the_vocabulary_has_the_words_of_the_probes(condition, values):
    assert set(CONDITIONS[condition].values) == set(values)


def test_every_word_is_used():
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in CONDITIONS["dtype"].values)
    assert {key for under in MEASURED_UNDER.values() for key in under} == {
        key for key, condition in CONDITIONS.items() if condition.values is not None
    }
    assert MEASURED_UNDER.keys() == METRICS.keys() - {"spread"}  # the limit of which is the suite's own


def test_a_shipped_limit_depends_on_nothing_out_of_the_ordinary():
    for profile in shipped():
        assert not any(limit.conditions.keys() & {"optimizer", "workload", "work"} for limit in profile.limits)
        assert not any(limit.conditions.get("method") in METHODS for limit in profile.limits)
