"""What is read from NVML, what is said where there is nothing to read, and where --gpus auto must not rehearse."""

import os
import re
import sys
import threading
from types import SimpleNamespace

import pynvml
import pytest
import torch

from pytest_gpufleet.machine import host, local_node, nvml
from pytest_gpufleet.machine.nvml import NoGpus, signs_of_nvidia
from pytest_gpufleet.model import place
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from tests.conftest import SECONDS
from tests.machine.fake_nvml import ANSWERS, FakeNvml, linked, plain, switched
from tests.machine.trees import written


@pytest.fixture
def read(monkeypatch):
    """read(machine, CUDA_VISIBLE_DEVICES or None): its topology, as with that machine's driver."""

    def topology(machine, visible=None):
        monkeypatch.setitem(sys.modules, "pynvml", machine)
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        try:
            with local_node.opened(environment=environment) as node:
                return node.topology
        finally:
            assert machine.sessions == 0, "NVML was not shut down"

    return topology


def test_facts_of_a_gpu(read):
    topology = read(switched(8))
    gpu = topology.gpus[1]
    assert len(topology.gpus) == 8
    assert (gpu.index, gpu.place, gpu.name, gpu.uuid) == (1, place.gpu(1), "NVIDIA H200", gpu.uuid)
    assert (gpu.serial, gpu["board_part_number"]) == ("1654324001", "692-2G520-0282-000")
    assert (gpu.pci_bus_id, gpu.memory_bytes, gpu.compute_capability) == ("00000000:2B:00.0", 150754820096, (9, 0))
    assert [gpu[f"pcie_{name}"] for name in ("generation", "generation_max", "width", "width_max")] == [1, 5, 8, 16]
    assert gpu.nvlinks_active == 18
    assert gpu.power_limit_watts == 650  # the enforced one, and not the one that was asked for
    assert gpu.identity == f"GPU 1 NVIDIA H200, serial 1654324001, 00000000:2B:00.0, {gpu.uuid}"
    assert (topology.driver, topology.cuda_driver) == ("580.159.04", "13.2")
    assert (topology.torch, topology.cuda) == (torch.__version__, torch.version.cuda)


# The matrices of a DGX Station with V100s, where GPUs have one or two NVLinks to each other, and of PCIe servers.
STATION = linked((1, 2, 3, 3), (0, 2, 2, 3), (0, 1, 1, 3), (0, 0, 1, 2))
LEVELS = {(0, 1): 0, (0, 2): 10, (0, 3): 20, (0, 4): 30, (0, 5): 40, (0, 6): 50, (0, 7): 77}


@pytest.mark.parametrize(("machine", "fabric", "first_row", "last_row"), [
    (switched(8), "nvswitch", "X NV18 NV18 NV18 NV18 NV18 NV18 NV18", "NV18 NV18 NV18 NV18 NV18 NV18 NV18 X"),
    (switched(3, down=2), "nvswitch", "X NV18 NV16", "NV16 NV16 X"),
    (STATION, "nvlink", "X NV1 NV1 NV2", "NV2 NV1 NV1 X"),
    (linked((1, None, 1), (0, 0, None)), "nvlink", "X NV2", "NV2 X"),
    (linked((1,), (0,), (), distance={(1, 2): 30}), "nvlink", "X NV1 SYS", "SYS PHB X"),
    (plain(8, distance=LEVELS), "pcie", "X PIX PIX PXB PHB NODE SYS ?", "? SYS SYS SYS SYS SYS SYS X"),
    (plain(1), "none", "X", "X"),
], ids=["switch", "links down", "direct", "one down", "pair and one", "pcie", "one GPU"])  # fmt: skip
def test_links_and_fabric(read, machine, fabric, first_row, last_row):
    topology = read(machine)
    assert topology.fabric == fabric
    assert topology.links[0] == tuple(first_row.split())
    assert topology.links[-1] == tuple(last_row.split())
    assert topology.links == tuple(zip(*topology.links, strict=True)), "what links A to B links B to A"


@pytest.mark.parametrize(("visible", "indices"), [
    (None, [0, 1, 2, 3]),
    ("1,0", [1, 0]),
    ("GPU-00000002", [2]),
    ("GPU-00000003-77aa-4c1e-9b1d-5a0c33e9f100,0", [3, 0]),
    ("0,9,1", [0]),
    ("1,nonsense,0", [1]),
    ("1,GPU-0000,0", [1]),  # fits several
])  # fmt: skip
def test_cuda_visible_devices_chooses_and_orders(read, visible, indices):
    assert [gpu.index for gpu in read(switched(4), visible).gpus] == indices


def test_links_follow_the_order_of_the_gpus(read):
    topology = read(STATION, "3,0,1")
    assert topology.links == (("X", "NV2", "NV1"), ("NV2", "X", "NV1"), ("NV1", "NV1", "X"))


@pytest.mark.parametrize("visible", ["", "-1", "9,0", "NoDevFiles", "MIG-77aa"])
def test_no_visible_gpu_is_said_with_the_variable(read, visible):
    with pytest.raises(NoGpus, match=rf"^CUDA_VISIBLE_DEVICES={visible!r} hides all 2 GPUs of this machine$"):
        read(switched(2), visible)


FACTS = {
    "Name": "name", "UUID": "uuid", "Serial": "serial", "BoardPartNumber": "board_part_number", "VbiosVersion": "vbios",
    "GspFirmwareVersion": "gsp_firmware", "MemoryInfo": "memory_bytes", "PciInfo": "pci_bus_id",
    "CudaComputeCapability": "compute_capability", "CurrPcieLinkGeneration": "pcie_generation",
    "MaxPcieLinkGeneration": "pcie_generation_max", "CurrPcieLinkWidth": "pcie_width",
    "MaxPcieLinkWidth": "pcie_width_max", "EnforcedPowerLimit": "power_limit_watts", "NvLinkState": "nvlink_states",
}  # fmt: skip
FACTS = {f"nvmlDeviceGet{name}": fact for name, fact in FACTS.items()}
UNKNOWN = {"name": "unknown GPU", "uuid": "unknown UUID 0", "memory_bytes": 0, "pci_bus_id": "unknown PCI bus id"}


@pytest.mark.parametrize(("function", "fact"), FACTS.items())
def test_what_cannot_be_read_is_unknown(read, function, fact):
    gpu, whole = read(switched(2, unsupported=(function,))).gpus[0], read(switched(2)).gpus[0]
    assert (getattr(gpu, fact) if hasattr(gpu, fact) else gpu.get(fact)) == UNKNOWN.get(fact)
    assert whole.get(fact) not in (UNKNOWN.get(fact), None)


class Garbage:
    """A structure of nvidia-ml-py, whose fields are decoded when somebody looks at them."""

    def __getattr__(self, name):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize("broken", [lambda *_: b"\xff\xfe", lambda *_: Garbage().text], ids=["bytes", "an error"])
def test_answers_that_do_not_decode_keep_no_run_from_starting(read, monkeypatch, broken):
    machine = switched(2)
    for name in FACTS.keys() - {"nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo"}:
        choose = lambda nvml, card, *rest, usual=ANSWERS[name]: (broken if card.index else usual)(nvml, card, *rest)  # noqa: E731
        monkeypatch.setitem(ANSWERS, name, choose)
    whole, gpu = read(machine).gpus
    assert (gpu.index, gpu.pci_bus_id, gpu.serial, gpu.name) == (1, "00000000:2B:00.0", None, "unknown GPU")
    assert whole.serial == "1654324000"
    machine.sessions = 1
    for fact in ("serial", "name"):
        answer = nvml.Nvml(machine, machine.cards).ask(1, fact)
        assert (answer.absent, "UnicodeDecodeError" in answer.why) == (False, True)


def test_structures_that_do_not_decode_and_missing_functions_keep_no_run_from_starting(read, monkeypatch):
    for name in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkRemotePciInfo"):
        monkeypatch.setitem(ANSWERS, name, lambda *_: Garbage())
    gpu = read(linked((1,), (0,))).gpus[0]
    assert (gpu.pci_bus_id, gpu.memory_bytes) == ("unknown PCI bus id", 0)
    for name in FACTS:  # of an older nvidia-ml-py
        monkeypatch.delitem(ANSWERS, name)
    assert read(switched(2)).gpus[0].name == "unknown GPU"
    monkeypatch.setitem(ANSWERS, "nvmlDeviceGetCount", lambda nvml: Garbage().count)
    with pytest.raises(NoGpus, match="NVML could not list the GPUs: 'utf-8' codec can't decode"):
        read(switched(2))


@pytest.mark.parametrize(("name", "shown"), [
    (b"\xff\xfe", "\ufffd\ufffd"),
    (b"\x1bcACCEPTED\x1b[8m", "cACCEPTED"),  # clears the screen of many a terminal, and hides what follows
    (b"a\nACCEPTED\r", "a ACCEPTED"),
    (b"\xc2\x9b8m\xe2\x80\xaeDETP\x07", "8mDETP"),  # as one character, and from right to left
])  # fmt: skip
def test_a_process_may_have_any_name(read, name, shown):
    """A process chooses its name by itself, and bytes that are no text are a name too."""
    with open("/proc/self/comm", "r+b", buffering=0) as comm:
        before = comm.read()
        comm.write(name)
        try:
            process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)
            stranger = SimpleNamespace(pid=1 << 30, usedGpuMemory=2 << 30)
            (gpu,) = read(plain(1, processes={0: [process, stranger]})).gpus
            fabric_manager = host.read()["fabric_manager"]
        finally:
            comm.write(before)
    other = f"process {1 << 30} (of another container or user), 2.0 GiB"
    assert gpu.processes == (f"process {os.getpid()} ({shown})", other)
    assert fabric_manager is not None  # for which all processes of the host are looked at


def test_a_driver_that_answers_nothing_still_gives_its_gpus_and_a_lost_gpu_hides_no_other(read):
    essential = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    topology = read(plain(2, unsupported=tuple(ANSWERS.keys() - essential)))
    assert len(topology.gpus) == 2
    assert topology.links == (("X", "?"), ("?", "X"))
    assert (topology.driver, topology.cuda_driver) == (None, None)
    assert "GPU 0 unknown GPU, no serial" in topology.gpus[0].identity
    topology = read(switched(4, lost=(2,)))
    assert [gpu.index for gpu in topology.gpus] == [0, 1, 3]
    (problem,) = topology.problems
    assert re.search("GPU 2 .*lost", problem)


WITHOUT = {
    "LIBRARY_NOT_FOUND": ["libnvidia-ml.so.1", "no NVIDIA driver", "container"],
    "DRIVER_NOT_LOADED": ["driver", "not loaded", "dmesg"],
    "NO_PERMISSION": ["refused", "/dev/nvidia"],
    "LIB_RM_VERSION_MISMATCH": ["different versions", "reboot"],
    "UNKNOWN": ["NVML could not be initialised", "Unknown Error"],
    "no list": ["NVML could not list the GPUs", "Not Supported"],
    "no GPU": ["no GPU", "lspci"],
}


@pytest.mark.parametrize("broken", WITHOUT)
def test_without_gpus_there_is_one_sentence_why(read, broken):
    machine = FakeNvml(broken=getattr(pynvml, f"NVML_ERROR_{broken}", None))
    with pytest.raises(NoGpus) as caught:
        read(switched(2, unsupported=("nvmlDeviceGetCount",)) if broken == "no list" else machine)
    text = str(caught.value)
    assert [word for word in ("\n", *WITHOUT[broken]) if word not in text] == ["\n"]


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetTopologyCommonAncestor"])
def test_a_driver_that_does_not_answer_is_reported_and_may_answer_later(read, monkeypatch, call):
    lines, warned, machine = [], threading.Event(), plain(2)
    monkeypatch.setattr(nvml, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lines.append, flush=warned.set))
    usual = machine.nvmlInit if call == "nvmlInit" else ANSWERS[call]

    def late(*args):
        assert warned.wait(SECONDS)
        return usual(*args)

    monkeypatch.setattr(machine, call, late) if call == "nvmlInit" else monkeypatch.setitem(ANSWERS, call, late)
    assert len(read(machine).gpus) == 2
    (line,) = set("".join(lines).splitlines())
    assert all(word in line for word in ("driver has not answered", "dmesg", f"kill -9 {os.getpid()}"))


@pytest.mark.parametrize(("cuda_driver", "cuda", "words"), [
    (12080, "13.2", ["driver 580.159.04", "CUDA 12.8", "CUDA 13.2", "update the driver"]),
    (13000, "13.2", None),  # minor versions are compatible
    (13000, "12.8", None),
    (13000, None, ["torch is a CPU build"]),
])  # fmt: skip
def test_a_driver_too_old_for_torch_is_a_problem(read, monkeypatch, cuda_driver, cuda, words):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    problems = read(switched(2, cuda_driver=cuda_driver)).problems
    assert len(problems) == (words is not None)
    assert [word for word in words or () if word not in problems[0]] == []


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
    assert target.why.startswith("NVML (libnvidia-ml.so.1) was not found")
