"""A GPU that is watched while something works on it. NVML is made up, the thread is real."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from pytest_gpufleet.hardware import telemetry
from pytest_gpufleet.hardware.telemetry import Watch
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import GpuState
from tests.hardware import fake_nvml

GPU = Gpu(1)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuState | None]:
    """watched(power=...): the state of GPU 1 of two after each of its powers in W was read once."""

    def run(*power: float, unsupported: tuple[str, ...] = (), lost: tuple[int, ...] = ()) -> GpuState | None:
        milliwatts, all_read = iter(power), threading.Event()

        def next_power(nvml: Any, card: Any) -> float:
            assert card.index == 1
            try:
                return 1000 * next(milliwatts)
            except StopIteration:
                all_read.set()
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN) from None

        answers = {
            "nvmlDeviceGetTemperature": lambda nvml, card, sensor: 61,
            "nvmlDeviceGetClockInfo": lambda nvml, card, clock: 1410,
            "nvmlDeviceGetPowerUsage": next_power,
        }
        monkeypatch.setattr(telemetry, "INTERVAL_SECONDS", 0.001)
        for name, answer in answers.items():
            monkeypatch.setitem(fake_nvml.ANSWERS, name, answer)
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.plain(2, unsupported=unsupported, lost=lost))
        with Watch(GPU) as watching:
            if not (lost or "nvmlDeviceGetPowerUsage" in unsupported):
                assert all_read.wait(30)
        return watching.state

    return run


def test_its_state_is_the_median_so_that_no_spike_counts(watched: Callable[..., GpuState | None]) -> None:
    assert watched(300, 301, 525, 299, 300) == GpuState(temperature_c=61, sm_clock_mhz=1410, power_watts=300)


def test_what_nvml_does_not_tell_is_left_out(watched: Callable[..., GpuState | None]) -> None:
    state = watched(unsupported=("nvmlDeviceGetPowerUsage",))
    assert state == GpuState(temperature_c=61, sm_clock_mhz=1410)


def test_a_lost_gpu_has_no_state_and_ends_nothing(watched: Callable[..., GpuState | None]) -> None:
    assert watched(lost=(1,)) is None


def test_neither_has_a_cpu_rank_nor_a_gpu_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    with Watch(None) as of_a_cpu_rank:
        pass
    assert of_a_cpu_rank.state is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.plain(1, broken=pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    with Watch(Gpu(0)) as without:
        pass
    assert without.state is None
