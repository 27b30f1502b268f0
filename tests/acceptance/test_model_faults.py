"""A language model that is trained or decoded wrongly on purpose, and work under load: the rank that does it is named,
and what makes it slow shows."""

import pytest

from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.verdict.gaps import without_figures
from pytest_gpufleet.verdict.judgement import judge
from tests.acceptance import test_acceptance
from tests.conftest import ACCEPTANCE
from tests.machines import recorded
from tests.probes import test_compute

TRANSFORMER, UNDER_LOAD, INFERENCE, EACH_GPU = (
    ACCEPTANCE / f"test_{name}.py" for name in ("8_transformer", "6_under_load", "8_inference", "4_each_gpu")
)

FAULTY = """
import time

import torch
import torch.distributed as dist

def attention(genuine):
    def wrong(q, k, v, **how):
        result = genuine(q, k, v, **how)
        return result * 0 if q.dtype == torch.bfloat16 else result
    return wrong

def weight(genuine):
    def step(self, *args, **kwargs):
        genuine(self, *args, **kwargs)
        self.param_groups[0]["params"][0].detach().view(-1)[:1].view(torch.uint8)[0] ^= 1
    return step

def bit(times):
    def make(genuine):
        calls = iter(range(10**9))
        def linear(*args):
            result = genuine(*args)
            if next(calls) in times:
                result.view(-1).view(torch.uint8)[3] ^= 4
            return result
        return linear
    return make

def late(seconds):
    def make(genuine):
        def call(*args, **how):
            time.sleep(seconds)
            return genuine(*args, **how)
        return call
    return make

FAULTS = {
    "attention": (torch.nn.functional, "scaled_dot_product_attention", attention),
    "weight": (torch.optim.AdamW, "step", weight),
    "no step": (torch.optim.AdamW, "step", lambda genuine: lambda self: None),
    "never a step": (torch.optim.AdamW, "step", lambda genuine: lambda self: None),
    "late step": (torch.optim.AdamW, "step", late(0.2)),
    "late all_reduce": (dist, "all_reduce", late(0.02)),
    "always": (torch.nn.functional, "linear", bit(range(10**9))),
    "once": (torch.nn.functional, "linear", bit({40})),
}

def plant(rank, fault):
    if rank.index == 1 and fault:
        owner, name, make = FAULTS[fault]
        setattr(owner, name, make(getattr(owner, name)))
"""


BOTH, SOAK = f"{UNDER_LOAD}::test_both_stay_exact", f"{EACH_GPU}::test_collectives_of_the_soak_are_exact"
# By fault: the checks, what plants it, the code, and the ranks that are named.
WRONG = {
    "attention": ([f"{TRANSFORMER}::test_loss_follows_fp32"], FAULTY, "training_wrong", [1]),
    "no step": ([f"{TRANSFORMER}::test_speed"], FAULTY, "rank_raised", [1]),
    "never a step": ([f"{TRANSFORMER}::test_all_train_as_one_gpu[ddp]"], FAULTY, "training_wrong", [0, 1, 2]),
    "weight": ([f"{TRANSFORMER}::test_ranks_end_alike"], FAULTY, "replicas_differ", [1]),
    "one bit": ([BOTH], test_compute.FAULT, "matmul_nondeterministic", [1]),
    "flip": ([BOTH, SOAK], test_acceptance.FAULT, "collective_wrong", [1, 1]),
    "always": ([INFERENCE], FAULTY, "inference_wrong", [1, 1]),  # of each alone, and of all together by its logits
    "once": ([INFERENCE], FAULTY, "inference_wrong", [1, 0, 1, 2]),  # all add up what one of them had wrong
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_rank_that_is_wrong_is_named(planted, fault):
    checks, plant, code, named = WRONG[fault]
    run = planted(plant, fault, *checks, "--rehearse=3")
    found = [(each.name, place.index) for each in run.record.faults for place in each.subjects]
    assert found == [(code, index) for index in named]
    assert len({each.check for each in run.record.faults}) >= len(checks)


def test_a_late_rank_is_slower_alone(planted):
    run = planted(FAULTY, "late step", f"{TRANSFORMER}::test_speed", "--rehearse=3")
    (tokens,) = (each.measurement for each in run.record.findings if each.measurement.metric == "solo_token_throughput")
    rates = {place.index: value for place, value in tokens.values.items()}
    assert rates[1] == min(rates.values()), run.text
    assert rates[1] < 0.9 * max(rates.values())


def test_slow_all_reduces_show_in_what_all_decode(planted):
    """And nowhere in what each decodes alone."""

    def figures(fault):
        run = planted(FAULTY, fault, str(INFERENCE), "--rehearse=2")
        return {
            (each.measurement.metric, each.measurement.conditions["batch"]): max(each.measurement.values.values())
            for each in run.record.findings
        }

    healthy, slow = figures(""), figures("late all_reduce")
    assert slow["decode_throughput", 1] < 0.7 * healthy["decode_throughput", 1]
    assert slow["communication_share", 1] > 0.7  # on a busy host all_reduces are most of a healthy step too
    assert slow["solo_decode_throughput", 1] > 0.5 * healthy["solo_decode_throughput", 1]


def test_every_figure_that_a_check_is_there_for_is_left_wherever_it_runs(run_pytest):
    """Also under FSDP, and where no peak is known, as of CPU ranks or of a GPU that is newer than this version."""
    speed = "test_speed and not alone or alone and 0.6b"
    names = f"{speed} or ddp_and_fsdp or what_each_keeps"
    options = ("--rehearse=2", "--fleet-level=burnin", "--fleet-dir=runs", "-k", names)
    run = run_pytest(TRANSFORMER, UNDER_LOAD, *options)
    assert [check.outcome for check in run.record.checks.values()] == ["passed"] * 5
    assert [*without_figures(run.record)] == []


TOPOLOGY = recorded().topology  # of 4 H200
MEMORY = Measurement("memory_bandwidth", {gpu.place: 4300.0 for gpu in TOPOLOGY.gpus}, {"operation": "triad"})
# What such GPUs decode by batch, and the bytes that are read for it.
USUAL, NBYTES = {1: 621.0, 64: 16_935.0}, {1: 3_634_503_680, 64: 12_090_220_544}


def decoding(rates, batch=1):
    metric, ranks = ("solo_decode_throughput", 1) if len(rates) > 1 else ("decode_throughput", 4)
    size = {"ranks": ranks, "batch": batch, "bytes": NBYTES[batch]}
    return Measurement(metric, rates, {"model": "transformer-1.8b", "recipe": "bf16", **size, "workload": "inference"})


def of_each(batch=1, **of_gpu):
    return decoding({gpu.place: USUAL[batch] * of_gpu.get(f"gpu{gpu.index}", 1.0) for gpu in TOPOLOGY.gpus}, batch)


@pytest.mark.parametrize(("rates", "beside", "state", "slower"), [
    *((of_each(batch, gpu3=part), MEMORY, "met", []) for batch in USUAL for part in (1.0, 0.99)),
    *((of_each(batch, gpu3=0.9), MEMORY, "missed", [3]) for batch in USUAL),
    # all GPUs, whose memory is half as fast as it was measured
    (of_each(gpu0=0.5, gpu1=0.5, gpu2=0.5, gpu3=0.5), MEMORY, "missed", []),
    # all GPUs together, against one alone
    (decoding({WORLD: 900.0}), of_each(), "met", []),
    (decoding({WORLD: 500.0}), of_each(), "missed", []),
])  # fmt: skip
def test_slow_decoding_misses_its_peers_its_memory_or_one_gpu_alone(rates, beside, state, slower):
    found = judge(rates, None, TOPOLOGY, "", rehearsal=False, measured=[beside])
    assert (found.state, [place.index for place in found.slower_than_peers or ()]) == (state, slower)
