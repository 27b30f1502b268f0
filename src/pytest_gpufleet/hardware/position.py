"""Where a GPU sits in its machine: what a technician has to open."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import sysfs
from pytest_gpufleet.hardware.link_facts import pci_device

PCI_SLOTS = Path("/sys/bus/pci/slots")
NO_BASEBOARD = 0  # nvml.h, nvmlDeviceGetModuleId: "For non-baseboard products, this ID would always be 0"
ON_THE_MACHINE = 0  # nvml.h, nvmlGpuVirtualizationMode_t: NVML_GPU_VIRTUALIZATION_MODE_NONE


def module_id(nvml: Any, handle: Any) -> int:
    """Which module of its baseboard it is."""
    number = ctypes.c_uint()  # pynvml's own is one for all threads
    if status := nvml.nvmlDeviceGetModuleId(handle, ctypes.byref(number)):
        raise nvml.NVMLError(status)
    if number.value == NO_BASEBOARD:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return number.value


def physical_slot(nvml: Any, handle: Any) -> str:
    """What the firmware calls the slot that the device is in, by the kernel (Documentation/ABI/testing/sysfs-bus-pci:
    `address` of a slot is domain, bus and device). A virtual machine has slots that its hypervisor made up."""
    if nvml.nvmlDeviceGetVirtualizationMode(handle) != ON_THE_MACHINE:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    address = pci_device(nvml, handle).name.partition(".")[0]
    for slot in sorted(PCI_SLOTS.glob("*")):
        if sysfs.text(slot / "address") == address:
            return slot.name
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
