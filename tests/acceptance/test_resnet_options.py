"""The options of the ResNet checks, and what they may not buy."""

from pathlib import Path

import pytest
import torch

from pytest_gpufleet.model.conditions import CONDITIONS, RESNETS
from pytest_gpufleet.probes.training.recipes import MODELS, OPTIMIZERS, Workload, plan

RESNET = Path(__file__).parents[2] / "acceptance" / "test_8_resnet50.py"
OPTIONS = ("--rehearse", "--fleet-dir=runs")


def test_what_may_be_asked_is_what_can_be_done():
    assert tuple(MODELS) == RESNETS
    assert CONDITIONS["optimizer"].values == tuple(OPTIMIZERS)


def test_options_reach_the_ranks_and_stand_beside_the_figure(run_pytest):
    asked = ["--resnet-batch=4", "--resnet-steps=3", "--resnet-warm-up=1", "--resnet-optimizer=adamw"]
    checks = (f"{RESNET}::{name}" for name in ("test_each_gpu_alone", "test_training_fed_by_a_data_loader"))
    run = run_pytest(*checks, *OPTIONS, "--fleet-level=burnin", "--resnet-workers=1", *asked)
    alone, fed = (finding.measurement for finding in run.record.findings)
    of_options = {"batch": 4, "optimizer": "adamw", "workload": "custom"}
    conditions = {"model": "resnet10", "recipe": "amp", "image": 32, **of_options}
    assert dict(alone.conditions) == {**conditions, "ranks": 1}
    assert dict(fed.conditions) == {**conditions, "ranks": 2}
    assert fed.details["workers"] == "1 a GPU"


@pytest.mark.parametrize("other", [{"batch": 512}, {"steps": 1}, {"warm_up": 3}, {"optimizer": "adam"}])
def test_other_work_than_the_usual_says_so_and_no_limit_of_that_is_meant_for_it(other):
    """tests/verdict/test_profile.py shows that a limit has to name it."""
    usual, custom = (plan("amp", Workload(**how), torch.device("cpu")).conditions(8) for how in ({}, other))
    assert ("workload" in usual, custom["workload"]) == (False, "custom")


def test_thorough_checks_are_rehearsed_and_the_sweep_is_for_information(run_pytest):
    thorough = run_pytest(RESNET, *OPTIONS, "--fleet-level=burnin", "-k", "peak or sweep or full_memory")
    assert thorough.outcomes == {
        "test_peak_throughput_and_scaling": "passed",
        "test_training_sweep": "passed",
        "test_training_in_full_memory": "not applicable",
    }, thorough.text
    swept = [each for each in thorough.record.findings if each.measurement.conditions.get("workload")]
    assert {each.measurement.conditions["workload"] for each in swept} == {"sweep"}
    assert not any(each.required for each in swept)
    figures = [(each.measurement.metric, each.measurement.conditions) for each in swept]
    alone, together, efficiency = (
        [
            (each["batch"], each["accumulated"], each.get("method"), each["ranks"])
            for name, each in figures
            if name == metric
        ]
        for metric in ("solo_train_throughput", "train_throughput", "scaling_efficiency")
    )
    assert alone == [(2, 1, None, 1), (4, 1, None, 1), (2, 2, None, 1)]
    # A CPU has no DataParallel.
    assert together == [(2, 1, "ddp", 2), (4, 1, "ddp", 2), (2, 2, "ddp", 2), (4, 1, "fsdp", 2)] == efficiency
