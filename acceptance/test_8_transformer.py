"""A transformer trains right, and as fast as its peers: a small language model as Llama is built, in bf16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest

from pytest_gpufleet import (
    Fault,
    GpuTopology,
    Judge,
    Measurement,
    Size,
    World,
    expect_none,
    measure,
    measure_all,
    not_applicable,
    scaling_efficiency,
)
from pytest_gpufleet.probes.training import transformer
from pytest_gpufleet.verdict import peaks

pytestmark = [
    pytest.mark.chapter("Transformer", "Is a language model trained right, and how fast?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(capability=(8, 0)),
]

SECONDS = Size(2.5, rehearsal=0.05)
LONG_SECONDS = Size(15.0, rehearsal=0.05)


@pytest.fixture(scope="module")
def alone_again(nccl_group: World) -> Callable[[str], Measurement]:
    """alone_again(model): what each GPU reaches by itself, all at the same time, until the GPUs are warm."""
    return lambda model: measure(nccl_group, transformer.token_throughput, model=model, seconds=LONG_SECONDS)


@pytest.fixture(scope="module")
def alone(alone_again: Callable[[str], Measurement]) -> Callable[[str], Measurement]:
    """alone(model): the same, measured once, whichever check asks first."""
    return cache(alone_again)


def test_loss_follows_fp32(nccl_group: World) -> None:
    """Every GPU by itself trains a small transformer in 16 bits as it does in float32

    All train on the same data, which the model learns in 20 steps. The first gradient of each weight and the loss of
    each step must be those of float32 within what rounding makes of them. A GPU that is named alone computes wrongly,
    in attention or in products of such shapes: replace it. If all are named, torch, cuBLAS and driver do not fit
    together: try another version of torch.
    """
    nccl_group.faultless(transformer.follows_fp32, code="training_wrong")


@pytest.mark.needs(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_all_train_as_one_gpu(nccl_group: World, fleet_level: str, method: str) -> None:
    """A transformer under DDP and FSDP has the losses that one GPU has with the data of all

    Every GPU also trains on everybody's data alone, in float32, and compares. The GPU that is named when no other is
    computes or keeps something wrong. If all are named, one of them spoils everybody's gradients: the check before, and
    the exact collectives, tell which.
    """
    if method == "fsdp" and fleet_level != "burnin":
        not_applicable("fsdp is part of level burnin")
    nccl_group.faultless(transformer.trains_as_one, method, code="training_wrong")


@pytest.mark.needs(ranks=2)
def test_ranks_end_alike(nccl_group: World) -> None:
    """After 20 steps of DDP weights, gradients and moments of Adam are the same on all GPUs, bit for bit

    All apply the same update, so any difference is a wrong bit in memory, arithmetic or transfer, and the copies go on
    to drift apart. The GPU that is named differs from most: it is the suspect. With two GPUs both are named, and the
    checks of each GPU say more.
    """
    nccl_group.faultless(transformer.ends_alike, code="replicas_differ")


@pytest.mark.figures("solo_token_throughput", of_several=("token_throughput", "communication_share"))
def test_speed(nccl_group: World, judge: Judge, gpu_topology: GpuTopology) -> None:
    """Training of a transformer in bf16, by each GPU and by all together

    What GPUs are bought for today: products, attention and memory at full power. All train one model by DDP, in turns
    with steps without communication, which show what each GPU does by itself. One that is slower than its peers is hot,
    power-capped or used by somebody else: compare `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE` with the others'. MFU is
    the part of its peak that a GPU makes use of. All of them low, with products and memory as they should be: the host
    launches too slowly; see the time to launch. Where much of a step is communication, look at the bandwidth of
    all_reduce. Nobody publishes figures of this model: they are for comparison with machines of its kind.
    """
    method = "ddp" if nccl_group.size > 1 else ""
    measured = partial(measure_all, nccl_group, transformer.token_throughput, method, seconds=SECONDS)
    _judge(judge, gpu_topology, measured, measured)


@pytest.mark.level("burnin")
@pytest.mark.figures("solo_token_throughput")
@pytest.mark.parametrize("model", ["transformer-0.6b", "transformer-1.3b"])
def test_speed_of_each_gpu_alone(
    judge: Judge,
    gpu_topology: GpuTopology,
    alone: Callable[[str], Measurement],
    alone_again: Callable[[str], Measurement],
    model: str,
) -> None:
    """Training of two sizes of transformers, in bf16, on every GPU by itself, until the GPUs are warm

    Slower than its peers only here, and not in the check of speed: a GPU becomes hot.
    """
    _judge(judge, gpu_topology, lambda: [alone(model)], lambda: [alone_again(model)])


@pytest.mark.level("burnin")
@pytest.mark.needs(ranks=2)
@pytest.mark.figures("token_throughput", "solo_token_throughput", "scaling_efficiency")
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_ddp_and_fsdp(
    nccl_group: World,
    judge: Judge,
    gpu_topology: GpuTopology,
    alone: Callable[[str], Measurement],
    alone_again: Callable[[str], Measurement],
    method: str,
) -> None:
    """Training of a transformer on all GPUs by DDP and by FSDP, in bf16, and how well it scales

    For comparison with machines of its kind. FSDP gathers the weights of each layer when it is their turn, so that it
    takes less memory and communicates more: slow under FSDP alone are all_gather and reduce_scatter.
    """
    model = "transformer-0.6b"

    def scaling(each_alone: Callable[[str], Measurement]) -> list[Measurement]:
        together, *others = measure_all(nccl_group, transformer.token_throughput, method, model, seconds=LONG_SECONDS)
        single = each_alone(model)
        return [together, single, scaling_efficiency(single, together), *others]

    _judge(judge, gpu_topology, partial(scaling, alone), partial(scaling, alone_again))


Measured = Callable[[], Sequence[Measurement]]


def _judge(judge: Judge, topology: GpuTopology, first: Measured, second: Measured) -> None:
    """Throughputs, of which the MFU is shown, and which may not be more than the GPUs can compute; and what is measured
    with them."""
    tokens: list[Measurement] = []

    def with_utilization(measured: Measured) -> list[Measurement]:
        figures = measured()
        tokens[:] = [each for each in figures if each.unit == "tokens/s"]
        return [*figures, *_utilization(tokens, topology)]

    judge(*with_utilization(first), required=False, again=lambda: with_utilization(second))
    expect_none(_impossible(tokens, topology))


def _utilization(figures: Sequence[Measurement], topology: GpuTopology) -> list[Measurement]:
    return [
        mfu
        for tokens in figures
        for mfu in peaks.model_flops_utilization(tokens, _shape(tokens).flop_a_token, topology)
    ]


def _impossible(figures: Sequence[Measurement], topology: GpuTopology) -> list[Fault]:
    """MFU has a limit that no GPU gets over."""
    return [
        fault for tokens in figures for fault in peaks.above_peak(tokens, _shape(tokens).least_flop_a_token, topology)
    ]


def _shape(tokens: Measurement) -> transformer.Shape:
    return transformer.SHAPES[str(tokens.conditions["model"])]
