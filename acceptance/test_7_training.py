"""Training is correct: DistributedDataParallel (DDP) in three phases, FSDP, checkpoints, gradient scaling.

Gradients that must be right to the last bit are made so that they can be: rank r contributes `size * 2**r`, and their
average is `2**size - 1` in whatever order it is summed.
"""

from __future__ import annotations

from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_gpufleet import Rank, World
from pytest_gpufleet.probes.training import correctness, loop
from pytest_gpufleet.probes.training.correctness import checkpoint, losses_of_all, sgd, train_step

pytestmark = [
    pytest.mark.chapter("Training", "Do the GPUs train a network together, and come to the same result?"),
    pytest.mark.level("standard"),
]

EPOCHS = 3
SAMPLES = 1021  # a prime: no number of ranks divides it
BATCHES = 20  # an epoch
STEPS = 10  # of a comparison

# How far results may drift apart in 20 steps if only the order of sums differs, relative and absolute: weights and
# losses are of the order of 1. In float32 1 to 8 CPU ranks drifted by 1.1e-6, 18 unit roundoffs. With bfloat16 the
# weights stay in float32 and each gradient is rounded once, to 8 bits: they drifted by 7e-4, a fifth of a roundoff.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def train_epoch(rank: Rank, model: DDP, optimizer: torch.optim.Optimizer, epoch: int, accumulate: int = 1) -> float:
    """Train on this rank's own images, with a step of the optimizer every `accumulate` batches; the mean loss."""
    total = 0.0
    for index in range(BATCHES):
        images, labels = correctness.batch(epoch * BATCHES + index, [rank.index], rank.device)
        if index % accumulate == 0:
            optimizer.zero_grad()
        last = (index + 1) % accumulate == 0
        with nullcontext() if last else model.no_sync():
            loss = cross_entropy(model(images), labels)
            (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        if last:
            optimizer.step()
        total += loss.item()
    return total / BATCHES


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


# ---------------------------------------------------------------- DDP, phase 1: communication


@pytest.mark.spmd
def test_phase_1_gradients_are_averaged(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """DDP averages gradients exactly

    The average is known; in binary it has one digit for each rank, which is 0 if the gradient of that rank was lost. If
    it is wrong, the exactness of collectives names the collective or the GPU. If those pass, torch and NCCL do not fit
    together.
    """
    model = DDP(correctness.known_layer(rank), process_group=nccl_group)
    model(correctness.known_input(rank)).sum().backward()
    assert (model.module.weight.grad == 2**rank.size - 1).all()


@pytest.mark.spmd
def test_gradients_accumulate_without_communication(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """DDP accumulates gradients under no_sync

    Large batches are made of small ones this way. If it is wrong while gradients are averaged right without no_sync,
    torch is broken, not a GPU: install another version.
    """
    model, x = DDP(correctness.known_layer(rank), process_group=nccl_group), correctness.known_input(rank)
    with model.no_sync():
        for _ in range(3):
            model(x).sum().backward()
    assert (model.module.weight.grad == 3 * x).all()
    model(x).sum().backward()
    assert (model.module.weight.grad == 4 * (2**rank.size - 1)).all()


@pytest.mark.spmd
def test_unused_parameters_are_found(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """DDP handles unused parameters

    Even ranks use one layer and odd ranks another, in turns; a third is never used. A hang or a wrong number here while
    gradients are averaged right: torch and NCCL do not fit together.
    """

    class Branches(nn.ModuleList):
        def forward(self, x: Tensor, branch: int) -> Any:
            return self[branch](x)

    branches = Branches(correctness.known_layer(rank) for _ in range(3))
    model = DDP(branches, process_group=nccl_group, find_unused_parameters=True)
    for step in range(2):
        model.zero_grad()
        model(correctness.known_input(rank), (rank.index + step) % 2).sum().backward()
        for branch, layer in enumerate(branches):
            expected = sum(2**r for r in range(rank.size) if (r + step) % 2 == branch)
            if expected:
                assert (layer.weight.grad == expected).all(), f"layer {branch} in step {step}"
            else:
                assert layer.weight.grad is None, f"nobody used layer {branch} in step {step}"


@pytest.mark.spmd
def test_buffers_come_from_rank_0(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """DDP broadcasts buffers of rank 0

    Every rank must have the running statistics of rank 0, which DDP sends before each forward pass. The named rank
    received them wrong: check the same links as for a broadcast that is not exact.
    """
    model = DDP(nn.BatchNorm1d(1000, momentum=0.5).to(rank.device), process_group=nccl_group)
    images = torch.full((4, 1000), rank.index + 1.0, device=rank.device)
    for _ in range(3):
        model(images).sum().backward()
    model.eval()(images)  # changes no statistics, but receives those of rank 0
    assert (model.module.running_mean == 1 - 0.5**3).all()
    assert model.module.num_batches_tracked == 3


@pytest.mark.parametrize("drop_last", [False, True], ids=["padded", "tail dropped"])
def test_every_rank_has_its_own_shard(nccl_group: World, drop_last: bool) -> None:
    """DistributedSampler gives each rank its own shard

    No two ranks train on one sample, none is lost, and set_epoch shuffles the same way on all ranks. Wrong shards are
    no defect of a GPU: the ranks have different versions of torch or different seeds. Install torch anew.
    """
    shards = nccl_group.run(correctness.sampler_shards, SAMPLES, drop_last=drop_last)
    errors = correctness.sampler_errors(shards, SAMPLES, drop_last=drop_last)
    assert not errors, "; ".join(errors)


# ---------------------------------------------------------------- DDP, phases 2 and 3: learning, identical ranks


@pytest.mark.spmd
def test_phase_2_loss_falls(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """A small network learns under DDP

    Forward, backward, communication and optimizer work on this GPU. A loss that stays, or becomes NaN, on one GPU only:
    check the arithmetic and the memory of that GPU.
    """
    model = DDP(correctness.network(rank), process_group=nccl_group)
    optimizer = sgd(model)
    losses = [train_epoch(rank, model, optimizer, epoch) for epoch in range(EPOCHS)]
    by_step = {(epoch + 1) * BATCHES: loss for epoch, loss in enumerate(losses)}
    rank.record_losses({"model": "small network", "recipe": "fp32", "ranks": rank.size}, by_step)
    assert losses[-1] < 0.5 * losses[0], f"mean loss by epoch: {losses}"


@pytest.mark.spmd
@pytest.mark.parametrize("accumulate", [1, 4], ids=["every batch", "accumulated"])
def test_phase_3_ranks_stay_identical(rank: Rank, nccl_group: dist.ProcessGroup, accumulate: int) -> None:
    """DDP keeps all ranks identical

    Weights, gradients and momentum must be the same bits on all ranks after each epoch. Any difference is a wrong bit
    in memory, arithmetic or transfer, and the GPU that differs from the majority is the suspect. With two ranks both
    are named: see the checks of each GPU.
    """
    model = DDP(correctness.network(rank), process_group=nccl_group)
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        train_epoch(rank, model, optimizer, epoch, accumulate)
        copies = {}
        for name, parameter in model.module.named_parameters():
            copies[f"weight {name}"] = parameter
            copies[f"gradient {name}"] = parameter.grad
            copies[f"momentum {name}"] = optimizer.state[parameter]["momentum_buffer"]
        assert correctness.differences(rank, copies) == [], f"not as on the other ranks after epoch {epoch}"


# ---------------------------------------------------------------- FSDP


@pytest.mark.spmd
def test_fsdp_is_exact(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """FSDP is exact

    Each rank keeps a shard of the weights, whose values are known for each step. The named rank holds a wrong weight
    (suspect the memory of its GPU) or received wrong ones (suspect its links).
    """
    weight = correctness.known_layer(rank).weight.detach()
    model, x = loop.fully_sharded(rank, correctness.known_layer(rank)), correctness.known_input(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(5):
        y = model(x)
        assert (y == (weight * x).T).all(), f"weights gathered in step {step}"
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()
        weight -= 2**rank.size - 1
        shard = loop.held(model.get_parameter("weight"))
        assert torch.equal(shard, loop.own_shard(rank, weight)), f"own shard after step {step}"


@pytest.mark.spmd
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.needs(capability=(8, 0)))], ids=str
)
def test_ddp_and_fsdp_train_as_one_gpu(rank: Rank, nccl_group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """DDP and FSDP train as one GPU does

    Every GPU also trains the whole batch alone and compares losses and weights. If one GPU is named, it computes or
    keeps something wrong. If all are named, one of them computes wrong gradients for all: see the checks of each GPU.
    """
    one = correctness.network(rank)
    ddp = DDP(correctness.network(rank), process_group=nccl_group)
    fsdp = loop.fully_sharded(rank, correctness.network(rank), dtype)
    sgd_one, sgd_ddp, sgd_fsdp = sgd(one), sgd(ddp), sgd(fsdp)
    for step in range(STEPS):
        everyones = correctness.batch(step, range(rank.size), rank.device)
        own = correctness.batch(step, [rank.index], rank.device)
        with correctness.full_precision():
            losses = torch.stack([
                train_step(one, sgd_one, *everyones, dtype),
                train_step(ddp, sgd_ddp, *own, dtype),
                train_step(fsdp, sgd_fsdp, *own, dtype),
            ])  # fmt: skip
        dist.all_reduce(losses, group=nccl_group)
        loss, *others = losses / rank.size
        assert_close(torch.stack(others), loss.expand(2), dtype, f"losses of DDP and FSDP in step {step}")
        for name, weight in one.named_parameters():
            assert_close(ddp.module.get_parameter(name), weight, dtype, f"DDP: {name} after step {step}")
            shard = loop.held(fsdp.get_parameter(name))
            assert_close(shard, loop.own_shard(rank, weight), dtype, f"FSDP: own shard of {name} after step {step}")


# ---------------------------------------------------------------- checkpoints

# torch.distributed.checkpoint is imported where it is used: a collection of these checks shall not wait for it.


def train_and_save(rank: Rank, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Train with FSDP and save a checkpoint; the weights in it, and the losses of the steps that follow."""
    from torch.distributed.checkpoint.state_dict_saver import save

    model = loop.fully_sharded(rank, correctness.network(rank))
    optimizer = sgd(model)
    for step in range(5):
        train_step(model, optimizer, *correctness.batch(step, [rank.index], rank.device))
    save(checkpoint(model, optimizer), checkpoint_id=folder, process_group=rank.group)
    sharded: dict[str, Any] = dict(model.named_parameters())
    weights = {name: parameter.full_tensor().detach().clone() for name, parameter in sharded.items()}
    return weights, losses_of_all(rank, model, optimizer, STEPS)


def load_and_go_on(rank: Rank, folder: str, weights: dict[str, Tensor], losses: list[float]) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model = loop.fully_sharded(rank, correctness.network(rank))
    optimizer = sgd(model)
    state = checkpoint(model, optimizer)
    load(state, checkpoint_id=folder, process_group=rank.group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, parameter in model.named_parameters():
        shard = loop.own_shard(rank, weights[name])
        assert torch.equal(loop.held(parameter).cpu(), shard), f"loaded shard of {name}"
    assert losses_of_all(rank, model, optimizer, STEPS) == pytest.approx(losses, rel=TOLERANCES[torch.float32])


def test_checkpoint_loads_on_fewer_ranks(nccl_group: World) -> None:
    """An FSDP checkpoint loads on fewer GPUs

    Training goes on this way after a machine lost a GPU. If it fails and the other checks of training pass, suspect the
    disk with the folder for temporary files, or the version of torch.
    """
    with TemporaryDirectory(prefix="gpufleet-checkpoint-") as folder:
        weights, losses = nccl_group.run(train_and_save, folder)[0]
        for size in sorted({max(1, nccl_group.size // 2), 1}, reverse=True):
            nccl_group.subset(range(size)).run(load_and_go_on, folder, weights, losses)


# ---------------------------------------------------------------- gradient scaling


@pytest.mark.spmd
@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_overflow_on_one_rank_skips_the_step_on_all(rank: Rank, nccl_group: dist.ProcessGroup, kind: str) -> None:
    """Gradient overflow on one GPU skips the step on all

    Mixed precision with float16 relies on it: all GPUs skip the step and halve the scale. If one GPU makes a step that
    others skip, their weights differ from then on. Wrong while the other checks of training pass: torch is broken, not
    a GPU.
    """
    layer, x = correctness.known_layer(rank), correctness.known_input(rank)
    model = DDP(layer, process_group=nccl_group) if kind == "DDP" else loop.fully_sharded(rank, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=2.0**16)
    weight = loop.held(layer.weight).clone()
    for culprit in range(rank.size):
        factors = torch.ones(1000, device=rank.device)
        if rank.index == culprit:
            factors[-1] = torch.inf  # under FSDP the last rank alone sees it in its gradient
        scaler.scale((model(x) * factors).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0 ** (15 - culprit), f"rank {culprit} overflowed"
        assert torch.equal(loop.held(layer.weight), weight), f"rank {culprit} overflowed"
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(loop.held(layer.weight), weight - (2**rank.size - 1))
