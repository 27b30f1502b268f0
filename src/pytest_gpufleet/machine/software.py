"""Versions of torch and its libraries, the variables that can change a result, and those of them that make NCCL or CUDA
slower than the machine is, or other arithmetic than was asked for."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.pcie import gpus_by_address
from pytest_gpufleet.machine.tools import Absent, HostFact
from pytest_gpufleet.model.conditions import c_number
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.place import NVLS_SINCE, Gpu, GpuTopology, grouped
from pytest_gpufleet.redaction import variable


def software() -> dict[str, Any]:
    """As arguments of GpuTopology."""
    import torch
    import torch.distributed

    nccl: Any = torch.cuda.nccl
    # Not torch.backends.cudnn.version(), which since pytorch/pytorch#169409 asks every GPU whether this cuDNN knows it:
    # for that it starts CUDA, in a process that is to touch no GPU, and it fails where one is too old.
    bindings: Any = torch._C
    backend: Any = torch.backends.cudnn
    cudnn = bindings._cudnn if backend.is_available() else None
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_text(cudnn.getVersionInt()) if cudnn else None,
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
        "torch": str(torch.__version__),  # which is a TorchVersion
    }


def _cudnn_text(version: int) -> str:
    """91900 is 9.19.0; before version 9, 8907 was 8.9.7."""
    scale = 10000 if version >= 90000 else 1000
    return f"{version // scale}.{version % scale // 100}.{version % 100}"


def driver_problems(driver: str | None, cuda_driver: str | None, cuda: str | None) -> Iterator[str]:
    """Minor versions of CUDA are compatible: only an older major one is too old."""
    if cuda is None:
        yield "the installed torch is a CPU build: install one with CUDA"
    elif cuda_driver and int(cuda_driver.split(".")[0]) < int(cuda.split(".")[0]):
        yield f"driver {driver} supports CUDA {cuda_driver}, but torch was built for CUDA {cuda}: update the driver"


STEERING = re.compile(
    r"(NCCL|CUDA|TORCH|PYTORCH|GLOO|NVIDIA|NVSHMEM|CUBLAS|CUDNN|OMP|MKL|UCX|TORCHINDUCTOR|TRITON)_\w+"
    r"|LD_PRELOAD|LD_AUDIT"
)
# What images carry for the container runtime: long, and without effect on a process.
NOISE = re.compile(r"NVIDIA_(REQUIRE|PRODUCT|DRIVER_CAP)\w+")


def steering() -> dict[str, str]:
    """With what is in the files from which NCCL takes variables (its manual, "Environment Variables")."""
    found: dict[str, str] = {}
    for path in ("/etc/nccl.conf", os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            # NCCL takes both sides of "=" as they are: it looks for no variable "NCCL_ALGO " (misc/param.cc).
            parts = [line.partition("=") for line in file]
            found.update({name: value.rstrip("\r\n") for name, _, value in parts if name.startswith("NCCL_")})
    return {**found, **os.environ}


def of_this_process() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if STEERING.fullmatch(name)}


def put_back(before: dict[str, str]) -> None:
    for name in of_this_process().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def relevant() -> dict[str, str]:
    """What steers drivers and libraries, sorted, without secrets: reports go from hand to hand."""
    given = sorted(steering().items())
    steer = ((name, value) for name, value in given if STEERING.fullmatch(name) and not NOISE.fullmatch(name))
    return {name: variable(name, value) for name, value in steer}


ENVIRONMENT = HostFact("environment", dict[str, str], relevant)


class TopologyFile(msgspec.Struct, frozen=True):
    """`devices`: their PCI addresses; `unreadable`: why, which NCCL passes over in silence (graph/xml.cc)."""

    path: str
    devices: tuple[str, ...] = ()
    unreadable: str = ""


def read_topology_file(root: Path = Path("/")) -> TopologyFile:
    """That of NCCL_TOPO_FILE, else the one at which NCCL looks without it (graph/topo.cc, ncclTopoGetSystem)."""
    given = steering().get("NCCL_TOPO_FILE")
    path = Path(given) if given else root / "var/run/nvidia-topologyd/virtualTopology.xml"
    try:
        devices = re.findall(r'<pci\b[^>]*\bbusid="([^"]+)"', path.read_text(errors="replace"))
    except OSError as error:
        if not given and isinstance(error, FileNotFoundError):
            raise Absent("NCCL is given no topology file (NCCL_TOPO_FILE)") from None
        return TopologyFile(str(path), unreadable=error.strerror or str(error))
    return TopologyFile(str(path), tuple(sorted({device.lower() for device in devices})))


TOPOLOGY_FILE = HostFact("topology_file", TopologyFile, read_topology_file)


# By name the values that do harm. NCCL_TOPO_FILE and NCCL_GRAPH_FILE do none: images of clouds set them (Azure's
# nccl.conf), since a virtual machine does not show its own topology; what is in the first, unfit_topology_file judges.
# Values by NCCL's source as of 2.30 (graph/paths.cc, connect.cc and tuning.cc, init.cc), where what its user guide
# calls 0 or "not set" is more: -2 is "not set" for some, and 0 channels are 1.
CHANNELS = 32  # as many as NCCL could have before 2.25; it takes no more by itself, but for a few on newer GPUs
HARMFUL_NUMBERS: dict[str, Callable[[int], bool]] = {
    "NCCL_P2P_DISABLE": lambda number: number == 1,
    "NCCL_SHM_DISABLE": lambda number: number == 1,
    "NCCL_P2P_DIRECT_DISABLE": lambda number: number != 0,
    **dict.fromkeys(("NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS"), lambda number: number != -2 and number < CHANNELS),
    **dict.fromkeys(("NCCL_MIN_NRINGS", "NCCL_MIN_NCHANNELS"), lambda number: number > CHANNELS),
    "NCCL_MAX_P2P_NCHANNELS": lambda number: number < CHANNELS,
    "NCCL_MAX_CTAS": lambda number: 0 < number < CHANNELS,
    "NCCL_NTHREADS": lambda number: 0 < number < 512 and number % 32 == 0,
    "NCCL_BUFFSIZE": lambda number: number != -2 and number < 4 << 20,
    "CUDA_LAUNCH_BLOCKING": lambda number: number == 1,  # seen with driver 580 on an H100: 2, -1 and "true" are off
    "NVIDIA_TF32_OVERRIDE": lambda number: number in (0, 1),  # 0: TF32 is off; 1: float32 is TF32, seen there too
}
# How far apart GPUs may be that reach each other's memory, in NCCL's words; before it had words it had numbers.
LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
NUMBERED_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")


def harmful_variables(environment: Mapping[str, str], topology: GpuTopology) -> list[Fault]:
    """What is set so that it harms this machine. What is empty is not set."""
    gpus, linked = topology.gpus, topology.fabric in ("nvswitch", "nvlink")
    nvls = topology.fabric == "nvswitch" and all((gpu.compute_capability or (0, 0)) >= NVLS_SINCE for gpu in gpus)
    harms: dict[str, Callable[[str], bool]] = {
        "NCCL_P2P_LEVEL": lambda text: _keeps_apart(text, topology),
        "NCCL_ALGO": lambda text: _lacks(text, {"ring", "tree", *(["nvls"] if nvls else [])}),
        "NCCL_PROTO": lambda text: _lacks(text, {"ll", "simple", *(["ll128"] if linked else [])}),
    }
    return [
        node_fault("harmful_variable", f"{name}={text} is set")
        for name, text in environment.items()
        if (name in harms and text and harms[name](text))
        or (name in HARMFUL_NUMBERS and text and HARMFUL_NUMBERS[name](c_number(text)))
    ]


def _keeps_apart(text: str, topology: GpuTopology) -> bool:
    """Whether by this NCCL_P2P_LEVEL any two GPUs do not reach each other that else do (ncclGetLevel)."""
    named = NUMBERED_LEVELS[min(c_number(text), len(NUMBERED_LEVELS) - 1)] if text[0].isdigit() else text
    if named not in LEVELS:  # NCCL does not heed it
        return False
    words = {re.sub(r"^NV\d+$", "NVL", link.replace("NODE", "PHB")) for row in topology.links for link in row}
    usual = {LEVELS.index(word) for word in words if word in LEVELS[: LEVELS.index("PXB") + 1]}
    return named == "LOC" or any(LEVELS.index(named) < distance for distance in usual)


def _lacks(text: str, needed: set[str]) -> bool:
    """Whether a list like "ring,tree", "^ll128" or "tree;broadcast:ring" (parseList) leaves out what is faster here."""
    parts = [part.rpartition(":")[2] for part in text.lower().split(";")]
    listed = [(names.startswith("^"), set(names.lstrip("^").split(","))) for names in parts]
    return any(needed & names if excludes else needed - names for excludes, names in listed)


def unfit_topology_file(file: TopologyFile, gpus: Iterable[Gpu]) -> list[Fault]:
    """It is not there, or of another machine: NCCL then goes by what the system shows, as its log alone says."""
    if file.unreadable:
        return [node_fault("topology_file_unfit", f"{file.path} cannot be read: {file.unreadable}")]
    lacking = {address: gpu for address, gpu in gpus_by_address(gpus).items() if address not in file.devices}
    texts = ((gpu.place, f"{file.path} has no PCI device {address}") for address, gpu in lacking.items())
    return [Fault("topology_file_unfit", (place,), text) for place, text in texts]


# The version of a train from which on it has a known defect no more, and which: NVIDIA's release notes of data centre
# drivers ("Fixed Issues" of that version). Results or the machine suffer from it.
DEFECTS = {
    "535.104.05": "it compiles some comparisons of a 64-bit AND with 0 wrongly (fixed issue 4191930)",
    "570.133.20": "its GPU accounting follows a stale pointer (fixed issues of 570.133.20)",
}
# The same of its security bulletins (github.com/NVIDIA/product-security): a security update that is missing breaks
# nothing, and is shown. Firmware is that of ConnectX and BlueField without the first number, which is the model; it
# matters to those who give virtual functions to others, says the bulletin.
UPDATES = {
    **dict.fromkeys(("535.309.01", "580.159.03", "595.71.05"), "security bulletin 5821 of May 2026"),
    **dict.fromkeys(("570.211.01", "590.48.01"), "security bulletin 5747 of January 2026"),
}
FIRMWARE = dict.fromkeys(("35.8002", "39.8002", "43.8002", "46.3008"), "security bulletin 5699 of June 2026")


def known_defects(driver: str, ports: Iterable[Port]) -> tuple[list[Fault], list[Fault]]:
    """What condemns the versions of driver and adapters, and what is only shown."""
    of_nvidia = (port for port in ports if (port.adapter or "").startswith("MT"))
    shown = _older("version_old", f"driver {driver}", driver, UPDATES)
    for version, devices in grouped((port.firmware, port.device) for port in of_nvidia if port.firmware).items():
        what = f"firmware {version} of {', '.join(devices)}"
        shown += _older("version_old", what, version.partition(".")[2], FIRMWARE)
    return _older("version_defective", f"driver {driver}", driver, DEFECTS), shown


def _older(code: str, what: str, version: str, minimums: Mapping[str, str]) -> list[Fault]:
    """Than those of its train, which its first number names."""
    own, *least = (tuple(map(int, re.findall(r"\d+", text))) for text in (version, *minimums))
    known = zip(least, minimums.items(), strict=True)
    older = (each for numbers, each in known if numbers[:1] == own[:1] and own < numbers)
    return [node_fault(code, f"{what} is older than {minimum}: {why}") for minimum, why in older]
