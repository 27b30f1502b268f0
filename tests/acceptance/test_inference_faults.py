"""Inference that goes wrong on purpose: the rank that does it is named, and what makes it slow shows."""

import pytest

from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.verdict.judgement import judge
from tests.conftest import ACCEPTANCE
from tests.machines import recorded

CHECKS = ACCEPTANCE / "test_8_inference.py"
ALONE, TOGETHER = "test_decoding_of_each_gpu_alone", "test_decoding_by_all_gpus"

FAULTY = """
import time

import torch
import torch.distributed as dist


TIMES = {"always": range(10**9), "once": {40}}


def bit(genuine, times):
    calls = iter(range(10**9))
    def linear(*args):
        result = genuine(*args)
        if next(calls) in times:
            result.view(-1).view(torch.uint8)[3] ^= 4
        return result
    return linear


def late(genuine):
    def all_reduce(*args, **how):
        time.sleep(0.005)
        return genuine(*args, **how)
    return all_reduce


def plant(rank, fault):
    if rank.index == 1 and fault == "late":
        dist.all_reduce = late(dist.all_reduce)
    elif rank.index == 1 and fault in TIMES:
        torch.nn.functional.linear = bit(torch.nn.functional.linear, TIMES[fault])
"""


@pytest.mark.parametrize(("check", "fault", "named"), [
    (ALONE, "always", [1]),
    (ALONE, "once", [1]),
    (TOGETHER, "always", [1]),  # by its logits
    (TOGETHER, "once", [0, 1, 2]),  # all add up what one of them had wrong
])  # fmt: skip
def test_a_wrong_bit_is_found(planted, check, fault, named):
    run = planted(FAULTY, fault, f"{CHECKS}::{check}", "--rehearse=3")
    assert {each.name for each in run.record.faults} == {"inference_wrong"}
    assert [place.index for each in run.record.faults for place in each.subjects] == named


def test_slow_all_reduces_show_in_what_all_decode(planted):
    """And nowhere in what each decodes alone."""

    def figures(fault):
        run = planted(FAULTY, fault, str(CHECKS), "--rehearse=2")
        return {
            (each.measurement.metric, each.measurement.conditions["batch"]): min(each.measurement.values.values())
            for each in run.record.findings
        }

    healthy, slow = figures("none"), figures("late")
    assert slow["decode_throughput", 1] < 0.7 * healthy["decode_throughput", 1]
    assert slow["communication_share", 1] > healthy["communication_share", 1]
    assert slow["solo_decode_throughput", 1] > 0.5 * healthy["solo_decode_throughput", 1]


MEMORY = 4300.0
TOPOLOGY = recorded().topology  # of 4 H200


def decoding(rates, batch=1):
    metric = "solo_decode_throughput" if len(rates) > 1 else "decode_throughput"
    ranks, nbytes = 1 if len(rates) > 1 else 4, {1: 3_634_503_680, 64: 12_090_220_544}[batch]
    size = {"ranks": ranks, "batch": batch, "bytes": nbytes}
    return Measurement(metric, rates, {"model": "transformer-1.8b", "recipe": "bf16", **size, "workload": "inference"})


@pytest.mark.parametrize(("batch", "usual"), [(1, 621.0), (64, 16_935.0)])  # of an H200
@pytest.mark.parametrize(("slow", "state"), [(1.0, "met"), (0.99, "met"), (0.9, "missed")])
def test_a_gpu_that_decodes_slower_than_its_peers(batch, usual, slow, state):
    memory = Measurement("memory_bandwidth", {gpu.place: MEMORY for gpu in TOPOLOGY.gpus}, {"operation": "triad"})
    rates = {gpu.place: usual * (slow if gpu.index == 3 else 1.0) for gpu in TOPOLOGY.gpus}
    found = judge(decoding(rates, batch), None, TOPOLOGY, "", rehearsal=False, measured=[memory])
    assert found.state == state
    assert [place.index for place in found.slower_than_peers or ()] == ([3] if state == "missed" else [])


@pytest.mark.parametrize(("part", "state"), [(1.0, "met"), (0.5, "missed")])
def test_all_gpus_whose_memory_is_half_as_fast_as_it_was_measured(part, state):
    memory = Measurement("memory_bandwidth", {gpu.place: MEMORY for gpu in TOPOLOGY.gpus}, {"operation": "triad"})
    rates = {gpu.place: 621.0 * part for gpu in TOPOLOGY.gpus}
    assert judge(decoding(rates), None, TOPOLOGY, "", rehearsal=False, measured=[memory]).state == state


@pytest.mark.parametrize(("rate", "state"), [(900.0, "met"), (500.0, "missed")])
def test_all_gpus_together_are_held_against_one_alone(rate, state):
    alone = decoding({gpu.place: 621.0 for gpu in TOPOLOGY.gpus})
    found = judge(decoding({WORLD: rate}), None, TOPOLOGY, "", rehearsal=False, measured=[alone])
    assert found.state == state
