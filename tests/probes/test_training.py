"""How ResNets are trained and timed: on real ranks, some of them slowed down on purpose."""

import re
from contextlib import nullcontext

import pytest
import torch

from pytest_gpufleet.probes.training.batch_size import ATTEMPTS, FILLED, fullest, largest, within_memory
from pytest_gpufleet.probes.training.loader import bound
from pytest_gpufleet.probes.training.method_comparison import in_words

MODULE = """
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet import WORLD, Place, measure, measure_all
from pytest_gpufleet.probes.training import loader, cuda_graph, recipes, loop
from pytest_gpufleet.probes.training.recipes import Workload, plan
from pytest_gpufleet.probes.training.replicas import differences

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


def test_peak_trains_as_ddp_does(nccl_group):
    for (usual, _), (peak, different) in zip(nccl_group.run(few_steps, "fp32"), nccl_group.run(few_steps, "peak")):
        assert torch.allclose(torch.tensor(peak), torch.tensor(usual), atol=0.01), (usual, peak)
        assert peak[-1] < 0.5 * peak[0]
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
    learned = measure(nccl_group, loop.train_throughput, recipe, Workload(warm_up=1, steps=5))
    first, last = (float(text.split()[0]) for text in learned.details["loss"].split(", "))
    assert last < 0.9 * first, learned.details


def slow_network(rank, *args, **options):
    with slowed(dist, "all_reduce"):
        return loop.train_throughput(rank, *args, **options)


def test_communication_has_its_share(nccl_group):
    _, share = measure_all(nccl_group, slow_network, "peak", QUICK, communication=True)
    assert 0.2 < share.values[WORLD] < 1.0, share


def fed(rank, folder):
    # A network that takes no time: on a busy host a real one may be slower than the slow loader.
    loader.eager = lambda *_: lambda images, labels: images.mean()
    with slowed(loader.datasets.ImageFolder, "__getitem__"):
        return loader.fed_throughput(rank, folder, "amp", QUICK)


def test_a_slow_loader_is_host_bound(nccl_group, tmp_path):
    loader.write_photos(tmp_path, 8)
    measured = measure(nccl_group, fed, str(tmp_path))
    assert measured.details["training"].startswith("is host-bound: the loader gives"), measured.details


def die_with_workers(rank, folder, file):
    photos = loader.photo_loader(rank, folder, plan("amp", QUICK, rank.device), 2, 2)
    batches = iter(photos)
    next(batches)
    Path(f"{file}.{rank.index}").write_text(" ".join(str(worker.pid) for worker in batches._workers))
    dist.barrier()
    if rank.index == 1:
        os.kill(os.getpid(), 9)
    time.sleep(3600)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
"""


@pytest.fixture(scope="module")
def run(fleet_here):
    return fleet_here(MODULE)


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", MODULE, re.MULTILINE))
def test_on_ranks(run, name):
    outcomes = {each: outcome for each, outcome in run.outcomes.items() if each.partition("[")[0] == name}
    assert outcomes
    assert set(outcomes.values()) == {"passed"}, run.text


@pytest.mark.parametrize("most", [1, 16, 17, 100, 999, 1023])
def test_the_largest_batch_that_works_is_found(most):
    tried = []

    def works(batch):
        tried.append(batch)
        return batch <= most

    found = largest(works, 1, 1024)
    assert found <= most <= found * (1 + 1 / 16) + 1
    assert len(tried) <= 10


@pytest.mark.parametrize("image", [0.004, 0.006])  # what an image really takes, of a memory of 1; 0.005 is expected
def test_the_batch_that_fills_the_memory_is_found(image):
    tried = []

    def share_in_use(batch):
        tried.append(batch)
        return batch * image if batch * image <= 1 else None

    found = fullest(share_in_use, first=190, most=10_000, an_image=0.005)
    assert FILLED <= found * image <= 1
    assert len(tried) <= ATTEMPTS


def test_no_batch_is_larger_than_kernels_can_count():
    assert fullest(lambda batch: 0.001 * batch, first=90, most=100, an_image=0.001) == 100


def test_who_holds_up_whom():
    assert bound(3100, 25000) == "host-bound: the loader gives 3,100 images/s of the 25,000 that the GPUs could take"
    assert bound(24500, 25000) == "GPU-bound: 24,500 images/s, and 25,000 without the loader"


@pytest.mark.parametrize(
    ("error", "is_answer"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("FIND was unable to find an engine to execute this computation"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_is_an_answer(error, is_answer):
    def attempt():
        raise error

    with nullcontext() if is_answer else pytest.raises(RuntimeError, match=str(error)):
        assert within_memory(attempt, torch.device("cpu")) is None
    assert within_memory(lambda: 5, torch.device("cpu")) == 5


def test_a_comparison_in_words():
    throughput = {"dp": 4000.0, "ddp": 20000.0, "fsdp": 18000.0}
    memory = {
        "dp": {"gpu0": 20.0, "gpu1": 12.0},
        "ddp": {"gpu0": 12.1, "gpu1": 12.1},
        "fsdp": {"gpu0": 11.9, "gpu1": 11.8},
    }
    assert in_words(throughput, memory) == (
        "DDP trains fastest; DataParallel reaches 20% of it; FSDP reaches 90% of it. "
        "FSDP needs the least memory on its fullest GPU (11.9 GiB); "
        "DataParallel takes 20.0 GiB on the first GPU and 12.0 GiB on the others."
    )
