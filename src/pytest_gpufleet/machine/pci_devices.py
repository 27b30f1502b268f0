"""GPUs, network adapters and NVMe drives as PCIe devices, and every port between them and the root.

Nothing here asks a device's driver, and no device is asked but for the state of its link: what the kernel counts is in
its memory. The counters of InfiniBand ports are another matter: on HGX B200 their driver writes an error into the
kernel log for each one that it may not read (leptonai/gpud, issue 1164).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import AS_ROOT, Unreadable

# Where the kernel lists them, what they are, and from where the name is: the first that lists a device says what it is.
KINDS = (
    ("sys/bus/pci/drivers/nvidia/*:*", "gpu"),
    ("sys/class/infiniband/*/device", "adapter"),
    ("sys/class/net/*/device", "network"),
    ("sys/class/nvme/*/device", "nvme"),
)
# Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats: a line each, its name may have blanks.
ERRORS = {"corrected": "aer_dev_correctable", "nonfatal": "aer_dev_nonfatal", "fatal": "aer_dev_fatal"}
TOTAL = "TOTAL_"  # of messages, several errors may have come in one

# linux/pci_regs.h: where extended capabilities begin, the number of Access Control Services, and its control register.
EXTENDED, ACS, ACS_CONTROL = 0x100, 0x000D, 6
UNPRIVILEGED = 64  # drivers/pci/pci-sysfs.c: how many bytes of the config space anybody may read


def read(root: Path = Path("/")) -> dict[str, dict[str, Any]]:
    """By address ("0000:18:00.0"), a port before what is below it:

    `kind` ("gpu", "adapter" for one of InfiniBand or RoCE, "network", "nvme", "port"), `name` ("mlx5_0"; the address of
    a GPU or port), `above` (the address of the port above, None at the root), `numa_node`, `lanes`, `lanes_able`,
    `speed`, `speed_able` (GT/s) of the link that leads to it, of a port below which a link begins of that one: None
    where the system does not tell. `iommu`: how its addresses are translated ("identity": not; "DMA", "DMA-FQ"), None
    where no IOMMU stands before it. `errors`: those that it counted since boot, by kind ("corrected", "nonfatal",
    "fatal") and name; None where nobody collects them: its root port sends no interrupts to the kernel, and none were
    ever counted. Empty where there are no such devices.
    """
    collecting = {path.name.rpartition(":")[0] for path in (root / "sys/bus/pci_express/drivers/aer").glob("*:*")}
    devices: dict[str, dict[str, Any]] = {}
    for device, kind, name in _endpoints(root):
        folders = [each for each in reversed((device, *device.parents)) if tools.PCI_STEP.fullmatch(each.name)]
        for above, folder in zip((None, *folders), folders, strict=False):
            what = (kind, name) if folder == device else ("port", folder.name)
            known = devices.get(folder.name)
            if known is None:
                devices[folder.name] = _device(folder, above, *what, collecting={folders[0].name} <= collecting)
            elif known["kind"] == "port":
                known["kind"], known["name"] = what
    return devices


def acs(root: Path = Path("/")) -> dict[str, int | None]:
    """Of each port between a GPU, adapter or drive and the root its control register of Access Control Services, by
    address; None of one that has none. Unreadable where this user may not read it, which only root may."""
    ports = {
        folder.name: folder
        for device, _, _ in _endpoints(root)
        for folder in device.parents
        if tools.PCI_STEP.fullmatch(folder.name)
    }
    return {address: _acs_control(folder / "config") for address, folder in sorted(ports.items())}


def _endpoints(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Where the kernel has them, what they are, and their names. A network interface of an RDMA adapter is that one."""
    seen = set()
    for pattern, kind in KINDS:
        for link in sorted(root.glob(pattern)):
            device = link.resolve()
            if tools.PCI_STEP.fullmatch(device.name) and device not in seen:
                seen.add(device)
                yield device, kind, device.name if kind == "gpu" else link.parent.name


def _device(folder: Path, above: Path | None, kind: str, name: str, *, collecting: bool) -> dict[str, Any]:
    counts = {kind: _counts(folder / file) for kind, file in ERRORS.items()}
    known = {kind: each for kind, each in counts.items() if each is not None}
    return {
        "kind": kind,
        "name": name,
        "above": above.name if above else None,
        "numa_node": tools.number(folder / "numa_node"),
        "lanes": tools.lanes(folder / "current_link_width"),
        "lanes_able": tools.lanes(folder / "max_link_width"),
        "speed": tools.number(folder / "current_link_speed"),
        "speed_able": tools.number(folder / "max_link_speed"),
        "iommu": tools.text(folder / "iommu_group/type"),
        "errors": known if known and (collecting or any(known.values())) else None,
    }


def _counts(path: Path) -> dict[str, int] | None:
    """Those above zero; None where the device counts none."""
    text = tools.text(path)
    if text is None:
        return None
    lines = (line.rsplit(None, 1) for line in text.splitlines())
    counts = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    return {name: count for name, count in counts.items() if count and not name.startswith(TOTAL)}


def _acs_control(config: Path) -> int | None:
    with config.open("rb", buffering=0) as file:
        if not os.pread(file.fileno(), 1, UNPRIVILEGED):
            raise Unreadable("only root may read the settings of PCIe ports (Access Control Services)", AS_ROOT)
        at, seen = EXTENDED, set[int]()
        while at >= EXTENDED and at not in seen:
            seen.add(at)
            header = int.from_bytes(os.pread(file.fileno(), 4, at), "little")
            if header & 0xFFFF == ACS:
                return int.from_bytes(os.pread(file.fileno(), 2, at + ACS_CONTROL), "little")
            at = header >> 20
    return None


PCI_DEVICES = HostFact("pci_devices", dict[str, dict[str, Any]], read)
PCIE_ACS = HostFact("pcie_acs", dict[str, int | None], acs, subject="acs", on_request=True)
