"""Training as the probes do it, on CPU ranks."""

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet import WORLD, Place, measure, measure_all
from pytest_gpufleet.probes.training import loader, loop, recipes
from pytest_gpufleet.probes.training.correctness import differences
from pytest_gpufleet.probes.training.recipes import Workload, plan
from pytest_gpufleet.world.engines.processes import look as alive

QUICK = Workload(batch=4, steps=2, warm_up=1)
PAUSE = 0.1


@contextmanager
def slowed(owner, name, seconds=PAUSE):
    genuine = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return genuine(*args, **kwargs)

    setattr(owner, name, slow)
    try:
        yield
    finally:
        setattr(owner, name, genuine)


def few_steps(rank, name, *, alone=False):
    with loop.precision(recipes.RECIPES[name]):
        made = []
        genuine = loop.network
        loop.network = lambda *args: made.append(genuine(*args)) or made[-1]
        try:
            step, quiet = loop.steps_of(rank, plan(name, QUICK, rank.device), together=True)
        finally:
            loop.network = genuine
        losses = [step().item(), *((quiet if alone else step)().item() for _ in range(5))]
    return losses, differences(rank, dict(made[0].named_parameters()))


def accumulated_losses(rank, batches):
    training = plan("fp32", QUICK, rank.device)
    with loop.precision(training.recipe):
        module = loop.module_of(rank, training)
        step, data = loop.eager(module, training, rank.device, batches=batches), loop.synthetic_batch(rank, training)
        step(*data)  # the first has one batch
        losses = [step(*data).item() for _ in range(5)]
    return losses, differences(rank, dict(module.named_parameters()))


@pytest.mark.parametrize(
    ("train", "usual", "other"),
    [(few_steps, "fp32", "peak"), (accumulated_losses, 1, 3)],
    ids=["peak trains as DDP does", "gradients of several batches are one step"],
)
def test_losses_are_alike_and_all_ranks_come_to_the_same_weights(nccl_group, train, usual, other):
    """Several batches are of the same images over and over: their average is what one batch gives."""
    for (expected, _), (losses, different) in zip(
        nccl_group.run(train, usual), nccl_group.run(train, other), strict=True
    ):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=0.01), (expected, losses)
        assert losses[-1] < 0.5 * losses[0]
        assert not different


@pytest.mark.parametrize("name", ["fp32", "peak"])
def test_a_step_alone_does_not_communicate(nccl_group, name):
    assert all(different for _, different in nccl_group.run(few_steps, name, alone=True))


def throughput(rank, slow, *args, **options):
    if rank.index in slow:
        with slowed(torch.optim.SGD, "step"):
            return loop.train_throughput(rank, *args, **options)
    return loop.train_throughput(rank, *args, **options)


def test_a_slow_rank_is_named(nccl_group):
    alone = measure(nccl_group, throughput, [1], "amp", QUICK, together=False)
    assert alone.values[Place(0, "cpu", 1)] < alone.values[Place(0, "cpu", 0)]
    together, _ = measure_all(nccl_group, throughput, [1], "amp", QUICK, communication=True)
    assert together.details["slowest"].startswith("rank 1 with "), together.details


def sampled_since(rank):
    # When the first sample began. One rank takes long to warm up.
    began, genuine = [], loop.lap

    def lap(*args, **options):
        began.append(time.monotonic())
        if len(began) == 1 and rank.index == 1:
            time.sleep(10 * PAUSE)
        return genuine(*args, **options)

    loop.lap = lap
    try:
        loop.train_throughput(rank, "fp32", QUICK, together=False)
    finally:
        loop.lap = genuine
    return began[2]


def test_ranks_that_train_alone_are_measured_at_the_same_time(nccl_group):
    first, second = nccl_group.run(sampled_since)
    assert abs(first - second) < 5 * PAUSE


@pytest.mark.parametrize("recipe", ["fp32", "peak"])
def test_a_throughput_shows_that_the_network_learned(nccl_group, recipe):
    learned = measure(nccl_group, loop.train_throughput, recipe, QUICK)
    first, last = (float(text.split()[0]) for text in learned.details["loss"].split(", "))
    assert last < 0.9 * first, learned.details


def slow_network(rank, *args, **options):
    with slowed(dist, "all_reduce", 3 * PAUSE):  # the steps of a busy host are long too
        return loop.train_throughput(rank, *args, **options)


def test_communication_has_its_share(nccl_group):
    one_step = replace(QUICK, steps=1)
    _, share = measure_all(nccl_group, slow_network, "peak", one_step, communication=True)
    assert 0.2 < share.values[WORLD] < 1.0, share


def test_how_busy_each_rank_is_is_reported_for_each_sample(nccl_group):
    _, busy = measure_all(nccl_group, loop.train_throughput, "fp32", QUICK, busy=True)
    assert (busy.metric, list(busy.values)) == ("train_utilization", list(nccl_group.places))
    assert all(len(samples) == 3 and 0 <= min(samples) <= max(samples) <= 1 for samples in busy.samples.values())


def fed(rank, folder):
    from torchvision import datasets

    # A network that takes no time: on a busy host a real one may be slower than the slow loader.
    genuine, loop.eager = loop.eager, lambda *_: lambda images, labels: images.mean()
    try:
        with slowed(datasets.ImageFolder, "__getitem__"):
            return loader.fed_throughput(rank, folder, "amp", QUICK)
    finally:
        loop.eager = genuine


def test_a_slow_loader_is_host_bound(nccl_group, tmp_path):
    loader.write_photos(tmp_path, 8)
    measured = measure(nccl_group, fed, str(tmp_path))
    assert measured.details["training"].startswith("is host-bound: the loader gives"), measured.details


def die_with_workers(rank, folder, file):
    photos = loader.photo_loader(rank, loader.photo_set(folder, 32), 4, 2, 2)
    batches = iter(photos)
    next(batches)
    Path(f"{file}.{rank.index}").write_text(" ".join(str(worker.pid) for worker in batches._workers))
    dist.barrier()
    if rank.index == 1:
        os.kill(os.getpid(), 9)
    time.sleep(3600)


def test_workers_end_with_their_rank(nccl_group, tmp_path):
    loader.write_photos(tmp_path, 8)
    with pytest.raises(Exception, match="SIGKILL"):
        nccl_group.run(die_with_workers, str(tmp_path), str(tmp_path / "workers"))
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"workers.{rank}").read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 2
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
