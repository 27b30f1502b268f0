"""Which call of NVML gives which fact of a GPU: one each, so that a failing call costs one fact and never the run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

# nvml.h. Plain integers: pynvml 13 defines some of these constants as tuples.
ECC_CORRECTED, ECC_UNCORRECTED = 0, 1
ECC_VOLATILE, ECC_AGGREGATE = 0, 1
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
NVLINK_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}
NVLINK_REMOTE_SWITCH = 2
MAX_NVLINKS = 18
PCIE_TX, PCIE_RX = 0, 1
FIELD_MEMORY_TEMPERATURE = 82
FIELD_NVLINK_SPEED = 164  # Mbit/s by nvml.h but MB/s in fact; the link goes into scopeId
FIELD_RECOVERY_ACTION = 230
# The counters of each link of NVLink 5, which has none of NVLINK_COUNTERS; the link goes into scopeId too.
NVLINK_5_COUNTERS = {
    "malformed_packets": 206, "buffer_overruns": 207, "receive": 208, "remote_receive": 209, "general_receive": 210,
    "link_integrity": 211, "failed_recovery": 214, "recovery": 215, "effective": 219, "symbol": 221,
}  # fmt: skip
FIELDS_NVLINK_FEC = range(235, 251)
# By nvmlValueType_t. The first is double by nvml.h, but no field here is one, and counters come with it all the same.
VALUE_TYPES = ("ullVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

PCI_DEVICES = Path("/sys/bus/pci/devices")
LINK_WIDTHS = (1, 2, 4, 8, 12, 16, 32)

# Errors by which NVML says that there is no such thing here; all others are trouble.
NOT_HERE = ("NotSupported", "FunctionNotFound", "ArgumentVersionMismatch")


def named(error: BaseException, *names: str) -> bool:
    return type(error).__name__.removeprefix("NVMLError_") in names


def text(value: Any) -> Any:
    """Releases of nvidia-ml-py differ in what gives bytes and what gives text."""
    return value.decode() if isinstance(value, bytes) else value


def _fields(nvml: Any, handle: Any, fields: Iterable[Any]) -> list[Any]:
    """The values of fields, None for one that is not told. Raises what the first one says if none is."""
    told = list(nvml.nvmlDeviceGetFieldValues(handle, list(fields)))
    if all(each.nvmlReturn for each in told):
        raise nvml.NVMLError(told[0].nvmlReturn)
    return [None if each.nvmlReturn else getattr(each.value, VALUE_TYPES[each.valueType]) for each in told]


def _links(call: Callable[[int], Any], nvml: Any) -> list[Any]:
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


def _nvlink_remotes(nvml: Any, handle: Any) -> list[str]:
    def remote(link: int) -> str:
        if nvml.nvmlDeviceGetNvLinkState(handle, link) != 1:
            return ""
        with suppress(nvml.NVMLError, AttributeError):
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == NVLINK_REMOTE_SWITCH:
                return "switch"
            return str(text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)).lower()
        return "unknown"

    return _links(remote, nvml)


def _nvlink_errors(nvml: Any, handle: Any) -> dict[str, list[int | None]]:
    """For each kind of error the count of each link: those of NVLink 5 where there are any, else those before it."""

    def counts(number: int) -> list[int | None]:
        return _links(lambda link: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number), nvml)

    try:
        of_links = _link_fields(nvml, handle, NVLINK_5_COUNTERS.values())
    except nvml.NVMLError as error:
        if not named(error, *NOT_HERE, "InvalidArgument"):
            raise
        return {name: counts(number) for name, number in NVLINK_COUNTERS.items()}
    return dict(zip(NVLINK_5_COUNTERS, map(list, zip(*of_links, strict=True)), strict=True))


def _link_fields(nvml: Any, handle: Any, fields: Iterable[int]) -> list[list[int | None]]:
    """These fields of each NVLink."""
    fields = tuple(fields)
    return _links(lambda link: _fields(nvml, handle, [(field, link) for field in fields]), nvml)


def _fabric(nvml: Any, handle: Any) -> dict[str, int]:
    info = _fabric_info(nvml, handle)
    return {"state": info.state, "status": info.status}


def _fabric_health(nvml: Any, handle: Any) -> dict[str, Any]:
    info = _fabric_info(nvml, handle)
    return {"mask": info.healthMask, "clique": info.cliqueId, "cluster": bytes(info.clusterUuid).hex()}


def _fabric_info(nvml: Any, handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return info


def _pcie_width_able(nvml: Any, handle: Any) -> dict[str, int]:
    """By the system, which asks device and port apart. A virtual machine shows no port, or one that is none."""
    domain, _, rest = str(text(nvml.nvmlDeviceGetPciInfo(handle).busId)).lower().partition(":")
    device = (PCI_DEVICES / f"{domain[-4:]}:{rest}").resolve()
    widths = {"gpu": _lanes(device), "port": _lanes(device.parent)}
    if not widths["gpu"]:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return widths


def _lanes(device: Path) -> int:
    """0 if the system does not tell; so does a link that is not there, with 0 or 255 lanes."""
    with suppress(OSError, ValueError):
        lanes = int((device / "max_link_width").read_text())
        return lanes if lanes in LINK_WIDTHS else 0
    return 0


def _spare_rows(nvml: Any, handle: Any) -> dict[str, int]:
    told = nvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return {name: int(getattr(told, name)) for name in ("max", "high", "partial", "low", "none")}


def _sram_threshold(nvml: Any, handle: Any) -> bool:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


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
    "pcie_width_able": _pcie_width_able,
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
    "recovery_action": lambda n, h: _fields(n, h, [FIELD_RECOVERY_ACTION])[0],
    "numa_node": lambda n, h: n.nvmlDeviceGetNumaNodeId(h),
    "cpu_affinity": lambda n, h: [int(word) for word in n.nvmlDeviceGetCpuAffinity(h, 16)],
    "fabric": _fabric,
    "fabric_health": _fabric_health,
    "nvlink_states": lambda n, h: _links(lambda link: n.nvmlDeviceGetNvLinkState(h, link), n),
    "nvlink_versions": lambda n, h: _links(lambda link: n.nvmlDeviceGetNvLinkVersion(h, link), n),
    "nvlink_remote_types": lambda n, h: _links(lambda link: n.nvmlDeviceGetNvLinkRemoteDeviceType(h, link), n),
    "nvlink_remotes": _nvlink_remotes,
    "nvlink_speeds": lambda n, h: _links(lambda link: _fields(n, h, [(FIELD_NVLINK_SPEED, link)])[0] / 1000, n),
    "processes": lambda n, h: [_process(process) for process in n.nvmlDeviceGetComputeRunningProcesses(h)],
    "ecc_uncorrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_VOLATILE),
    "ecc_uncorrected_aggregate": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_AGGREGATE),
    "ecc_corrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_CORRECTED, ECC_VOLATILE),
    "sram_threshold_exceeded": _sram_threshold,
    "remapped_rows": lambda n, h: list(n.nvmlDeviceGetRemappedRows(h)),
    "retired_pages_pending": lambda n, h: n.nvmlDeviceGetRetiredPagesPendingStatus(h),
    "memory_unrepairable": lambda n, h: bool(n.nvmlDeviceGetUnrepairableMemoryFlag_v1(h)),
    "pcie_replays": lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h),
    "nvlink_errors": _nvlink_errors,
    "nvlink_fec": lambda n, h: _link_fields(n, h, FIELDS_NVLINK_FEC),
    "spare_rows": _spare_rows,
    "utilization_percent": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_used_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used,
    "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, TEMPERATURE_GPU),
    "memory_temperature_c": lambda n, h: _fields(n, h, [FIELD_MEMORY_TEMPERATURE])[0],
    "power_watts": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000,
    "sm_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_SM),
    "memory_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_MEMORY),
    "clock_event_reasons": _clock_event_reasons,
    "pcie_transmitted_kilobytes_per_second": lambda n, h: n.nvmlDeviceGetPcieThroughput(h, PCIE_TX),
    "pcie_received_kilobytes_per_second": lambda n, h: n.nvmlDeviceGetPcieThroughput(h, PCIE_RX),
}
