"""How ResNets are trained and timed: on real ranks, some of them slowed down on purpose."""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.measure import scaling_efficiency
from pytest_gpufleet.probes.training.loader import bound
from pytest_gpufleet.probes.training.loop import Lap, precision, utilization
from pytest_gpufleet.probes.training.recipes import RECIPES, Workload, plan
from pytest_gpufleet.probes.training.sweep import Filled, largest, within_memory
from tests.conftest import INNER
from tests.machine.fake_nvml import FakeNvml, switched

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
    ("batch", "used", "full"), [(2400, 96, True), (2400, 94, False), (2675, 80, True)], ids=["full", "not", "no larger"]
)
def test_memory_is_full_where_no_larger_batch_is_possible(batch, used, full):
    training = replace(plan("tf32", Workload(batch=batch), torch.device("cpu")), pixels=224)
    assert Filled(training, 2, 1.0, 100, used, 100, 100).full is full


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
        assert not within_memory(attempt, torch.device("cpu"))
    assert within_memory(lambda: 5, torch.device("cpu"))


# ---------------------------------------------------------------- the search for algorithms


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_but_tf32_search_where_the_work_allows_it(recipe):
    before = torch.backends.cudnn.benchmark
    for allowed in (True, False):
        with precision(RECIPES[recipe], benchmark=allowed):
            assert torch.backends.cudnn.benchmark == (allowed and recipe != "tf32")
    assert torch.backends.cudnn.benchmark == before


# ---------------------------------------------------------------- how busy a GPU is while it trains


LAP = Lap(seconds=2.0, steps=(1.0, 1.0), loss=0.1, processor_seconds=0.5)


def on(machine: FakeNvml, index: int, monkeypatch: pytest.MonkeyPatch) -> float | None:
    monkeypatch.setitem(sys.modules, "pynvml", machine)
    busy = utilization(SimpleNamespace(gpu=Gpu(index, {"uuid": machine.cards[index].uuid})), LAP)
    assert machine.sessions == 0
    return busy


def test_of_a_gpu_it_is_what_nvml_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = switched(8)
    assert [on(machine, index, monkeypatch) for index in (0, 7)] == [0.0, 0.7]
    assert on(switched(8, unsupported=("nvmlDeviceGetUtilizationRates",)), 1, monkeypatch) is None


@pytest.mark.parametrize(("computed", "share"), [(0.5, 0.25), (7.0, 1.0)])  # of several cores it is not more than all
def test_of_a_cpu_rank_it_is_its_share_of_a_core(computed: float, share: float) -> None:
    assert utilization(SimpleNamespace(gpu=None), Lap(2.0, (1.0, 1.0), 0.1, computed)) == share
