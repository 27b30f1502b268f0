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
    Profile,
    Size,
    World,
    expect_none,
    measure,
    measure_all,
    not_applicable,
    scaling_efficiency,
)
from pytest_gpufleet.probes.training import transformer
from pytest_gpufleet.verdict import physical_limits

pytestmark = [
    pytest.mark.chapter("Transformer", "Is a language model trained right, and how fast?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(capability=(8, 0)),
]

WithUtilization = Callable[[Sequence[Measurement]], tuple[list[Measurement], list[Fault]]]

SECONDS = Size(2.5, rehearsal=0.05)
LONG_SECONDS = Size(15.0, rehearsal=0.05)


@pytest.fixture(scope="module")
def alone(nccl_group: World) -> Callable[..., Measurement]:
    """alone(model): what each GPU reaches by itself, all at the same time, until the GPUs are warm. Measured once,
    whichever check asks first, and another time by alone(model, again=True)."""
    measured = partial(measure, nccl_group, transformer.token_throughput, "", seconds=LONG_SECONDS)
    first = cache(measured)
    return lambda model, again=False: measured(model) if again else first(model)


@pytest.fixture
def with_utilization(gpu_topology: GpuTopology, gpu_profile: Profile | None) -> WithUtilization:
    """with_utilization(figures): with the MFU of throughputs; and those that are above what the GPUs can compute."""
    data_sheet = gpu_profile.facts.get("peak_tflops_bf16", 0.0) if gpu_profile else 0.0

    def of(figures: Sequence[Measurement]) -> tuple[list[Measurement], list[Fault]]:
        found, impossible = [*figures], list[Fault]()
        for tokens in (each for each in figures if each.unit == "tokens/s"):
            shape = transformer.SHAPES[str(tokens.conditions["model"])]
            found += physical_limits.model_flops_utilization(tokens, shape.flop_a_token, gpu_topology, data_sheet)
            impossible += physical_limits.above_peak(tokens, shape.least_flop_a_token, gpu_topology)
        return found, impossible

    return of


def test_loss_follows_fp32(nccl_group: World) -> None:
    """Transformer training in bf16 follows fp32

    Each GPU trains a small transformer alone, in bf16 and in float32, on the same data. The first gradients and the
    loss of each step must agree within rounding. If one GPU is named, it computes attention or matmuls wrongly: replace
    it. If all are named, torch, cuBLAS and driver do not fit together.
    """
    nccl_group.faultless(transformer.follows_fp32, code="training_wrong")


@pytest.mark.needs(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_all_train_as_one_gpu(nccl_group: World, fleet_level: str, method: str) -> None:
    """Transformer under DDP and FSDP trains as one GPU does

    Every GPU also trains on the data of all alone, in float32, and compares the losses. If one GPU is named, it
    computes or keeps something wrong. If all are named, one of them spoils the gradients of all: see the check before
    and the exactness of collectives.
    """
    if method == "fsdp" and fleet_level != "burnin":
        not_applicable("fsdp is part of level burnin")
    nccl_group.faultless(transformer.trains_as_one, method, code="training_wrong")


@pytest.mark.needs(ranks=2)
def test_ranks_end_alike(nccl_group: World) -> None:
    """Transformer under DDP is identical on all GPUs

    After 20 steps weights, gradients and moments of Adam must be the same bits on all GPUs. Any difference is a wrong
    bit in memory, arithmetic or transfer. The GPU that differs from most is the suspect; with two GPUs both are named,
    and the checks of each GPU say more.
    """
    nccl_group.faultless(transformer.ends_alike, code="replicas_differ")


@pytest.mark.figures("solo_token_throughput", of_several=("token_throughput", "communication_share"))
def test_speed(nccl_group: World, judge: Judge, with_utilization: WithUtilization) -> None:
    """Transformer throughput in bf16

    All GPUs train one model by DDP, in turns with steps without communication, which show each GPU by itself. A GPU
    that is slower than its peers is hot, power-capped or used by another process: compare `nvidia-smi -q -d
    CLOCK,POWER,PERFORMANCE`. Low MFU on all, with matmuls and memory as they should be: the host launches too slowly. A
    large share of communication: see the bandwidth of all_reduce.
    """
    method = "ddp" if nccl_group.size > 1 else ""
    measured = partial(measure_all, nccl_group, transformer.token_throughput, method, seconds=SECONDS)
    _judge(judge, with_utilization, lambda again: measured())


@pytest.mark.level("burnin")
@pytest.mark.figures("solo_token_throughput")
@pytest.mark.parametrize("model", ["transformer-0.6b", "transformer-1.3b"])
def test_speed_of_each_gpu_alone(
    judge: Judge, with_utilization: WithUtilization, alone: Callable[..., Measurement], model: str
) -> None:
    """Transformer throughput of each GPU alone, two sizes

    Each GPU trains alone until it is warm. A GPU that is slower than its peers here, and not in the check before,
    becomes hot.
    """
    _judge(judge, with_utilization, lambda again: [alone(model, again)])


@pytest.mark.level("burnin")
@pytest.mark.needs(ranks=2)
@pytest.mark.figures("token_throughput", "solo_token_throughput", "scaling_efficiency")
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_ddp_and_fsdp(
    nccl_group: World,
    judge: Judge,
    with_utilization: WithUtilization,
    alone: Callable[..., Measurement],
    method: str,
) -> None:
    """Transformer throughput under DDP and FSDP, and scaling

    For comparison with machines of the same kind. FSDP gathers the weights of each layer when it needs them, so it
    takes less memory and communicates more. Slow under FSDP only: see all_gather and reduce_scatter.
    """
    model = "transformer-0.6b"

    def scaling(again: bool) -> list[Measurement]:
        together, *others = measure_all(nccl_group, transformer.token_throughput, method, model, seconds=LONG_SECONDS)
        single = alone(model, again)
        return [together, single, scaling_efficiency(single, together), *others]

    _judge(judge, with_utilization, scaling)


def _judge(judge: Judge, with_utilization: WithUtilization, measured: Callable[[bool], Sequence[Measurement]]) -> None:
    """Throughputs, of which the MFU is shown, and which may not be more than the GPUs can compute; and what is measured
    with them."""
    impossible: list[Fault] = []

    def figures(again: bool = False) -> list[Measurement]:
        found, impossible[:] = with_utilization(measured(again))
        return found

    judge(*figures(), required=False, again=lambda: figures(again=True))
    expect_none(impossible)
