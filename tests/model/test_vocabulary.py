"""The words of profiles are the words of the probes: a limit that nothing is measured under would be a silent hole."""

import math
import os
from collections import defaultdict
from typing import get_args

import pytest
import torch

from pytest_gpufleet.model import codec, conditions as words, metric as metrics
from pytest_gpufleet.model.conditions import CONDITIONS, METHODS
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import METRICS, GpuState, KiB, Measurement
from pytest_gpufleet.probes import memory
from pytest_gpufleet.probes.collectives import table
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.links import copies
from pytest_gpufleet.probes.training import recipes, transformer
from pytest_gpufleet.verdict.profile import shipped
from pytest_gpufleet.world.world import World
from tests import dry_suite
from tests.boards import H200

# What a burn-in measures, and what the host does without ranks.
NOT_HERE = {"burn_power", "burn_retention", "port_events", "nic_bandwidth", "drive_bandwidth", "drive_iops"}
NOT_HERE |= {"rdma_bandwidth", "rdma_latency"}
BEFORE = {"burn_peak_power"}  # that this version measures no more
# Nobody's limit depends on these.
FREE = {"image", "sequence", "accumulated"}


def of_suite(nodes, fabric, level="burnin", without=("test_burn_in", "test_burn_in_of_all_nodes")):
    machine = H200.machine(4, fabric, memory_bytes=141 << 30)
    return dry_suite.measured(H200, machine, nodes, False, level, METRICS, without=without)


@pytest.fixture(scope="module")
def measured():
    """The conditions that each metric is measured under, by the suite on GPUs that are not here."""
    found = [*of_suite(1, "nvswitch"), *of_suite(1, "pcie"), *of_suite(2, "nvswitch")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.tools, "short_of", lambda *_: "")
        patch.setattr(memory, "by_numa_node", lambda: {0: sorted(os.sched_getaffinity(0))})
        found += memory.host_memory_bandwidth(World(dry_suite.DryPool(H200.machine(1), 1), with_group=True), KiB, 0.0)
    conditions = defaultdict(list)
    for each in found:
        conditions[each.metric].append(each.conditions)
    return conditions


def test_every_metric_with_limits_is_measured_here_and_every_word_is_used(measured):
    assert measured.keys() | NOT_HERE | BEFORE == metrics.MEASURED_UNDER.keys()
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in CONDITIONS["dtype"].values)
    assert {key for under in metrics.MEASURED_UNDER.values() for key in under} == {
        key for key, condition in CONDITIONS.items() if condition.values is not None
    }
    assert metrics.MEASURED_UNDER.keys() == METRICS.keys() - {"spread"}  # the limit of which is the suite's own


@pytest.mark.parametrize("metric", sorted(metrics.MEASURED_UNDER.keys() - NOT_HERE - BEFORE))
def test_metrics_are_measured_under_the_conditions_that_limits_may_name(measured, metric):
    always = set.intersection(*(set(conditions) for conditions in measured[metric]))
    ever = set.union(*(set(conditions) for conditions in measured[metric]))
    of_machine, elsewhere = {"fabric", "links", "part"}, {*metrics.EXTRAORDINARY, *metrics.BETWEEN_NODES, "work"}
    assert always - FREE - elsewhere == set(metrics.MEASURED_UNDER[metric]) - elsewhere - of_machine
    assert ever - FREE <= set(metrics.MEASURED_UNDER[metric])


def test_training_out_of_the_ordinary_says_so(measured):
    seen = set.union(*(set(conditions) for conditions in measured["train_throughput"]))
    assert {*metrics.EXTRAORDINARY} - {"optimizer"} <= seen  # of which tests/acceptance/test_training_faults.py has one
    usual = of_suite(1, "nvswitch", "standard", dry_suite.FOR_INFORMATION)
    alone = [each.conditions for each in usual if each.metric == "solo_train_throughput"]
    assert len(alone) > 1
    assert not any(set(metrics.EXTRAORDINARY) & set(conditions) for conditions in alone)


def test_conditions_have_the_values_that_the_vocabulary_knows(measured):
    for every in measured.values():
        for conditions in every:
            for key, value in conditions.items():
                expected = CONDITIONS[key].values
                if isinstance(expected, tuple):
                    assert value in expected
                elif expected is not None:
                    assert type(value) is expected


@pytest.mark.parametrize(("condition", "values"), [
    ("collective", table.COLLECTIVES),
    ("precision", rate.PRECISIONS),
    ("recipe", {*recipes.RECIPES, *transformer.PRECISIONS}),
    ("model", {*recipes.MODELS, *transformer.SHAPES.keys() - {"transformer-check", transformer.REHEARSAL}}),
    ("optimizer", recipes.OPTIMIZERS),
    (
        "method",
        {*METHODS, "replayed", "eager", "ib_write_bw", "nccl", "nccl at once", words.EACH_ALONE, words.NO_SYNC}
        | {words.ONE_WINDOW, words.WARMED_THROUGH, words.LINED_UP, words.SHARED_SPAN},
    ),
    (
        "direction",
        {*copies.WAYS, *get_args(copies.PairDirection)}
        | {f"{way} both ways" for way in (*copies.ONE_WAY, "write")},
    ),
])  # fmt: skip
def test_the_vocabulary_has_the_words_of_the_probes(condition, values):
    assert set(CONDITIONS[condition].values) == set(values)


def test_a_shipped_limit_depends_on_nothing_out_of_the_ordinary():
    for profile in shipped():
        assert not any(limit.conditions.keys() & {"optimizer", "work"} for limit in profile.limits)
        assert not any(limit.conditions.get("method") in METHODS for limit in profile.limits)


# ---------------- what a GPU was like meanwhile stands beside a figure, in evidence too
WARM = GpuState(temperature_c=61.5, sm_clock_mhz=1410.0)


def evidence_of(measurement):
    return codec.plain(Finding("a check", measurement, "for information"))


def test_it_stands_in_evidence_but_for_that_of_before_and_one_that_is_no_number_is_not_read():
    measured = Measurement("gemm", {"gpu0": 690.0, "gpu1": 680.0}, {}, gpu_states={"gpu1": WARM})
    written = evidence_of(measured)
    assert codec.typed(written, Finding).measurement == measured
    del written["measurement"]["gpu_states"]
    assert codec.typed(written, Finding).measurement.gpu_states == {}
    written = evidence_of(Measurement("gemm", {"gpu0": 690.0}, {}, gpu_states={"gpu0": WARM}))
    for value in ("hot", math.inf):
        written["measurement"]["gpu_states"]["gpu0"]["temperature_c"] = value
        with pytest.raises(ValueError, match="temperature_c"):
            codec.typed(written, Finding)


@pytest.mark.parametrize("wrong", [61.5, {"temperature_c": 61.5}, None])
def test_it_is_a_gpu_state_and_nothing_else(wrong):
    with pytest.raises(TypeError, match="GpuState"):
        Measurement("gemm", {"gpu0": 690.0}, {}, gpu_states={"gpu0": wrong})


# Made of other figures, of the state itself, or of how much was compared.
DERIVED = {
    "corruption_bound", "collective_corruption_bound", "scaling_efficiency", "model_flops_utilization",
    "soak_temperature", "soak_excess", "soak_clock", "soak_power",
}  # fmt: skip


def test_it_stands_beside_every_figure_that_gpus_give_at_level_standard():
    machine = H200.machine(4, "pcie", memory_bytes=141 << 30)
    measured = dry_suite.measured(H200, machine, 1, False, "standard", METRICS)
    assert {each.metric for each in measured if len(each.gpu_states) < len(each.values)} == DERIVED
    assert {"pair_bandwidth", "ring_bandwidth", "host_bandwidth", "busbw"} <= {each.metric for each in measured}
