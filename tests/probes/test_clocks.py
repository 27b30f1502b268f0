"""How long clocks are looked at: until nothing more can show."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.probes import memory

FULL = {memory.SM: 1980, memory.MEMORY: 3201}


class NotSupported(Exception):
    pass


@pytest.fixture
def driver(monkeypatch):
    """NVML for one GPU, whose SM clock is one of `sm` at each look, and then stays at the last."""
    nvml = ModuleType("pynvml")
    nvml.NVMLError_NotSupported = NotSupported
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, clock: FULL[clock]
    nvml.sm, nvml.looks = [1980], []

    def clock(handle, which):
        if which == memory.MEMORY:
            return FULL[which]
        nvml.looks.append(nvml.sm[min(len(nvml.looks), len(nvml.sm) - 1)])
        return nvml.looks[-1]

    nvml.nvmlDeviceGetClockInfo = clock
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(memory, "COPIED_BYTES", 64)
    monkeypatch.setattr(memory, "SECONDS", 0.1)
    return nvml


def under_load():
    return memory.clocks_under_load(SimpleNamespace(gpu=Gpu(0, {"uuid": "GPU-0"}), device=torch.device("cpu")))


def test_clocks_at_their_maximum_are_looked_at_no_longer(driver):
    driver.sm = [345, 1410, 1980, 1410]
    assert under_load() == {"sm": 1980, "memory": 3201, "reasons": 0}
    assert driver.looks == [345, 1410, 1980]


def test_a_clock_that_stays_below_is_looked_at_to_the_end(driver):
    driver.sm = [1410]
    assert under_load() == {"sm": 1410, "memory": 3201, "reasons": 0}
    assert len(driver.looks) > 3


def test_a_maximum_that_nobody_tells_is_never_reached(driver):
    def untold(handle, clock):
        raise NotSupported

    driver.nvmlDeviceGetMaxClockInfo = untold
    assert under_load() == {"sm": 1980, "memory": 3201, "reasons": 0}
    assert len(driver.looks) > 3
