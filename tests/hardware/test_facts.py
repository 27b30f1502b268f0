"""Single facts of NVML where a part of them cannot be had. The driver is described, not present."""

import sys
from types import SimpleNamespace

import pynvml
import pytest

from pytest_gpufleet import expect
from pytest_gpufleet.hardware import local_node
from pytest_gpufleet.hardware import nvml as driver
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from tests.hardware.fake_nvml import switched

LIMITS = {0: 95, 1: 89, 2: 95, 3: 87}  # nvml.h: shutdown, slowdown, memory_max, gpu_max


def source(**errors):
    """A GPU whose temperature thresholds fail with these NVML errors, by their numbers."""

    def threshold(handle, number):
        if f"n{number}" in errors:
            raise pynvml.NVMLError(errors[f"n{number}"])
        return LIMITS[number]

    nvml = SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlDeviceGetTemperatureThreshold=threshold)
    return driver.Nvml(nvml, [object()])


def test_a_threshold_that_the_device_does_not_have_costs_no_other():
    limits = source(n3=pynvml.NVML_ERROR_NOT_SUPPORTED).ask(0, "temperature_limits_c")
    assert limits == {"shutdown": 95, "slowdown": 89, "memory_max": 95, "gpu_max": None}


def test_thresholds_that_cannot_be_read_are_no_absent_ones():
    with pytest.raises(driver.FactError) as caught:
        source(n3=pynvml.NVML_ERROR_GPU_IS_LOST).ask(0, "temperature_limits_c")
    assert caught.value.unavailable.applicable


def test_every_gpu_is_present_hidden_and_lost_ones_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", switched(4, lost=(2,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with local_node.opened() as node:
        assert len(node.topology.gpus) == 1
        assert node.present() == ("00000000:1B:00.0", "00000000:2B:00.0", "", "00000000:4B:00.0")


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_older_drivers_tell_of_clock_events_by_their_older_name(error):
    def not_known(handle):
        raise pynvml.NVMLError(error)

    nvml = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlDeviceGetCurrentClocksEventReasons=not_known,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40,
    )
    assert driver.Nvml(nvml, [object()]).ask(0, "clock_event_reasons") == 0x40
    del nvml.nvmlDeviceGetCurrentClocksEventReasons  # an older nvidia-ml-py
    assert driver.Nvml(nvml, [object()]).ask(0, "clock_event_reasons") == 0x40


def test_clock_events_that_a_lost_gpu_does_not_tell_are_no_absent_ones():
    def lost(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    nvml = SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlDeviceGetCurrentClocksEventReasons=lost)
    with pytest.raises(driver.FactError) as caught:
        driver.Nvml(nvml, [object()]).ask(0, "clock_event_reasons")
    assert caught.value.unavailable.applicable


MISSPELT = {
    "machine.gpus[0][...]": lambda name: Gpu(0, {"name": "NVIDIA H200"})[name],
    "expect": lambda name: expect([Gpu(0, {})], name, 16),
    "expect in a rehearsal": lambda name: expect([], name, 16),
    "machine_now": Run(Options(rehearse=2)).ground.read_now,
}


@pytest.mark.parametrize("ask", MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_fact_raises(ask):
    with pytest.raises(KeyError, match=r"no GPU has a fact 'pcie_widht': did you mean 'pcie_width' or "):
        ask("pcie_widht")
    with pytest.raises(KeyError, match="no GPU has a fact 'colour': there are application_clock_default_mhz, "):
        ask("colour")


def test_a_fact_that_an_old_snapshot_lacks_is_not_recorded():
    assert str(Gpu(0, {})["pcie_width"]) == "not recorded"
    assert Gpu(0, {"of_a_later_version": 3})["of_a_later_version"] == 3
