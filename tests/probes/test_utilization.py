"""How busy a GPU is while it trains."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.probes.training.loop import Lap, utilization
from tests.hardware.fake_nvml import FakeNvml, switched

LAP = Lap(seconds=2.0, steps=(1.0, 1.0), loss=0.1, processor_seconds=0.5)


def on(machine: FakeNvml, index: int, monkeypatch: pytest.MonkeyPatch) -> float | None:
    monkeypatch.setitem(sys.modules, "pynvml", machine)
    told = utilization(SimpleNamespace(gpu=Gpu(index, {"uuid": machine.cards[index].uuid})), LAP)
    assert machine.sessions == 0
    return told


def test_of_a_gpu_it_is_what_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = switched(8)
    assert [on(machine, index, monkeypatch) for index in (0, 7)] == [0.0, 0.7]


def test_of_a_gpu_that_does_not_tell_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(switched(8, unsupported=("nvmlDeviceGetUtilizationRates",)), 1, monkeypatch) is None


@pytest.mark.parametrize(("computed", "share"), [(0.5, 0.25), (7.0, 1.0)])  # of several cores it is not more than all
def test_of_a_cpu_rank_it_is_its_share_of_a_core(computed: float, share: float) -> None:
    assert utilization(SimpleNamespace(gpu=None), Lap(2.0, (1.0, 1.0), 0.1, computed)) == share
