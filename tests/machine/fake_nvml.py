"""A machine that is described instead of present: the part of pynvml that pytest-gpufleet uses."""

from dataclasses import dataclass
from types import SimpleNamespace

import pynvml

SWITCH = -1
SLOTS = 18
FAR = 50  # nvml.h: NVML_TOPOLOGY_SYSTEM


@dataclass(frozen=True)
class Card:
    """One GPU. `links`: where each NVLink ends, in a switch or in the GPU of that index; None for one that is down."""

    index: int
    links: tuple[int | None, ...] = ()
    name: str = "NVIDIA H200"

    @property
    def uuid(self):
        return f"GPU-{self.index:08x}-77aa-4c1e-9b1d-5a0c33e9f100"

    @property
    def bus_id(self):
        return f"00000000:{0x1B + 0x10 * self.index:02X}:00.0"


def failed(error):
    raise pynvml.NVMLError(error)


def not_supported(*_):
    failed(pynvml.NVML_ERROR_NOT_SUPPORTED)


class FakeNvml:
    """Stands in for the module pynvml.

    `distance[i, j]` is the nvmlGpuTopologyLevel_t of two GPUs (default: SYS); `unsupported` names functions that this
    driver does not have; `lost` are indices that have fallen off the bus; `broken` is what nvmlInit raises.
    """

    NVMLError, __spec__ = pynvml.NVMLError, pynvml.__spec__

    def __init__(self, *cards, distance=None, unsupported=(), lost=(), broken=None, cuda_driver=13020, processes=None):
        self.processes = processes or {}
        self.cards, self.distance, self.lost = cards, distance or {}, lost
        self.unsupported, self.broken, self.cuda_driver = unsupported, broken, cuda_driver
        self.sessions = 0

    def __getattr__(self, name):
        answer = not_supported if name in self.unsupported else ANSWERS.get(name)
        if answer is None:
            raise AttributeError(name)

        def call(*args):
            assert self.sessions > 0, f"{name} outside nvmlInit and nvmlShutdown"
            return answer(self, *args)

        return call

    def nvmlInit(self):  # noqa: N802
        if self.broken is not None:
            failed(self.broken)
        self.sessions += 1

    def nvmlShutdown(self):  # noqa: N802
        self.sessions -= 1


ANSWERS = {
    "nvmlSystemGetDriverVersion": lambda nvml: "580.159.04",
    "nvmlSystemGetCudaDriverVersion_v2": lambda nvml: nvml.cuda_driver,
    "nvmlDeviceGetCount": lambda nvml: len(nvml.cards),
    "nvmlDeviceGetHandleByIndex": lambda nvml, index: (
        failed(pynvml.NVML_ERROR_GPU_IS_LOST) if index in nvml.lost else nvml.cards[index]
    ),
    "nvmlDeviceGetHandleByUUID": lambda nvml, uuid: next(card for card in nvml.cards if card.uuid == uuid),
    "nvmlDeviceGetUtilizationRates": lambda nvml, card: SimpleNamespace(gpu=10 * card.index, memory=0),
    "nvmlDeviceGetMinorNumber": lambda nvml, card: 7 - card.index,  # not always as nvidia-smi counts
    "nvmlDeviceGetName": lambda nvml, card: card.name,
    "nvmlDeviceGetUUID": lambda nvml, card: card.uuid,
    "nvmlDeviceGetSerial": lambda nvml, card: f"165432400{card.index}",
    "nvmlDeviceGetBoardPartNumber": lambda nvml, card: b"692-2G520-0282-000",  # bytes, as some releases give it
    "nvmlDeviceGetVbiosVersion": lambda nvml, card: "96.00.A5.00.1A",
    "nvmlDeviceGetGspFirmwareVersion": lambda nvml, card: b"580.95.05",
    "nvmlDeviceGetMemoryInfo": lambda nvml, card: SimpleNamespace(total=150754820096),
    "nvmlDeviceGetPciInfo": lambda nvml, card: SimpleNamespace(busId=card.bus_id),
    "nvmlDeviceGetCudaComputeCapability": lambda nvml, card: (9, 0),
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda nvml, card: 1,  # idle
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda nvml, card: 5,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda nvml, card: 8,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda nvml, card: 16,
    "nvmlDeviceGetPowerManagementLimit": lambda nvml, card: 700_000,  # what was asked for
    "nvmlDeviceGetEnforcedPowerLimit": lambda nvml, card: 650_000,
    "nvmlDeviceGetComputeRunningProcesses": lambda nvml, card: nvml.processes.get(card.index, []),
    "nvmlDeviceGetNvLinkState": lambda nvml, card, link: (
        int(card.links[link] is not None) if link < len(card.links) else not_supported()
    ),
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda nvml, card, link: (
        (2 if card.links[link] == SWITCH else 0) if link < len(card.links) else not_supported()
    ),
    "nvmlDeviceGetNvLinkRemotePciInfo": lambda nvml, card, link: SimpleNamespace(
        busId=nvml.cards[card.links[link]].bus_id.lower()
    ),
    "nvmlDeviceGetTopologyCommonAncestor": lambda nvml, *two: nvml.distance.get(
        tuple(sorted(card.index for card in two)), FAR
    ),
}


def switched(count, down=0, **machine):
    """GPUs linked through NVSwitches; on the last one the first `down` links are down."""
    whole = (SWITCH,) * SLOTS
    last = (None,) * down + (SWITCH,) * (SLOTS - down)
    return FakeNvml(*(Card(i, last if i == count - 1 else whole) for i in range(count)), **machine)


def linked(*lines, **machine):
    """GPUs linked directly: lines[i] has one entry for each NVLink of GPU i, the index of the GPU at its other end."""
    return FakeNvml(*(Card(i, ends) for i, ends in enumerate(lines)), **machine)


def plain(count, **machine):
    return FakeNvml(*(Card(i) for i in range(count)), **machine)
