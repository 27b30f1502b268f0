"""Facts of a GPU's links: NVLinks, the fabric that they are part of, and PCIe."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import network_ports, sysfs
from pytest_gpufleet.hardware.nvml_answers import NOT_HERE, field_values, named, text

NVLINK_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}
NVLINK_REMOTE_SWITCH = 2
MAX_NVLINKS = 18
FIELD_NVLINK_SPEED = 164  # Mbit/s by nvml.h but MB/s in fact; the link goes into scopeId
# The counters of each link of NVLink 5, which has none of NVLINK_COUNTERS; the link goes into scopeId too.
NVLINK_5_COUNTERS = {
    "malformed_packets": 206, "buffer_overruns": 207, "receive": 208, "remote_receive": 209, "general_receive": 210,
    "link_integrity": 211, "failed_recovery": 214, "recovery": 215, "effective": 219, "symbol": 221,
}  # fmt: skip
FIELDS_NVLINK_FEC = range(235, 251)

PCI_DEVICES = Path("/sys/bus/pci/devices")


def each_link(call: Callable[[int], Any], nvml: Any) -> list[Any]:
    """A value for each NVLink of a GPU; the first link that does not exist ends the list."""
    values: list[Any] = []
    for link in range(MAX_NVLINKS):
        try:
            values.append(call(link))
        except nvml.NVMLError as error:
            if not values or not named(error, *NOT_HERE, "InvalidArgument"):
                raise
            break
    return values


def nvlink_remotes(nvml: Any, handle: Any) -> list[str]:
    def remote(link: int) -> str:
        if nvml.nvmlDeviceGetNvLinkState(handle, link) != 1:
            return ""
        with suppress(nvml.NVMLError, AttributeError):
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == NVLINK_REMOTE_SWITCH:
                return "switch"
            return str(text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)).lower()
        return "unknown"

    return each_link(remote, nvml)


def nvlink_speeds(nvml: Any, handle: Any) -> list[float]:
    """In GB/s."""
    return each_link(lambda link: field_values(nvml, handle, [(FIELD_NVLINK_SPEED, link)])[0] / 1000, nvml)


def nvlink_errors(nvml: Any, handle: Any) -> dict[str, list[int | None]]:
    """For each kind of error the count of each link: those of NVLink 5 where there are any, else those before it."""

    def counts(number: int) -> list[int | None]:
        return each_link(lambda link: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number), nvml)

    try:
        of_links = link_fields(nvml, handle, NVLINK_5_COUNTERS.values())
    except nvml.NVMLError as error:
        if not named(error, *NOT_HERE):
            raise
        return {name: counts(number) for name, number in NVLINK_COUNTERS.items()}
    return dict(zip(NVLINK_5_COUNTERS, map(list, zip(*of_links, strict=True)), strict=True))


def link_fields(nvml: Any, handle: Any, wanted: Iterable[int]) -> list[list[int | None]]:
    """These fields of each NVLink."""
    wanted = tuple(wanted)
    return each_link(lambda link: field_values(nvml, handle, [(field, link) for field in wanted]), nvml)


def fabric(nvml: Any, handle: Any) -> dict[str, int]:
    info = _fabric_info(nvml, handle)
    return {"state": info.state, "status": info.status}


def fabric_health(nvml: Any, handle: Any) -> dict[str, Any]:
    info = _fabric_info(nvml, handle)
    return {"mask": info.healthMask, "clique": info.cliqueId, "cluster": bytes(info.clusterUuid).hex()}


def _fabric_info(nvml: Any, handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return info


def pcie_width_able(nvml: Any, handle: Any) -> dict[str, int]:
    """By the system, which asks device and port apart. A virtual machine shows no port, or one that is none."""
    device = pci_device(nvml, handle)
    ends = {"gpu": device, "port": device.parent}
    widths = {name: int(sysfs.lanes(each / "max_link_width") or 0) for name, each in ends.items()}
    if not widths["gpu"]:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return widths


def network_adapters(nvml: Any, handle: Any) -> list[str]:
    """Those next to the GPU, by the system."""
    return network_ports.nearest(pci_device(nvml, handle))


def pci_device(nvml: Any, handle: Any) -> Path:
    """Where the system has it, below the ports and switches on its way."""
    domain, _, rest = str(text(nvml.nvmlDeviceGetPciInfo(handle).busId)).lower().partition(":")
    return (PCI_DEVICES / f"{int(domain, 16):04x}:{rest}").resolve()
