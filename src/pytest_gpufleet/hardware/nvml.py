"""The GPUs as NVML, the driver's management library, describes them. Creates no GPU context."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_gpufleet.model.gpu import Gpu, GpuTopology

# nvml.h: nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`.
PCIE_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NVLINK_REMOTE_SWITCH = 2  # nvml.h: NVML_NVLINK_DEVICE_TYPE_SWITCH
MAX_NVLINKS = 18

NO_NVML = {
    "LibraryNotFound": "NVML (libnvidia-ml.so.1) was not found: no NVIDIA driver is installed, or a container was "
    "started without it (docker run --gpus all)",
    "DriverNotLoaded": "the NVIDIA driver is installed but not loaded: see `dmesg` and `nvidia-smi`",
    "NoPermission": "NVML refused access: this user may not open /dev/nvidia*",
    "LibRmVersionMismatch": "the NVIDIA library and the loaded kernel module are of different versions: reboot, or "
    "reload the module after the driver update",
}


class NoGpus(Exception):
    """There is no GPU to run on; the text says why in one sentence."""


class NoDriver(NoGpus):
    """Nor is the driver's library installed."""


@contextmanager
def session() -> Iterator[Any]:
    """The initialised pynvml module. Raises NoGpus with the reason if there is no working NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reason = type(error).__name__.removeprefix("NVMLError_")
        kind = NoDriver if reason == "LibraryNotFound" else NoGpus
        raise kind(NO_NVML.get(reason, f"NVML could not be initialised: {error}")) from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_topology(environment: Mapping[str, str] = os.environ) -> GpuTopology:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order, and the links between them.

    Raises NoGpus if NVML does not work or no GPU is visible.
    """
    with session() as nvml:
        try:
            handles, lost = _visible(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        except Exception as error:  # a version of nvidia-ml-py that does not fit the driver raises anything
            raise NoGpus(f"NVML could not list the GPUs: {error}") from None
        if not handles:
            raise NoGpus("; ".join(lost) or _why_none_visible(nvml.nvmlDeviceGetCount(), environment))
        gpus = tuple(_gpu(nvml, index, handle) for index, handle in handles)
        links, switched = _links(nvml, [handle for _, handle in handles], gpus)
        driver = _ask(nvml, "nvmlSystemGetDriverVersion")
        cuda_driver = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    fabric = (
        "nvswitch" if switched
        else "nvlink" if any(link.startswith("NV") for row in links for link in row)
        else "pcie" if len(gpus) > 1
        else "none"
    )  # fmt: skip
    versions = software()
    cuda = f"{cuda_driver // 1000}.{cuda_driver % 1000 // 10}" if cuda_driver else None
    return GpuTopology(
        gpus=gpus,
        links=links,
        fabric=fabric,
        driver=driver,
        cuda_driver=cuda,
        problems=(*lost, *_driver_problems(driver, cuda, versions["cuda"])),
        **versions,
    )


def _visible(nvml: Any, visible: str | None) -> tuple[list[tuple[int, Any]], list[str]]:
    """(index, handle) in the order CUDA numbers them, and a sentence for each GPU that gives no handle.

    Like for CUDA, what follows an invalid entry of CUDA_VISIBLE_DEVICES is invisible.
    """
    everything, lost = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            everything.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except Exception as error:
            lost.append(f"GPU {index} does not answer: {error} (see the kernel log for its XID)")
    if visible is None:
        return everything, lost
    uuids = {index: _ask(nvml, "nvmlDeviceGetUUID", handle) or "" for index, handle in everything}
    chosen: list[tuple[int, Any]] = []
    for entry in (part.strip() for part in visible.split(",")):
        match = [
            (index, handle)
            for index, handle in everything
            if entry == str(index) or (entry.startswith("GPU-") and uuids[index].startswith(entry))
        ]
        if len(match) != 1 or match[0] in chosen:
            break
        chosen += match
    return chosen, lost


def _why_none_visible(count: int, environment: Mapping[str, str]) -> str:
    if count and "CUDA_VISIBLE_DEVICES" in environment:
        return f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']!r} hides all {count} GPUs of this machine"
    return "the NVIDIA driver works but reports no GPU: see `lspci` and the kernel log for one that fell off the bus"


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *args: Any, part: str = "") -> Any:
        return _ask(nvml, name, handle, *args, part=part)

    power = ask("nvmlDeviceGetEnforcedPowerLimit")
    return Gpu(
        index=index,
        name=ask("nvmlDeviceGetName") or "unknown GPU",
        uuid=ask("nvmlDeviceGetUUID") or f"unknown UUID {index}",
        pci_bus_id=ask("nvmlDeviceGetPciInfo", part="busId") or "unknown PCI bus id",
        memory_bytes=ask("nvmlDeviceGetMemoryInfo", part="total") or 0,
        serial=ask("nvmlDeviceGetSerial"),
        board_part_number=ask("nvmlDeviceGetBoardPartNumber"),
        vbios=ask("nvmlDeviceGetVbiosVersion"),
        compute_capability=ask("nvmlDeviceGetCudaComputeCapability"),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks_active=sum(ask("nvmlDeviceGetNvLinkState", link) == 1 for link in range(MAX_NVLINKS)),
        power_limit_watts=power / 1000 if power else None,
        minor=ask("nvmlDeviceGetMinorNumber"),
        processes=tuple(map(_process, ask("nvmlDeviceGetComputeRunningProcesses") or ())),
    )


def _process(process: Any) -> str:
    try:
        name = Path(f"/proc/{process.pid}/comm").read_text(errors="replace").strip()  # anybody may choose it
    except OSError:
        name = "of another container or user"
    memory = f", {process.usedGpuMemory / 2**30:.1f} GiB" if process.usedGpuMemory else ""
    return f"process {process.pid} ({name}){memory}"


def _links(nvml: Any, handles: list[Any], gpus: tuple[Gpu, ...]) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """The link matrix, and whether NVLinks end in a switch."""
    remotes = [_nvlink_remotes(nvml, handle) for handle in handles]
    bus_ids = [gpu.pci_bus_id.lower() for gpu in gpus]

    def link(i: int, j: int) -> str:
        if i == j:
            return "X"
        through_switch = min(remotes[i].get("switch", 0), remotes[j].get("switch", 0))
        if count := remotes[i].get(bus_ids[j], 0) + through_switch:
            return f"NV{count}"
        level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
        return PCIE_ANCESTORS.get(level, "?")

    everyone = range(len(handles))
    return tuple(tuple(link(i, j) for j in everyone) for i in everyone), any("switch" in remote for remote in remotes)


def _nvlink_remotes(nvml: Any, handle: Any) -> dict[str, int]:
    """How many active NVLinks lead to a switch ("switch") and to each GPU (its PCI bus id)."""
    count: dict[str, int] = {}
    for link in range(MAX_NVLINKS):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        if _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == NVLINK_REMOTE_SWITCH:
            remote = "switch"
        else:
            bus_id = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link, part="busId")
            remote = bus_id.lower() if bus_id else "unknown"
        count[remote] = count.get(remote, 0) + 1
    return count


def _ask(nvml: Any, name: str, *args: Any, part: str = "") -> Any:
    """What an NVML function gives, or a part of it; None where this device, driver or user does not get it.

    Nor where the answer is broken: the strings of a GPU that lost its InfoROM may not even decode. The checks read the
    same facts again (facts.FACTS) and fail with the reason; here it must not keep the run from starting.
    """
    try:
        value = getattr(nvml, name)(*args)
        value = getattr(value, part) if part else value
        return value.decode() if isinstance(value, bytes) else value
    except Exception:
        return None


def software() -> dict[str, Any]:
    """Versions of torch and of what it was built with, as arguments of GpuTopology."""
    import torch
    import torch.distributed

    nccl: Any = torch.cuda.nccl
    cudnn: Any = torch.backends.cudnn
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_text(cudnn.version()) if cudnn.is_available() else None,
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
        "torch": torch.__version__,
    }


def _cudnn_text(version: int) -> str:
    """91900 is 9.19.0; before version 9, 8907 was 8.9.7."""
    scale = 10000 if version >= 90000 else 1000
    return f"{version // scale}.{version % scale // 100}.{version % 100}"


def _driver_problems(driver: str | None, cuda_driver: str | None, cuda: str | None) -> Iterator[str]:
    """Minor versions of CUDA are compatible within a major one, so only an older major is too old."""
    if cuda is None:
        yield "the installed torch is a CPU build: install one with CUDA"
    elif cuda_driver and int(cuda_driver.split(".")[0]) < int(cuda.split(".")[0]):
        yield f"driver {driver} supports CUDA {cuda_driver}, but torch was built for CUDA {cuda}: update the driver"
