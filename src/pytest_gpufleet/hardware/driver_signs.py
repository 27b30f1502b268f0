"""Whether a machine has NVIDIA hardware, seen without its driver: a server whose driver is dead is no rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_gpufleet.hardware import sysfs
from pytest_gpufleet.model.language import some

NVIDIA = "0x10de"
# linux/pci_ids.h: VGA, 3D controllers (most GPUs of data centres) and other display, and the bridges NVSwitches are.
CLASSES = {"0x0300": "GPU", "0x0302": "GPU", "0x0380": "GPU", "0x0680": "NVSwitch"}
MOST = 3


def signs_of_nvidia(root: Path = Path("/")) -> list[str]:
    """What speaks for NVIDIA hardware below `root`, in a few words each; empty where nothing does.

    A container without GPUs sees the PCI devices of its host, and often /proc/driver/nvidia too.
    """
    found = [(words, list(look(root))) for words, look in SIGNS.items()]
    return [f"{words}: {some(names, MOST)}" for words, names in found if names]


def _pci_devices(root: Path) -> Iterator[str]:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = CLASSES.get((sysfs.text(device / "class") or "")[:6])
        if kind and sysfs.text(device / "vendor") == NVIDIA:
            yield f"{kind} {device.name}"


def _existing(root: Path, pattern: str) -> Iterator[str]:
    return (f"/{path.relative_to(root)}" for path in sorted(root.glob(pattern)))


SIGNS: dict[str, Callable[[Path], Iterator[str]]] = {
    "on the PCI bus": _pci_devices,
    "device files": lambda root: _existing(root, "dev/nvidia*"),
    "a loaded driver": lambda root: _existing(root, "proc/driver/nvidia"),
}
