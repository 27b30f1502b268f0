"""The facts of a GPU, each read by one call of NVML, so that a failing call costs one fact; and which it must have."""

import ctypes
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import network_ports, tools
from pytest_gpufleet.model.place import FACTS, Gpu, Missing

# Errors by which NVML says that there is no such thing here; all others are trouble.
NOT_HERE = ("NotSupported", "FunctionNotFound", "ArgumentVersionMismatch")
INVALID_ARGUMENT, NOT_SUPPORTED = 2, 3  # nvml.h: nvmlReturn_t
# By nvmlValueType_t. The first is double by nvml.h, but no field here is one, and counters come with it all the same.
VALUE_TYPES = ("ullVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def named(error: BaseException, *names: str) -> bool:
    return type(error).__name__.removeprefix("NVMLError_") in names


def text(value: Any) -> Any:
    """Releases of nvidia-ml-py differ in what gives bytes and what gives text."""
    return value.decode() if isinstance(value, bytes) else value


def field_values(nvml: Any, handle: Any, wanted: Iterable[Any]) -> list[Any]:
    """The values of fields, None for one without. If none has any, raises what the first one says; a field that the
    driver does not know is an invalid argument to it: there is no such thing here."""
    values = list(nvml.nvmlDeviceGetFieldValues(handle, list(wanted)))
    if all(each.nvmlReturn for each in values):
        error = values[0].nvmlReturn
        raise nvml.NVMLError(NOT_SUPPORTED if error == INVALID_ARGUMENT else error)
    return [None if each.nvmlReturn else getattr(each.value, VALUE_TYPES[each.valueType]) for each in values]


NVLINK_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}
NVLINK_REMOTE_SWITCH = 2
MAX_NVLINKS = 18
FIELD_NVLINK_SPEED = 164  # Mbit/s by nvml.h but MB/s in fact; the link goes into scopeId
# The counters of each link of NVLink 5, which has none of NVLINK_COUNTERS; the link goes into scopeId too.
NVLINK_5_COUNTERS = {
    "malformed_packets": 206, "buffer_overruns": 207, "receive": 208, "remote_receive": 209, "general_receive": 210,
    "link_integrity": 211, "failed_recovery": 214, "recovery": 215, "effective": 219, "symbol": 221,
}  # fmt: skip
FIELDS_NVLINK_DATA = ((138, 0xFFFFFFFF), (139, 0xFFFFFFFF))  # KiB sent, received; UINT_MAX in scopeId: by all links


def each_link(nvml: Any, call: Callable[[int], Any]) -> list[Any]:
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

    return each_link(nvml, remote)


def nvlink_errors(nvml: Any, handle: Any) -> dict[str, list[int | None]]:
    """For each kind of error the count of each link: those of NVLink 5 where there are any, else those before it."""
    try:
        fields = [*NVLINK_5_COUNTERS.values()]
        of_links = each_link(nvml, lambda link: field_values(nvml, handle, [(field, link) for field in fields]))
    except nvml.NVMLError as error:
        if not named(error, *NOT_HERE):
            raise
        ask = nvml.nvmlDeviceGetNvLinkErrorCounter
        return {
            name: each_link(nvml, lambda link, number=number: ask(handle, link, number))  # type: ignore[misc]
            for name, number in NVLINK_COUNTERS.items()
        }
    return dict(zip(NVLINK_5_COUNTERS, map(list, zip(*of_links, strict=True)), strict=True))


def fabric(nvml: Any, handle: Any, health: bool = False) -> dict[str, Any]:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    if health:
        return {"mask": info.healthMask, "clique": info.cliqueId, "cluster": bytes(info.clusterUuid).hex()}
    return {"state": info.state, "status": info.status}


PCI_DEVICES, PCI_SLOTS = Path("/sys/bus/pci/devices"), Path("/sys/bus/pci/slots")


def pci_device(nvml: Any, handle: Any) -> Path:
    """Where the system has it, below the ports and switches on its way."""
    domain, _, rest = str(text(nvml.nvmlDeviceGetPciInfo(handle).busId)).lower().partition(":")
    return (PCI_DEVICES / f"{int(domain, 16):04x}:{rest}").resolve()


def pcie_width_able(nvml: Any, handle: Any) -> dict[str, int]:
    if lanes := tools.lanes(pci_device(nvml, handle) / "max_link_width"):
        return {"gpu": int(lanes)}
    raise nvml.NVMLError(NOT_SUPPORTED)


def pci_bus_cpus(nvml: Any, handle: Any) -> list[int]:
    """The processors next to the root of its PCI bus (Documentation/ABI/testing/sysfs-bus-pci, `cpulistaffinity`)."""
    device = pci_device(nvml, handle)
    root = next((each for each in reversed(device.parents) if each.name.startswith("pci")), device)
    lists = [tools.text(bus / "cpulistaffinity") for bus in (root / "pci_bus").glob("*")]
    if not any(lists):
        raise nvml.NVMLError(NOT_SUPPORTED)
    return sorted(set[int]().union(*map(tools.listed, filter(None, lists))))


NO_BASEBOARD = 0  # nvml.h, nvmlDeviceGetModuleId: "For non-baseboard products, this ID would always be 0"
ON_THE_MACHINE = 0  # nvml.h, nvmlGpuVirtualizationMode_t: NVML_GPU_VIRTUALIZATION_MODE_NONE


def module_id(nvml: Any, handle: Any) -> int:
    number = ctypes.c_uint()  # pynvml's own is one for all threads
    status = nvml.nvmlDeviceGetModuleId(handle, ctypes.byref(number))
    if status or number.value == NO_BASEBOARD:
        raise nvml.NVMLError(status or NOT_SUPPORTED)
    return number.value


def physical_slot(nvml: Any, handle: Any) -> str:
    """By the kernel (Documentation/ABI/testing/sysfs-bus-pci, slots). Those of a virtual machine are made up."""
    if nvml.nvmlDeviceGetVirtualizationMode(handle) == ON_THE_MACHINE:
        address = pci_device(nvml, handle).name.partition(".")[0]
        for slot in sorted(PCI_SLOTS.glob("*")):
            if tools.text(slot / "address") == address:
                return slot.name
    raise nvml.NVMLError(NOT_SUPPORTED)


# nvml.h. Plain integers: pynvml 13 defines some of these constants as tuples.
ECC_CORRECTED, ECC_UNCORRECTED, ECC_VOLATILE, ECC_AGGREGATE = 0, 1, 0, 1
ECC_PLACES = {"dram": 2, "sram": 7}
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
FIELD_MEMORY_TEMPERATURE, FIELD_RECOVERY_ACTION = 82, 230
FIELDS_SLOWDOWN = {"sw_thermal": 269, "hw_thermal": 270, "power_brake": 271}  # ns
FIELD_THERMAL_POLICY = 75  # ns
FIELDS_POWER_SMOOTHING = (251, 264)
SPARE_ROWS = ("max", "high", "partial", "low", "none")  # nvml.h: nvmlRowRemapperHistogramValues_t


def _sram_threshold(nvml: Any, handle: Any) -> bool:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _slowdown_ns(nvml: Any, handle: Any) -> dict[str, int]:
    fields = {**FIELDS_SLOWDOWN, "thermal": FIELD_THERMAL_POLICY}
    values = dict(zip(fields, field_values(nvml, handle, fields.values()), strict=True))
    if values["sw_thermal"] is not None:  # the newer counters hold what the older one does
        del values["thermal"]
    return {name: value for name, value in values.items() if value is not None}


def _power_smoothing(nvml: Any, handle: Any) -> list[int | None]:
    """Only the BMC has it where it keeps it (privilege level 0 in dcgm_fields.h of DCGM), whatever error says so."""
    try:
        return field_values(nvml, handle, FIELDS_POWER_SMOOTHING)
    except nvml.NVMLError as error:
        raise error if named(error, "GpuIsLost") else nvml.NVMLError(NOT_SUPPORTED) from None


def _each_that_is_here(
    nvml: Any, numbers: Mapping[str, int], ask: Callable[[int], Any], *errors: str
) -> dict[str, int]:
    """What the driver says to these numbers that it knows: to others these errors, or those of NOT_HERE."""
    values: dict[str, int] = {}
    for name, number in numbers.items():
        try:
            values[name] = ask(number)
        except nvml.NVMLError as error:
            if not named(error, *NOT_HERE, *errors):
                raise
    if not values:
        raise nvml.NVMLError(NOT_SUPPORTED)
    return values


def _inforom(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceValidateInforom(handle)
        return True
    except nvml.NVMLError as error:
        if not named(error, "CorruptedInforom"):
            raise
        return False


def _temperature_limits(nvml: Any, handle: Any) -> dict[str, int | None]:
    """In degrees Celsius; None for a threshold that this device does not have. NotSupported if it has none."""
    values = _each_that_is_here(nvml, THRESHOLDS, partial(nvml.nvmlDeviceGetTemperatureThreshold, handle))
    if len(values) < len(THRESHOLDS) and not any(values.values()):  # some drivers give 0 for one that they do not know
        raise nvml.NVMLError(NOT_SUPPORTED)
    return {name: values.get(name) for name in THRESHOLDS}


def _clock_event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (nvml.NVMLError, AttributeError) as error:
        if not named(error, *NOT_HERE, "AttributeError"):
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before driver 535


def _process(process: Any) -> str:
    name = tools.text(Path(f"/proc/{process.pid}/comm")) or "of another container or user"
    memory = f", {process.usedGpuMemory / 2**30:.1f} GiB" if process.usedGpuMemory else ""
    return f"process {process.pid} ({name}){memory}"


Read = Callable[[Any, Any], Any]  # of pynvml and the handle of a GPU
# By the name of the fact what NVML calls it, nvmlDeviceGet... of which gives it as it is.
PLAIN = {
    "name": "Name", "uuid": "UUID", "serial": "Serial", "board_part_number": "BoardPartNumber",
    "vbios": "VbiosVersion", "gsp_firmware": "GspFirmwareVersion", "inforom_version": "InforomImageVersion",
    "minor": "MinorNumber", "brand": "Brand", "virtualization": "VirtualizationMode", "cuda_cores": "NumGpuCores",
    "memory_bus_bits": "MemoryBusWidth", "pcie_generation": "CurrPcieLinkGeneration",
    "pcie_generation_max": "MaxPcieLinkGeneration", "pcie_width": "CurrPcieLinkWidth",
    "pcie_width_max": "MaxPcieLinkWidth", "ecc_mode_default": "DefaultEccMode", "compute_mode": "ComputeMode",
    "persistence_mode": "PersistenceMode", "numa_node": "NumaNodeId", "repair_pending": "RepairStatus",
}  # fmt: skip


def _plain(name: str) -> Read:
    return lambda nvml, handle: getattr(nvml, f"nvmlDeviceGet{name}")(handle)


# What stays as it is while a machine runs. `minor` is of the device file: 3 for /dev/nvidia3. `power_limit_watts` is
# the enforced one. `nvlink_remotes`: where each link ends, by PCI bus id, "switch", or "" for one that is down.
# `gsp_firmware`: what runs on the GPU's own processor (GSP), Missing where the driver does that work itself.
# `processes`: who computed on the GPU before this run's ranks started, as "process 4711 (python3), 2.1 GiB". `brand` is
# an nvmlBrandType_t, `virtualization` an nvmlGpuVirtualizationMode_t. What physical limits are made of
# (physical_limits.py): `cuda_cores`, `memory_bus_bits` and the highest clocks. `pcie_width_able`: how many lanes the
# "gpu" itself can use, by the system; pcie_width_max is no more than its slot has. `network_adapters`: InfiniBand and
# RoCE ones ("mlx5_0") that share most of the GPU's way over PCIe; none where nobody can say which of several.
# `module_id`: which module of its baseboard it is, as on HGX. `physical_slot`: what the firmware calls the slot of a
# card ("21"). `repair_pending`: whether a reset is to repair a channel of memory, and a TPC. `power_smoothing`: whether
# it is enabled, and the number of its preset profile.
CONSTANTS: dict[str, Read] = {
    **{fact: _plain(name) for fact, name in PLAIN.items()},
    "inforom_valid": _inforom,
    "pci_bus_id": lambda n, h: n.nvmlDeviceGetPciInfo(h).busId,
    "memory_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total,
    "bar1_bytes": lambda n, h: n.nvmlDeviceGetBAR1MemoryInfo(h).bar1Total,
    "compute_capability": lambda n, h: list(n.nvmlDeviceGetCudaComputeCapability(h)),
    "sm_clock_max_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, CLOCK_SM),
    "memory_clock_max_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, CLOCK_MEMORY),
    "pcie_width_able": pcie_width_able,
    "network_adapters": lambda n, h: network_ports.nearest(pci_device(n, h)),
    "module_id": module_id,
    "physical_slot": physical_slot,
    "ecc_mode": lambda n, h: list(n.nvmlDeviceGetEccMode(h)),
    "mig_mode": lambda n, h: list(n.nvmlDeviceGetMigMode(h)),
    "power_limit_watts": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "power_limit_default_watts": lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000,
    "application_clock_mhz": lambda n, h: n.nvmlDeviceGetApplicationsClock(h, CLOCK_SM),
    "application_clock_default_mhz": lambda n, h: n.nvmlDeviceGetDefaultApplicationsClock(h, CLOCK_SM),
    "temperature_limits_c": _temperature_limits,
    "power_smoothing": _power_smoothing,
    "recovery_action": lambda n, h: field_values(n, h, [FIELD_RECOVERY_ACTION])[0],
    "cpu_affinity": lambda n, h: [int(word) for word in n.nvmlDeviceGetCpuAffinity(h, 16)],
    "pci_bus_cpus": pci_bus_cpus,
    "fabric": fabric,
    "fabric_health": partial(fabric, health=True),
    "nvlink_states": lambda n, h: each_link(n, partial(n.nvmlDeviceGetNvLinkState, h)),
    "nvlink_remotes": nvlink_remotes,
    "nvlink_speeds": lambda n, h: each_link(n, lambda link: field_values(n, h, [(FIELD_NVLINK_SPEED, link)])[0] / 1000),
    "processes": lambda n, h: [_process(process) for process in n.nvmlDeviceGetComputeRunningProcesses(h)],
}
PAIRED = "p2p"  # a constant too: by capability the nvmlGpuP2PStatus_t with every GPU (0 is OK)

# What must not get worse. All of these are read around every test, so each is one cheap call. `remapped_rows`: for
# corrected errors and others, whether a reset is needed for more, and whether there was no spare row. `slowdown_ns`:
# for how long what must not slow the GPU down has done so, by the keys of COUNTED_SLOWDOWNS.
COUNTERS: dict[str, Read] = {
    "ecc_uncorrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_VOLATILE),
    "ecc_uncorrected_aggregate": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_AGGREGATE),
    "ecc_corrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_CORRECTED, ECC_VOLATILE),
    "sram_threshold_exceeded": _sram_threshold,
    "remapped_rows": lambda n, h: list(n.nvmlDeviceGetRemappedRows(h)),
    "retired_pages_pending": lambda n, h: n.nvmlDeviceGetRetiredPagesPendingStatus(h),
    "memory_unrepairable": lambda n, h: bool(n.nvmlDeviceGetUnrepairableMemoryFlag_v1(h)),
    "pcie_replays": lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h),
    "slowdown_ns": _slowdown_ns,
}

# Counters that are not read around every test: those of NVLinks cost too much (on an H200 each of the 72 numbers takes
# 4 ms of CPU), the others change rarely. `nvlink_errors`: by kind the count of each link, None where there is none.
# `nvlink_kib`: the data that all links have sent and received. `spare_rows`: how many banks of memory have all their
# spare rows (max), many (high), some (partial), few (low) and none. `ecc_corrected`: since the driver was loaded.
SLOW_COUNTERS: dict[str, Read] = {
    "nvlink_errors": nvlink_errors,
    "nvlink_kib": lambda n, h: sum(filter(None, field_values(n, h, FIELDS_NVLINK_DATA))),
    "spare_rows": lambda n, h: {
        name: int(getattr(values, name)) for values in [n.nvmlDeviceGetRowRemapperHistogram(h)] for name in SPARE_ROWS
    },
    "ecc_corrected": lambda n, h: _each_that_is_here(
        n, ECC_PLACES, partial(n.nvmlDeviceGetMemoryErrorCounter, h, ECC_CORRECTED, ECC_VOLATILE), "InvalidArgument"
    ),
}

# What telemetry samples.
READINGS: dict[str, Read] = {
    "utilization_percent": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_used_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used,
    "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, TEMPERATURE_GPU),
    "memory_temperature_c": lambda n, h: field_values(n, h, [FIELD_MEMORY_TEMPERATURE])[0],
    "power_watts": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000,
    "sm_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_SM),
    "memory_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_MEMORY),
    "clock_event_reasons": _clock_event_reasons,
}

# Since the driver was loaded: read around a measurement, and in no sample.
ENERGY: dict[str, Read] = {"energy_joules": lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1000}

CALLS = {**CONSTANTS, **COUNTERS, **SLOW_COUNTERS, **READINGS, **ENERGY}
NAMES = (*CALLS, PAIRED)
FACTS.update(NAMES)

# What a GPU must have by its model. Where it cannot be read, what rests on it is not judged.

# nvml.h, nvmlBrandType_t: QUADRO, GEFORCE, TITAN, NVIDIA_RTX, QUADRO_RTX, GEFORCE_RTX, TITAN_RTX.
DESKTOP = (1, 5, 6, 12, 13, 15, 16)
# Those of the shipped profiles: a GPU of which next to nothing can be read still has its name.
PROFESSIONAL = re.compile(
    r"(Tesla (T4|V100)|"
    r"NVIDIA (A10|A40|A100|A800|H20|H100|H200|H800|GH200|B200|B300|GB200|GB300|L4|L40|L40S|RTX A6000))\b"
)
# Telemetry without which no slowdown and no heat would be seen.
TELEMETRY = ("clock_event_reasons", "temperature_c", "power_watts")


def consumer(gpu: Gpu) -> bool:
    return any(word in gpu.name for word in ("GeForce", "TITAN"))  # NVIDIA leaves open what NVML can read of them


def for_servers(gpu: Gpu) -> bool:
    """Whether its driver is to stay loaded."""
    return gpu.get("brand") not in DESKTOP and not consumer(gpu)


def professional(gpu: Gpu) -> bool:
    """Whether NVML can read all that it knows of such a board."""
    return not consumer(gpu) and (gpu.of_data_centre or PROFESSIONAL.match(gpu.name) is not None)


def _corrects_errors(gpu: Gpu) -> bool:
    return professional(gpu) and (gpu.get("ecc_mode") or [1])[0] != 0


# Fact: which GPUs have it, whatever their driver or nvidia-ml-py says. What is not here, a healthy GPU may lack: the
# SRAM threshold under an older driver, PCIe links and NUMA nodes in a virtual machine.
MUST_HAVE: dict[str, Callable[[Gpu], bool]] = {
    **dict.fromkeys(("ecc_mode", "pcie_replays", "power_limit_watts", *TELEMETRY), professional),
    **dict.fromkeys((fact for fact in COUNTERS if fact.startswith("ecc_")), _corrects_errors),
    # From Ampere on; before, whole pages were retired.
    "remapped_rows": lambda gpu: _corrects_errors(gpu) and not gpu.name.startswith("Tesla"),
    "retired_pages_pending": lambda gpu: _corrects_errors(gpu) and gpu.name.startswith("Tesla"),
    "nvlink_errors": lambda gpu: professional(gpu) and gpu.nvlinks_active > 0 and gpu.of_data_centre,
}


def unreadable_by_model(gpus: Iterable[Gpu], facts: Collection[str]) -> list[str]:
    """Facts that GPUs have by their model and that cannot be read, one line each with the GPU and the reason."""
    return [
        f"{gpu.identity}: {fact} cannot be read ({gpu[fact]}), and this model has it"
        for gpu in gpus
        for fact in facts
        if fact in MUST_HAVE and isinstance(gpu[fact], Missing) and MUST_HAVE[fact](gpu)
    ]
