"""DistributedDataParallel trains correctly: communication, learning, replicas that stay identical to the last bit."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_gpufleet.probes.replicas import differences

pytestmark = [pytest.mark.level("standard"), pytest.mark.spmd]

EPOCHS = 3
BATCHES = 20


def network(rank, group):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    return DDP(layers.to(rank.device), process_group=group)


def batch(rank, seed):
    """Images with one bright quarter each, which is the label; every rank has images of its own."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank.index)
    labels = torch.randint(4, (32,), generator=generator)
    images = torch.rand(32, 1, 16, 16, generator=generator)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[0, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 0.5
    return images.to(rank.device), labels.to(rank.device)


def train(rank, group):
    """The model after some epochs, and the mean loss of each epoch on this rank."""
    model = network(rank, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(EPOCHS):
        total = 0.0
        for index in range(BATCHES):
            images, labels = batch(rank, epoch * BATCHES + index)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / BATCHES)
    return model, losses


def test_phase_1_gradients_are_averaged(rank, nccl_group):
    """Training, phase 1: every rank gets the average of all ranks' gradients

    With weights w and input r + 1 on rank r the gradient of w * x is known beforehand. If it is wrong, the collective
    tests above say which collective or GPU is to blame; if those pass, torch and NCCL do not fit together.
    """
    weight = nn.Linear(1000, 1, bias=False).to(rank.device)
    model = DDP(weight, process_group=nccl_group)
    model(torch.full((1, 1000), rank.index + 1.0, device=rank.device)).sum().backward()
    assert (weight.weight.grad == (rank.size + 1) / 2).all()


def test_phase_2_loss_falls(rank, nccl_group):
    """Training, phase 2: a small network learns

    The whole chain of forward, backward, communication and optimizer works on this GPU. A loss that stays or becomes
    NaN on one GPU only points to that GPU's arithmetic or memory.
    """
    _, losses = train(rank, nccl_group)
    assert losses[-1] < 0.5 * losses[0], f"mean loss by epoch: {losses}"


def test_phase_3_ranks_stay_identical(rank, nccl_group):
    """Training, phase 3: after several epochs gradients and parameters are the same on all ranks, bit for bit

    DDP applies the same update everywhere, so any difference is a wrong bit in memory, arithmetic or transfer. The rank
    that is named differs from the majority: its GPU is the suspect.
    """
    model, _ = train(rank, nccl_group)
    for kind, tensors in {
        "parameters": dict(model.module.named_parameters()),
        "gradients": {name: parameter.grad for name, parameter in model.module.named_parameters()},
    }.items():
        assert differences(rank, tensors) == [], f"{kind} differ from the other ranks'"
