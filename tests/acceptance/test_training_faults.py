"""Training that goes wrong on purpose: each check of acceptance/test_7_training.py fails for its own fault."""

import json
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.probes.training.recipes import Workload, plan
from tests.acceptance import checks as checks  # which finds the checks
from tests.conftest import ACCEPTANCE

TRAINING = ACCEPTANCE / "test_7_training.py"
ALONE = f"{ACCEPTANCE / 'test_8_resnet50.py'}::test_each_gpu_alone"

# A pytest plugin that runs each check once for each fault that the environment variable FAULTS has for it.
FAULTY = """
import json
import os
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # every optimizer imports it
from torch.distributed.checkpoint import state_dict_saver
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from pytest_gpufleet.probes.training import loop
from pytest_gpufleet.world.engines import local

local.PRELOAD.append(__name__)  # each check that fails costs a world: the next finds all this imported

FAULTS = json.loads(os.environ["FAULTS"])
LOWEST, EXPONENT = (0, 0), (3, 6)  # byte and bit of a float32

def flip(tensor, bit=LOWEST):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.detach().view(-1)[:1].view(torch.uint8)[bit[0]] ^= 1 << bit[1]

def around_step(before=lambda optimizer, weight: None, after=lambda optimizer, weight: None):
    def make(genuine):
        def step(self, *args, **kwargs):
            weight = self.param_groups[0]["params"][0]
            before(self, weight)
            genuine(self, *args, **kwargs)
            after(self, weight)
        return step
    return torch.optim.SGD, "step", make

def changed_since(genuine):
    def save(state, **kwargs):
        genuine(state, **kwargs)
        flip(state["model"]["3.weight"])
    return save

ON_RANK_1 = {
    "lost gradient": (nn.Linear, "forward", lambda genuine: lambda self, x: genuine(self, 0 * x)),
    "no step": (torch.optim.SGD, "step", lambda genuine: lambda self: None),
    "weight": around_step(after=lambda optimizer, weight: flip(weight)),
    "momentum": around_step(after=lambda optimizer, weight: flip(optimizer.state[weight]["momentum_buffer"])),
    "gradient": around_step(before=lambda optimizer, weight: flip(weight.grad)),
    "shard": around_step(after=lambda optimizer, weight: hasattr(weight, "to_local") and flip(weight, EXPONENT)),
    "changed since": (state_dict_saver, "save", changed_since),
    "unseen overflow": (
        torch.amp.GradScaler, "_maybe_opt_step", lambda genuine: lambda self, optimizer, state: optimizer.step()
    ),
    "shard of rank 0": (
        DistributedSampler, "__init__",
        lambda genuine: lambda self, data, size, rank, **kwargs: genuine(self, data, size, 0, **kwargs),
    ),
    "lost samples": (DistributedSampler, "__iter__", lambda genuine: lambda self: iter([*genuine(self)][:-3])),
    "NaN": (nn.functional, "cross_entropy", lambda genuine: lambda *args: genuine(*args) * torch.nan),
}
ON_ALL = {
    "no_sync ignored": (DDP, "no_sync", lambda genuine: lambda self: nullcontext()),
    "never shuffled anew": (DistributedSampler, "set_epoch", lambda genuine: lambda self, epoch: None),
    "buffers kept": (DDP, "_sync_buffers", lambda genuine: lambda self: None),
}

def plant(rank, fault):
    if fault in ON_ALL or rank.index == 1:
        owner, name, make = {**ON_RANK_1, **ON_ALL}[fault]
        setattr(owner, name, make(getattr(owner, name)))

def pytest_generate_tests(metafunc):
    metafunc.parametrize("fault", FAULTS.get(metafunc.function.__name__, []), indirect=True)

@pytest.fixture(autouse=True)
def fault(nccl_group, request):
    nccl_group.run(plant, request.param)
"""

# Check, fault and the check's own parameter, ranks that must be named, and words of the story (by `words_of`). None:
# what one rank does wrong is in everybody's average, and any may be named.
CASES = [
    ("test_phase_1_gradients_are_averaged", "lost gradient", None, "assert"),
    ("test_gradients_accumulate_without_communication", "no_sync ignored", None, "assert"),
    ("test_unused_parameters_are_found", "lost gradient", None, "layer 1 in step 0"),
    ("test_buffers_come_from_rank_0", "buffers kept", {1, 2}, "running_mean"),
    ("test_every_rank_has_its_own_shard", "shard of rank 0-padded", None, "samples are given to no rank"),
    ("test_every_rank_has_its_own_shard", "shard of rank 0-tail dropped", None, "{share} of 1021 samples are given to"),
    ("test_every_rank_has_its_own_shard", "lost samples-padded", None, "rank 1 has {lost} samples and not {share}"),
    ("test_every_rank_has_its_own_shard", "never shuffled anew-padded", None, "rank {last}: epoch 1 has the samples"),
    ("test_phase_2_loss_falls", "no step", {1}, "mean loss by epoch"),
    ("test_phase_2_loss_falls", "NaN", None, "nan"),
    ("test_phase_3_ranks_stay_identical", "weight-every batch", {1}, "weight 0.weight: 1 of 288 bytes"),
    ("test_phase_3_ranks_stay_identical", "momentum-accumulated", {1}, "momentum 0.weight: 1 of 288 bytes"),
    ("test_phase_3_ranks_stay_identical", "gradient-accumulated", {1}, "gradient 0.weight: 1 of 288 bytes"),
    ("test_fsdp_is_exact", "weight", {1}, "own shard after step 0"),
    ("test_ddp_and_fsdp_train_as_one_gpu", "shard-torch.float32", {1}, "FSDP: own shard of 0.weight after step 0"),
    ("test_ddp_and_fsdp_train_as_one_gpu", "lost gradient-torch.bfloat16", None, "Tensor-likes are not close"),
    ("test_checkpoint_loads_on_fewer_ranks", "changed since", {0}, "loaded shard of 3.weight"),
    ("test_overflow_on_one_rank_skips_the_step_on_all", "unseen overflow-DDP", {1}, "rank 0 overflowed"),
    ("test_overflow_on_one_rank_skips_the_step_on_all", "unseen overflow-FSDP", {1}, "rank 0 overflowed"),
]


def words_of(words, ranks):
    """The words of a case among so many ranks, each of which trains on its share of 1,021 samples."""
    share = -(-1021 // ranks)
    return words.format(share=share, lost=share - 3, last=ranks - 1)


def run_with_faults(run_pytest, ranks, **environment):
    faults = defaultdict(set, {"test_each_gpu_alone": {"NaN", "no step"}})
    for check, fault, _, _ in CASES:
        faults[check].add(fault.partition("-")[0])
    environment |= {"PYTHONPATH": ".", "FAULTS": json.dumps({check: sorted(each) for check, each in faults.items()})}
    nodes = [f"{TRAINING}::{check}[{fault}]" for check, fault, _, _ in CASES]
    options = (ranks, "-p", "faulty", "--fleet-dir=runs")
    return run_pytest(*nodes, ALONE, *options, files={"faulty.py": FAULTY}, **environment)


@pytest.fixture(scope="module")
def broken(run_pytest):
    return run_with_faults(run_pytest, "--rehearse=3")  # enough for a majority


@pytest.mark.parametrize(("check", "fault", "named", "words"), CASES)
def test_every_check_fails_for_its_fault(broken, check, fault, named, words):
    message = broken.check(f"{check}[{fault}]").message
    assert words_of(words, 3) in message
    if named is not None:
        assert {int(rank) for rank in re.findall(r"rank (\d) of \d, CPU: raised", message)} == named


@pytest.mark.parametrize(("fault", "words"), [
    ("NaN", "FloatingPointError: the loss became nan"),
    ("no step", "ArithmeticError: it did not learn: loss "),  # as where all gradients are NaN
])  # fmt: skip
def test_what_learns_nothing_has_no_throughput(broken, fault, words):
    check = broken.check(f"test_each_gpu_alone[{fault}]")
    assert check.outcome == "failed"
    assert f"rank 1 of 3, CPU: raised {words}" in check.message
    assert broken.record.findings == []


# ---------------------------------------------------------------- the options of the ResNet checks
RESNET = ACCEPTANCE / "test_8_resnet50.py"
OPTIONS = ("--rehearse", "--fleet-dir=runs")


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


def test_nodes_together_are_held_against_their_own_gpus_alone(monkeypatch):
    """Nodes of one NVLink domain come before others, so that some are not the first ones."""
    check, gpus = __import__("test_nodes_8_resnet50"), [Place(node, "gpu") for node in range(3)]
    some = [SimpleNamespace(places=gpus[:1]), SimpleNamespace(places=gpus[::2]), SimpleNamespace(places=gpus)]
    rates, judged = dict(zip(gpus, (10.0, 20.0, 30.0), strict=True)), []

    def measured(world, *how, together=True, **more):
        if not together:
            return Measurement("solo_train_throughput", rates, {"ranks": 1})
        return Measurement(
            "train_throughput", {"world": sum(map(rates.get, world.places))}, {"ranks": len(world.places)}
        )

    monkeypatch.setattr(check, "doubling", lambda world: some)
    monkeypatch.setattr(check, "measure", measured)
    monkeypatch.setattr(check, "measure_all", lambda *how, **more: [measured(*how), measured(*how)])
    check.test_throughput_over_nodes(None, lambda figures, required: judged.extend(figures()))
    of_all = [value for each in judged if each.metric == "scaling_efficiency" for value in each.values.values()]
    assert of_all == [1.0] * 3


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
    figures = defaultdict(list)
    for each in (finding.measurement for finding in swept):
        figures[each.metric].append([each.conditions.get(key) for key in ("batch", "accumulated", "method", "ranks")])
    assert figures["solo_train_throughput"] == [[2, 1, None, 1], [4, 1, None, 1], [2, 2, None, 1]]
    together = [[2, 1, "ddp", 2], [4, 1, "ddp", 2], [2, 2, "ddp", 2], [4, 1, "fsdp", 2]]  # a CPU has no DataParallel
    assert figures["train_throughput"] == figures["scaling_efficiency"] == together
