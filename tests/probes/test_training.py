"""How ResNets are trained and timed: on real ranks, some of them slowed down on purpose."""

import os
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pytest_gpufleet import Place, RankFailure, measure, measure_all
from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import WORLD, Gpu
from pytest_gpufleet.probes import endurance
from pytest_gpufleet.probes.measure import scaling_efficiency
from pytest_gpufleet.probes.training import cuda_graph, loop, recipes, ways
from pytest_gpufleet.probes.training.correctness import differences, sampler_errors
from pytest_gpufleet.probes.training.loop import precision, utilization
from pytest_gpufleet.probes.training.recipes import RECIPES, USUAL, Workload, plan
from pytest_gpufleet.probes.training.ways import bound, full, largest, within_memory
from pytest_gpufleet.world.engines.processes import look as alive
from tests.conftest import INNER, comes_true
from tests.machine.fake_nvml import switched

QUICK = Workload(batch=4, steps=2, warm_up=1)
PAUSE = 0.1


def slowed(owner, name, seconds=PAUSE):
    genuine = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return genuine(*args, **kwargs)

    return patch.object(owner, name, slow)


def few_steps(rank, name, workload=QUICK, count=6, *, alone=False):
    """The losses of training on one batch, and where the ranks' networks differ after it."""
    made, genuine = [], loop.network
    with loop.precision(RECIPES[name]):
        with patch.object(loop, "network", lambda *args: made.append(genuine(*args)) or made[-1]):
            step, quiet = loop.steps_of(rank, plan(name, workload, rank.device), together=True)
        losses = [step().item(), *((quiet if alone else step)().item() for _ in range(count - 1))]
    return losses, differences(rank, dict(made[0].named_parameters()))


@pytest.mark.parametrize(("others", "megabytes"), [((0, 1), 300), ((1, 1), 25), ((0, 0), 25)])
def test_ddp_has_one_bucket_only_where_all_ranks_are_linked_by_nvlink(monkeypatch, others, megabytes):
    """Two ranks of nodes with two GPUs each: all of one node, or one of each."""
    rank = SimpleNamespace(
        size=2, local_size=2, node=0, device=torch.device("cuda", 0), group=None, gpu=SimpleNamespace(nvlinks_active=18)
    )
    monkeypatch.setattr(loop, "everyones", lambda _, mine: [mine, others])
    monkeypatch.setattr(loop, "DistributedDataParallel", lambda module, **given: given)
    assert loop.under("ddp", rank, None)["bucket_cap_mb"] == megabytes


def accumulated_losses(rank, batches):
    with patch.object(loop, "eager", partial(loop.eager, batches=batches)):
        return few_steps(rank, "fp32")  # the first step has one batch


@pytest.mark.parametrize(
    ("train", "usual", "other"),
    [(few_steps, "fp32", "peak"), (accumulated_losses, 1, 3)],
    ids=["peak trains as DDP does", "gradients of several batches are one step"],
)
def test_losses_are_alike_and_all_ranks_come_to_the_same_weights(two_ranks, train, usual, other):
    """Several batches are of the same images over and over: their average is what one batch gives."""
    for (expected, _), (losses, different) in zip(
        two_ranks.run(train, usual), two_ranks.run(train, other), strict=True
    ):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=0.01), (expected, losses)
        assert losses[-1] < 0.5 * losses[0]
        assert not different


@pytest.mark.parametrize("name", ["fp32", "peak"])
def test_a_step_alone_does_not_communicate(two_ranks, name):
    assert all(different for _, different in two_ranks.run(few_steps, name, alone=True))


def with_slow_rank_1(rank, **options):
    with slowed(torch.optim.SGD, "step", PAUSE * rank.index):
        return loop.train_throughput(rank, "amp", QUICK, **options)


def test_a_slow_rank_is_named(two_ranks):
    alone = measure(two_ranks, with_slow_rank_1, together=False)
    assert alone.values[Place(0, "cpu", 1)] < alone.values[Place(0, "cpu", 0)]
    together, *_ = measure_all(two_ranks, with_slow_rank_1, closely=True)
    assert together.details["slowest"].startswith("rank 1 with "), together.details


def sampled_since(rank):
    # When the first sample began. One rank takes long to warm up.
    began, genuine = [], loop.lap

    def lap(*args, **options):
        began.append(time.monotonic())
        if len(began) == 1 and rank.index == 1:
            time.sleep(10 * PAUSE)
        return genuine(*args, **options)

    with patch.object(loop, "lap", lap):
        loop.train_throughput(rank, "fp32", QUICK, together=False)
    return began[2]


def has_less_memory(rank):
    genuine, most = recipes.plan, 8 - 4 * rank.index
    recipes.plan = lambda *how, **more: replace(genuine(*how, **more), batch=most)


@pytest.mark.parametrize("together", [False, True])
def test_gpus_with_less_memory_have_all_take_their_batch(two_ranks, together):
    two_ranks.run(has_less_memory)
    measured = measure(two_ranks, loop.train_throughput, "amp", together=together)
    assert measured.conditions["batch"] == 4


def test_a_burn_in_whose_training_changes_no_weight_fails(two_ranks):
    """As where all gradients are NaN, and gradient scaling leaves out every step."""

    def take_no_step(rank):
        torch.optim.SGD.step = lambda self: None

    two_ranks.run(endurance._training, 0.01)
    two_ranks.run(take_no_step)
    with pytest.raises(RankFailure, match="ArithmeticError: training changed no weight"):
        two_ranks.run(endurance._training, 0.01)


def test_ranks_that_train_alone_are_measured_at_the_same_time(two_ranks):
    first, second = two_ranks.run(sampled_since)
    assert abs(first - second) < 5 * PAUSE


@pytest.mark.parametrize("recipe", ["fp32", "peak"])
def test_a_throughput_shows_that_the_network_learned_and_how_busy_each_rank_was(two_ranks, recipe):
    learned, _, busy = measure_all(two_ranks, loop.train_throughput, recipe, QUICK, closely=True)
    first, last = (float(text.split()[0]) for text in learned.details["loss"].split(", "))
    assert last < 0.9 * first, learned.details
    assert (busy.metric, list(busy.values)) == ("train_utilization", list(two_ranks.places))
    assert all(len(samples) == 3 and 0 <= min(samples) <= max(samples) <= 1 for samples in busy.samples.values())


def with_slow_network(rank):
    with slowed(dist, "all_reduce", 3 * PAUSE):  # the steps of a busy host are long too
        return loop.train_throughput(rank, "peak", replace(QUICK, steps=1), closely=True)


def test_communication_has_its_share(two_ranks):
    _, share, _ = measure_all(two_ranks, with_slow_network)
    assert 0.2 < share.values[WORLD] < 1.0, share


def fed(rank, folder):
    from torchvision import datasets

    # A network that takes no time: on a busy host a real one may be slower than the slow loader.
    at_once = patch.object(loop, "eager", lambda *_: lambda images, labels: images.mean())
    room = patch.object(ways, "worker_count", lambda *_: 1 + rank.index)  # all take what one has room for
    with at_once, room, slowed(datasets.ImageFolder, "__getitem__"):
        return ways.fed_throughput(rank, folder, "amp", QUICK)


def test_a_slow_loader_is_host_bound(two_ranks, tmp_path):
    ways.write_photos(tmp_path, 8)
    measured = measure(two_ranks, fed, str(tmp_path))
    assert measured.details["training"].startswith("is host-bound: the loader gives"), measured.details
    assert measured.details["workers"] == "1 a GPU"


def die_with_workers(rank, folder, file):
    batches = iter(ways.photo_loader(rank, folder, 32, 4, 2, 2))
    next(batches)
    Path(f"{file}.{rank.index}").write_text(" ".join(str(worker.pid) for worker in batches._workers))
    dist.barrier()
    if rank.index == 1:
        os.kill(os.getpid(), 9)
    time.sleep(3600)


def test_workers_end_with_their_rank(two_ranks, tmp_path):
    ways.write_photos(tmp_path, 8)
    with pytest.raises(Exception, match="SIGKILL"):
        two_ranks.run(die_with_workers, str(tmp_path), str(tmp_path / "workers"))
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"workers.{rank}").read_text().split()]
    assert len(pids) == 4
    assert comes_true(lambda: not any(map(alive, pids)))


# ---------------------------------------------------------------- what figures say
def test_scaling_is_held_against_what_the_same_gpus_do_alone_and_one_of_them_stands_for_no_other():
    """A GPU that is slow by itself holds all up, and is no slow communication."""
    alone = Measurement("solo_train_throughput", {"gpu0": 100.0, "gpu1": 80.0, "gpu2": 100.0, "gpu3": 100.0}, {})
    two, four = (
        Measurement("train_throughput", {"world": rate}, {"ranks": ranks}, {"world": (rate, 2 * rate)})
        for ranks, rate in ((2, 160.0), (4, 320.0))
    )
    assert scaling_efficiency(alone, two).values[WORLD] == pytest.approx(160 / 180)
    scaled = scaling_efficiency(alone, four)
    assert scaled.values[WORLD] == pytest.approx(320 / 380)
    assert scaled.samples[WORLD] == pytest.approx((320 / 380, 640 / 380))
    assert scaled.conditions == {"ranks": 4, "method": EACH_ALONE}
    alone = Measurement("solo_train_throughput", {"gpu0": 100.0}, {})
    with pytest.raises(ValueError, match="on 2 ranks, and alone on 1"):
        scaling_efficiency(alone, Measurement("train_throughput", {"world": 190.0}, {"ranks": 2}))


@pytest.mark.parametrize("most", [16, 17, 100, 999, 2400, 2675])
def test_the_largest_batch_that_works_is_found(most):
    tried = []

    def works(batch):
        tried.append(batch)
        return batch <= most

    found = largest(works, 16, 2675)
    assert found <= most <= found * (1 + 1 / 64) + 1
    assert len(tried) <= 13


@pytest.mark.parametrize(
    ("batch", "used", "is_full"), [(2400, 96, 1), (2400, 94, 0), (2675, 80, 1)], ids=["full", "not", "no larger"]
)
def test_memory_is_full_where_no_larger_batch_is_possible(batch, used, is_full):
    training = replace(plan("tf32", Workload(batch=batch), torch.device("cpu")), pixels=224)
    assert full(training, used, 100) == is_full


def test_who_holds_up_whom():
    assert bound(3100, 25000) == "host-bound: the loader gives 3,100 images/s of the 25,000 that the GPUs could take"
    assert bound(24500, 25000) == "GPU-bound: 24,500 images/s, and 25,000 without the loader"


@pytest.mark.parametrize(("error", "is_answer"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("FIND was unable to find an engine to execute this computation"), True),
    (RuntimeError("an illegal memory access was encountered"), False),
])  # fmt: skip
def test_out_of_memory_is_an_answer(error, is_answer):
    with nullcontext() if is_answer else pytest.raises(RuntimeError, match=str(error)):
        assert not within_memory(Mock(side_effect=error))
    assert within_memory(lambda: 5)


# ---------------------------------------------------------------- the search for algorithms
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp32_bf16_and_peak_search_where_the_work_allows_it(recipe):
    before = torch.backends.cudnn.benchmark
    for allowed in (True, False):
        with precision(RECIPES[recipe], benchmark=allowed):
            assert torch.backends.cudnn.benchmark == (allowed and recipe in ("fp32", "bf16", "peak"))
    assert torch.backends.cudnn.benchmark == before


# ---------------------------------------------------------------- how busy a GPU is while it trains
NO_RATES = ("nvmlDeviceGetUtilizationRates",)


@pytest.mark.parametrize(("unsupported", "index", "busy"), [((), 0, 0.0), ((), 7, 0.7), (NO_RATES, 1, None)])
def test_of_a_gpu_it_is_what_nvml_reads(monkeypatch, unsupported, index, busy):
    machine = switched(8, unsupported=unsupported)
    monkeypatch.setitem(sys.modules, "pynvml", machine)
    gpu = Gpu(index, {"uuid": machine.cards[index].uuid})
    assert utilization(SimpleNamespace(gpu=gpu), 0.5) == busy
    assert machine.sessions == 0
    assert [utilization(SimpleNamespace(gpu=None), used) for used in (0.25, 3.5)] == [0.25, 1.0]  # of a CPU rank


# ---------------------------------------------------------------- what recipe peak needs of the host and of Triton
RANK = SimpleNamespace(device=torch.device("cpu"))


def use_kernels(workload=USUAL):
    cuda_graph._use_kernels(RANK, torch.nn.Identity(), plan("peak", workload, RANK.device))


@pytest.mark.parametrize(("files", "compiler", "triton", "words"), [
    ("gcc Python.h", "", None, "need Triton"),
    ("cc Python.h", "", "triton", "install gcc"),  # for which Triton does not look
    ("gcc", "", "triton", "python3-dev"),
    ("gcc Python.h", "", "triton", "up to 131,071 images"),
    ("clang Python.h", "", "triton", "up to 131,071 images"),
    ("Python.h", "/opt/icx", "triton", "up to 131,071 images"),
])  # fmt: skip
def test_what_triton_lacks_is_named_and_it_does_not_apply(monkeypatch, tmp_path, files, compiler, triton, words):
    """Where it lacks nothing, no batch is larger than kernels can count."""
    for name in files.split():
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(cuda_graph, "find_spec", lambda name: triton)
    with pytest.raises(NotApplicable, match=words):
        use_kernels(Workload(batch=200_000))


@pytest.mark.parametrize(("off", "raised"), [
    ([0.014, 0.014], None),
    ([1.4, 1.4], NotJudged),  # a fault of the compiler, or of the only GPU
    ([float("nan"), float("nan")], NotJudged),
    ([1.4, 0.014], ArithmeticError),  # of this GPU
    ([float("nan"), 0.014], ArithmeticError),
    ([0.014, 1.4], None),  # of another
])  # fmt: skip
def test_kernels_that_compute_otherwise_than_torch_are_not_used(monkeypatch, off, raised):
    fused_norm = pytest.importorskip("pytest_gpufleet.probes.training.peak")
    fused = []
    monkeypatch.setenv("TRITON_CACHE_DIR", "as the site says")
    monkeypatch.setattr(cuda_graph, "lacking", lambda: None)
    monkeypatch.setattr(cuda_graph, "everyones", lambda rank, values: [[each] for each in off])
    monkeypatch.setattr(fused_norm, "off_torch", lambda device: off[0])
    monkeypatch.setattr(fused_norm, "fuse", fused.append)
    with pytest.raises(raised) if raised else nullcontext():
        use_kernels()
    assert bool(fused) == (raised is None)


# ---------------------------------------------------------------- the kernels of recipe peak compute what torch does
def test_fused_kernels_compute_what_torch_does(run_fresh):
    pytest.importorskip("triton")
    # Triton reads the variable when it is imported.
    run = run_fresh("test_inner.py", files={"test_inner.py": INNER / "fused_network.py"}, TRITON_INTERPRET="1")
    assert run.status == 0, run.text
    assert "4 passed" in run.text


# ---------------------------------------------------------------- shards of DistributedSampler
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "samples"), [(1, 100), (2, 101), (3, 99), (8, 1021), (16, 1021)])
def test_shards_of_torch_are_right_and_an_epoch_that_comes_again_has_the_same_order(ranks, samples, drop_last):
    """Other errors are planted in the check itself: tests/acceptance/test_training_faults.py."""
    samplers = [DistributedSampler(torch.arange(samples), ranks, rank, drop_last=drop_last) for rank in range(ranks)]
    epochs = [([*sampler], [sampler.set_epoch(1), *sampler][1:]) for sampler in samplers]
    assert sampler_errors([[first, second, first] for first, second in epochs], samples, drop_last=drop_last) == []
    again = [f"rank {rank}: epoch 0 is another one when it comes again" for rank in range(ranks)]
    assert sampler_errors([[first, second, second] for first, second in epochs], samples, drop_last=drop_last) == again


# ---------------------------------------------------------------- copies that differ between ranks: which rank is named
def lines(rank, odd):
    copies = {"a": torch.zeros(3, 2, device=rank.device), "b": torch.zeros(5, dtype=torch.float16, device=rank.device)}
    if rank.index in odd:
        copies["b"].view(torch.uint8)[7] ^= 1
    return differences(rank, copies)


WRONG = "b: 1 of 10 bytes, first in element 3"
DOUBT = WRONG + ", against rank {}: no majority says which of them is right"


def test_who_differs(four_ranks):
    assert four_ranks.run(lines, []) == [[], [], [], []]
    assert four_ranks.run(lines, [2]) == [[], [], [WRONG], []]
    assert four_ranks.subset(range(3)).run(lines, [0]) == [[WRONG], [], []]
    # Without a majority all are named.
    assert four_ranks.subset(range(2)).run(lines, [1]) == [[DOUBT.format(1)], [DOUBT.format(0)]]
    assert four_ranks.run(lines, [2, 3]) == [[DOUBT.format(other)] for other in (2, 2, 0, 0)]
