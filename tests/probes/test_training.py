"""How ResNets are trained and timed: on real ranks, some of them slowed down on purpose."""

import re
from contextlib import nullcontext

import pytest
import torch

from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.measure import scaling_efficiency
from pytest_gpufleet.probes.training.batch_size import ATTEMPTS, FILLED, fullest, largest, within_memory
from pytest_gpufleet.probes.training.loader import bound
from pytest_gpufleet.probes.training.method_comparison import in_words
from tests.conftest import INNER

TRAINING = INNER / "training_on_ranks.py"


@pytest.fixture(scope="module")
def run(fleet):
    return fleet(TRAINING)


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", TRAINING.read_text(), re.MULTILINE))
def test_on_ranks(run, name):
    outcomes = {each: outcome for each, outcome in run.outcomes.items() if each.partition("[")[0] == name}
    assert outcomes
    assert set(outcomes.values()) == {"passed"}, run.text


def test_scaling_is_held_against_what_the_same_gpus_do_alone():
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


def test_a_figure_of_one_gpu_stands_for_no_other():
    alone = Measurement("solo_train_throughput", {"gpu0": 100.0}, {})
    with pytest.raises(ValueError, match="on 2 ranks, and alone on 1"):
        scaling_efficiency(alone, Measurement("train_throughput", {"world": 190.0}, {"ranks": 2}))


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
