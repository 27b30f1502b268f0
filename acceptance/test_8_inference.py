"""A language model is decoded right, and as fast as memory and small all_reduces allow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_gpufleet import Judge, Measurement, World, expect_none
from pytest_gpufleet.probes.inference import decode
from pytest_gpufleet.probes.measure import together

pytestmark = [
    pytest.mark.chapter("Inference", "Is a language model decoded right, and how fast?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(capability=(8, 0)),
]


@pytest.mark.figures("solo_decode_throughput", required=("solo_decode_throughput",))
def test_decoding_of_each_gpu_alone(nccl_group: World, judge: Judge) -> None:
    """Inference: decoding of a language model on each GPU alone

    Each GPU decodes tokens after a context, for one sequence and for 64. All GPUs of one model must decode the same
    tokens, each time: a GPU that does not computes or keeps something wrong, replace it. For one sequence all weights
    are read for each token, so a GPU that is slower than its peers has slow memory or low clocks: see memory bandwidth,
    and `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE`.
    """
    _decode(nccl_group, judge, of_all=False)


@pytest.mark.needs(ranks=2)
@pytest.mark.figures("decode_throughput", "communication_share", required=("decode_throughput",))
def test_decoding_by_all_gpus(nccl_group: World, judge: Judge) -> None:
    """Inference: decoding of a language model by all GPUs, tensor parallel

    Every GPU has a part of each layer, and two small all_reduces a layer add up the parts. All must decode the same
    tokens, each time. If one GPU is named, replace it; if all are, one of them computed its part wrongly, or the sum is
    wrong: see each GPU alone and the exactness of collectives. Slow, with a large share of all_reduces: see their
    latency, and whether NCCL uses P2P. Slow, with a small share: see each GPU alone.
    """
    _decode(nccl_group, judge, of_all=True)


def _decode(world: World, judge: Judge, of_all: bool) -> None:
    def measured() -> Sequence[Measurement]:
        readings, troubles = zip(*world.run(decode, of_all), strict=True)
        expect_none(world.faults("inference_wrong", troubles))
        return together(world, readings)

    found = measured()
    shares = [each for each in found if each.metric == "communication_share"]
    rates = [each for each in found if each not in shares]
    judge(*rates, shown=shares, again=measured)
