"""Which call of NVML gives which fact of a GPU: one each, so that a failing call costs one fact and never the run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_gpufleet.hardware import link_facts, position
from pytest_gpufleet.hardware.link_facts import each_link
from pytest_gpufleet.hardware.nvml_answers import NOT_HERE, field_values, named

# nvml.h. Plain integers: pynvml 13 defines some of these constants as tuples.
ECC_CORRECTED, ECC_UNCORRECTED = 0, 1
ECC_PLACES = {"dram": 2, "sram": 7}
ECC_VOLATILE, ECC_AGGREGATE = 0, 1
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
PCIE_TX, PCIE_RX = 0, 1
FIELD_MEMORY_TEMPERATURE = 82
FIELD_RECOVERY_ACTION = 230
FIELDS_SLOWDOWN = {"sw_thermal": 269, "hw_thermal": 270, "power_brake": 271}  # ns
FIELD_THERMAL_POLICY = 75  # ns


def _spare_rows(nvml: Any, handle: Any) -> dict[str, int]:
    told = nvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return {name: int(getattr(told, name)) for name in ("max", "high", "partial", "low", "none")}


def _sram_threshold(nvml: Any, handle: Any) -> bool:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _slowdown_ns(nvml: Any, handle: Any) -> dict[str, int]:
    fields = {**FIELDS_SLOWDOWN, "thermal": FIELD_THERMAL_POLICY}
    told = dict(zip(fields, field_values(nvml, handle, fields.values()), strict=True))
    if told["sw_thermal"] is not None:  # the newer counters hold what the older one does
        del told["thermal"]
    return {name: value for name, value in told.items() if value is not None}


def _ecc_corrected(nvml: Any, handle: Any) -> dict[str, int]:
    """Not every model tells both places, or knows of both."""
    told: dict[str, int] = {}
    missing: Exception | None = None
    for name, place in ECC_PLACES.items():
        try:
            told[name] = nvml.nvmlDeviceGetMemoryErrorCounter(handle, ECC_CORRECTED, ECC_VOLATILE, place)
        except nvml.NVMLError as error:
            if not named(error, *NOT_HERE, "InvalidArgument"):
                raise
            missing = error
    if missing and not told:
        raise missing
    return told


def _gsp_firmware(nvml: Any, handle: Any) -> str:
    version = nvml.nvmlDeviceGetGspFirmwareVersion(handle)
    return version.decode() if isinstance(version, bytes) else str(version)  # the one text that pynvml 13 leaves bytes


def _inforom(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceValidateInforom(handle)
    except nvml.NVMLError as error:
        if named(error, "CorruptedInforom"):
            return False
        raise
    return True


def _temperature_limits(nvml: Any, handle: Any) -> dict[str, int | None]:
    """In degrees Celsius; None for a threshold that this device does not have. NotSupported if it has none."""
    limits: dict[str, int | None] = {}
    missing: Exception | None = None
    for name, number in THRESHOLDS.items():
        try:
            limits[name] = nvml.nvmlDeviceGetTemperatureThreshold(handle, number)
        except nvml.NVMLError as error:
            if not named(error, *NOT_HERE):
                raise
            limits[name], missing = None, error
    if missing and not any(limits.values()):
        raise missing
    return limits


def _clock_event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (nvml.NVMLError, AttributeError) as error:
        if isinstance(error, nvml.NVMLError) and not named(error, *NOT_HERE):
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before driver 535


def _process(process: Any) -> str:
    try:
        name = Path(f"/proc/{process.pid}/comm").read_text(errors="replace").strip()  # anybody may choose it
    except OSError:
        name = "of another container or user"
    memory = f", {process.usedGpuMemory / 2**30:.1f} GiB" if process.usedGpuMemory else ""
    return f"process {process.pid} ({name}){memory}"


# Every fact of model/facts.py but "p2p", which is asked of pairs.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda n, h: n.nvmlDeviceGetName(h),
    "uuid": lambda n, h: n.nvmlDeviceGetUUID(h),
    "serial": lambda n, h: n.nvmlDeviceGetSerial(h),
    "board_part_number": lambda n, h: n.nvmlDeviceGetBoardPartNumber(h),
    "vbios": lambda n, h: n.nvmlDeviceGetVbiosVersion(h),
    "gsp_firmware": _gsp_firmware,
    "inforom_version": lambda n, h: n.nvmlDeviceGetInforomImageVersion(h),
    "inforom_valid": _inforom,
    "pci_bus_id": lambda n, h: n.nvmlDeviceGetPciInfo(h).busId,
    "pci_device_id": lambda n, h: n.nvmlDeviceGetPciInfo(h).pciDeviceId,
    "minor": lambda n, h: n.nvmlDeviceGetMinorNumber(h),
    "memory_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total,
    "compute_capability": lambda n, h: list(n.nvmlDeviceGetCudaComputeCapability(h)),
    "brand": lambda n, h: n.nvmlDeviceGetBrand(h),
    "virtualization": lambda n, h: n.nvmlDeviceGetVirtualizationMode(h),
    "cuda_cores": lambda n, h: n.nvmlDeviceGetNumGpuCores(h),
    "memory_bus_bits": lambda n, h: n.nvmlDeviceGetMemoryBusWidth(h),
    "sm_clock_max_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, CLOCK_SM),
    "memory_clock_max_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, CLOCK_MEMORY),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_generation_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_width_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h),
    "pcie_width_able": link_facts.pcie_width_able,
    "network_adapters": link_facts.network_adapters,
    "module_id": position.module_id,
    "physical_slot": position.physical_slot,
    "ecc_mode": lambda n, h: list(n.nvmlDeviceGetEccMode(h)),
    "ecc_mode_default": lambda n, h: n.nvmlDeviceGetDefaultEccMode(h),
    "mig_mode": lambda n, h: list(n.nvmlDeviceGetMigMode(h)),
    "compute_mode": lambda n, h: n.nvmlDeviceGetComputeMode(h),
    "persistence_mode": lambda n, h: n.nvmlDeviceGetPersistenceMode(h),
    "power_limit_watts": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "power_limit_default_watts": lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000,
    "application_clock_mhz": lambda n, h: n.nvmlDeviceGetApplicationsClock(h, CLOCK_SM),
    "application_clock_default_mhz": lambda n, h: n.nvmlDeviceGetDefaultApplicationsClock(h, CLOCK_SM),
    "temperature_limits_c": _temperature_limits,
    "recovery_action": lambda n, h: field_values(n, h, [FIELD_RECOVERY_ACTION])[0],
    "numa_node": lambda n, h: n.nvmlDeviceGetNumaNodeId(h),
    "cpu_affinity": lambda n, h: [int(word) for word in n.nvmlDeviceGetCpuAffinity(h, 16)],
    "fabric": link_facts.fabric,
    "fabric_health": link_facts.fabric_health,
    "nvlink_states": lambda n, h: each_link(lambda link: n.nvmlDeviceGetNvLinkState(h, link), n),
    "nvlink_versions": lambda n, h: each_link(lambda link: n.nvmlDeviceGetNvLinkVersion(h, link), n),
    "nvlink_remote_types": lambda n, h: each_link(lambda link: n.nvmlDeviceGetNvLinkRemoteDeviceType(h, link), n),
    "nvlink_remotes": link_facts.nvlink_remotes,
    "nvlink_speeds": link_facts.nvlink_speeds,
    "processes": lambda n, h: [_process(process) for process in n.nvmlDeviceGetComputeRunningProcesses(h)],
    "ecc_uncorrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_VOLATILE),
    "ecc_uncorrected_aggregate": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_AGGREGATE),
    "ecc_corrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_CORRECTED, ECC_VOLATILE),
    "sram_threshold_exceeded": _sram_threshold,
    "remapped_rows": lambda n, h: list(n.nvmlDeviceGetRemappedRows(h)),
    "retired_pages_pending": lambda n, h: n.nvmlDeviceGetRetiredPagesPendingStatus(h),
    "memory_unrepairable": lambda n, h: bool(n.nvmlDeviceGetUnrepairableMemoryFlag_v1(h)),
    "pcie_replays": lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h),
    "slowdown_ns": _slowdown_ns,
    "ecc_corrected": _ecc_corrected,
    "nvlink_errors": link_facts.nvlink_errors,
    "nvlink_fec": lambda n, h: link_facts.link_fields(n, h, link_facts.FIELDS_NVLINK_FEC),
    "spare_rows": _spare_rows,
    "utilization_percent": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_used_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used,
    "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, TEMPERATURE_GPU),
    "memory_temperature_c": lambda n, h: field_values(n, h, [FIELD_MEMORY_TEMPERATURE])[0],
    "power_watts": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000,
    "sm_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_SM),
    "memory_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_MEMORY),
    "clock_event_reasons": _clock_event_reasons,
    "pcie_transmitted_kilobytes_per_second": lambda n, h: n.nvmlDeviceGetPcieThroughput(h, PCIE_TX),
    "pcie_received_kilobytes_per_second": lambda n, h: n.nvmlDeviceGetPcieThroughput(h, PCIE_RX),
}
