"""Training across nodes is correct: gradients, identical parameters, and checkpoints that outlive a node."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_gpufleet import Rank, World
from pytest_gpufleet.probes.training import correctness, loop
from pytest_gpufleet.probes.training.correctness import checkpoint, losses_of_all, sgd, train_step

pytestmark = [
    pytest.mark.chapter("Between nodes: training", "Do nodes train a network together, and come to the same result?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
]

STEPS = 5
# How far sums in another order may drift apart in so many steps, relative and absolute: 512 times 32 images, one after
# the other and all at once, drifted by 9e-7 on a CPU.
TOLERANCE = 1e-5


@pytest.mark.spmd
def test_gradients_of_all_nodes_are_exact(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """DDP and FSDP across nodes are exact

    The average of all gradients is known, and is wrong as soon as the gradient of one rank is lost. Wrong here and
    right on each node alone: see the exactness of collectives between nodes. If those are exact, torch and NCCL do not
    fit together, or differ between nodes.
    """
    average, x = correctness.known_average(rank.size), correctness.known_input(rank)
    ddp = DDP(correctness.known_layer(rank), process_group=nccl_group)
    ddp(x).sum().backward()
    assert (ddp.module.weight.grad == average).all(), "DDP"
    weight = correctness.known_layer(rank).weight.detach() - average
    fsdp = loop.fully_sharded(rank, correctness.known_layer(rank))
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    fsdp(x).sum().backward()
    optimizer.step()
    assert torch.equal(loop.held(fsdp.get_parameter("weight")), loop.own_shard(rank, weight)), "FSDP: own shard"


@pytest.mark.spmd
def test_nodes_train_as_one_gpu(rank: Rank, nccl_group: dist.ProcessGroup) -> None:
    """DDP across nodes trains as one GPU does

    Every GPU also trains the whole batch alone and compares; then all compare their weights bit by bit. If one GPU is
    named, it computes, keeps or receives something wrong. If all GPUs of a node are named, check the network to that
    node, and its versions of torch, CUDA and cuDNN.
    """
    one, ddp = correctness.network(rank), DDP(correctness.network(rank), process_group=nccl_group)
    sgd_one, sgd_ddp = sgd(one), sgd(ddp)
    for step in range(STEPS):
        everyones = correctness.batch(step, range(rank.size), rank.device)
        own = correctness.batch(step, [rank.index], rank.device)
        with correctness.full_precision():
            losses = torch.stack([train_step(one, sgd_one, *everyones), train_step(ddp, sgd_ddp, *own)])
        dist.all_reduce(losses, group=nccl_group)
        torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE, atol=TOLERANCE, msg=f"loss of step {step}")
    trained = dict(ddp.module.named_parameters())
    for name, weight in one.named_parameters():
        torch.testing.assert_close(trained[name], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    assert correctness.differences(rank, trained) == [], "not as on the other ranks"


# ---------------------------------------------------------------- checkpoints

# torch.distributed.checkpoint is imported where it is used: a collection of these checks shall not wait for it.

Files = dict[str, bytes]


def train_and_save(rank: Rank) -> tuple[Files, dict[str, Tensor], list[float]]:
    """Train with FSDP and save a checkpoint: what this rank has written, and the losses of the steps that follow; of
    the first rank also the weights in it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    model = loop.fully_sharded(rank, correctness.network(rank))
    optimizer = sgd(model)
    for step in range(STEPS):
        train_step(model, optimizer, *correctness.batch(step, [rank.index], rank.device))
    with TemporaryDirectory(prefix="gpufleet-checkpoint-") as folder:  # of this rank: nodes may share none
        save(checkpoint(model, optimizer), checkpoint_id=folder, process_group=rank.group)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    sharded: dict[str, Any] = dict(model.named_parameters())
    weights = {name: parameter.full_tensor().detach().cpu() for name, parameter in sharded.items()}
    return files, {} if rank.index else weights, losses_of_all(rank, model, optimizer, STEPS)


def load_and_go_on(rank: Rank, files: Files, weights: dict[str, Tensor], losses: list[float]) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model = loop.fully_sharded(rank, correctness.network(rank))
    optimizer = sgd(model)
    state = checkpoint(model, optimizer)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gpufleet-checkpoint-")))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        load(state, checkpoint_id=str(folder), process_group=rank.group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, parameter in model.named_parameters():
        shard = loop.own_shard(rank, weights[name])
        assert torch.equal(loop.held(parameter).cpu(), shard), f"loaded shard of {name}"
    assert losses_of_all(rank, model, optimizer, STEPS) == pytest.approx(losses, rel=TOLERANCE)


def test_checkpoint_of_all_nodes_loads_on_one_fewer(nccl_group: World) -> None:
    """An FSDP checkpoint of all nodes loads on one node fewer

    Training goes on this way after a node was lost. The nodes need no shared folder. If it fails and the other checks
    of training pass, suspect the disk with the folder for temporary files of the named GPU, or the version of torch.
    """
    answers = nccl_group.run(train_and_save)
    files = {name: content for written, _, _ in answers for name, content in written.items()}
    _, weights, losses = answers[0]
    others = [index for index, place in enumerate(nccl_group.places) if place.node != nccl_group.places[-1].node]
    nccl_group.subset(others).run(load_and_go_on, files, weights, losses)
