"""Where --gpus auto may rehearse, and where it must not. The machines are folders, or a driver that is described."""

import sys

import pynvml
import pytest

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.machine.nvml import signs_of_nvidia
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from tests.machine.fake_nvml import FakeNvml, switched
from tests.machine.trees import written


def pci(address, vendor, kind):
    device = f"sys/bus/pci/devices/{address}"
    return {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"}


NVSWITCH, MELLANOX = pci("0000:07:00.0", "0x10de", "0x068000"), pci("0000:09:00.0", "0x15b3", "0x020700")
SOUND, AMD = pci("0000:01:00.1", "0x10de", "0x040300"), pci("0000:03:00.0", "0x1002", "0x030000")
LOADED = "a loaded driver: /proc/driver/nvidia"
MACHINES = {
    "nothing": ({}, []),
    "a GPU of a server": (pci("0000:1b:00.0", "0x10de", "0x030200"), ["on the PCI bus: GPU 0000:1b:00.0"]),
    "a graphics card": (pci("0000:01:00.0", "0x10de", "0x030000"), ["on the PCI bus: GPU 0000:01:00.0"]),
    "NVSwitches whose GPUs are gone": (NVSWITCH, ["on the PCI bus: NVSwitch 0000:07:00.0"]),
    "other vendors, and sound": ({**MELLANOX, **SOUND, **AMD}, []),
    "eight GPUs": (
        {name: text for i in range(8) for name, text in pci(f"0000:{i}b:00.0", "0x10de", "0x030200").items()},
        ["on the PCI bus: GPU 0000:0b:00.0, GPU 0000:1b:00.0, GPU 0000:2b:00.0 and 5 more"],
    ),
    "device files": ({"dev/nvidiactl": "", "dev/null": ""}, ["device files: /dev/nvidiactl"]),
    "a container beside the driver": ({"proc/driver/nvidia/version": "NVRM"}, [LOADED]),
    # What pip installs for torch is no driver.
    "CUDA from pip": ({"venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2": ""}, []),
}


@pytest.mark.parametrize(("files", "expected"), MACHINES.values(), ids=MACHINES)
def test_what_speaks_for_nvidia_hardware(tmp_path, files, expected):
    assert signs_of_nvidia(written(tmp_path, files)) == expected


NO_LIBRARY = FakeNvml(broken=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
DEAD = {
    "not loaded": (FakeNvml(broken=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "installed but not loaded"),
    "without GPUs": (FakeNvml(), "the NVIDIA driver works but reports no GPU"),
    "all hidden": (switched(2), "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs of this machine"),
    "not in this container": (NO_LIBRARY, "a container was started without it (docker run --gpus all)"),
}


@pytest.mark.parametrize(("driver", "words"), DEAD.values(), ids=DEAD)
def test_a_machine_whose_gpus_cannot_be_used_is_no_rehearsal(monkeypatch, driver, words):
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = [LOADED] if driver is NO_LIBRARY else []
    monkeypatch.setattr(nvml, "signs_of_nvidia", lambda: seen)
    target = Run(Options(gpus="auto")).target
    assert target.rehearsal_ranks == 0
    assert words in target.topology.problems[0]
    assert "so it is no rehearsal: --rehearse makes one" in target.topology.problems[1]
    assert Run(Options(rehearse=3)).target.rehearsal_ranks == 3


def test_a_machine_without_nvidia_hardware_is_rehearsed_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", NO_LIBRARY)
    monkeypatch.setattr(nvml, "signs_of_nvidia", list)
    target = Run(Options(gpus="auto")).target
    assert (target.rehearsal_ranks, target.topology.problems) == (2, ())
    assert str(target.topology).startswith("no GPU: NVML (libnvidia-ml.so.1) was not found")
