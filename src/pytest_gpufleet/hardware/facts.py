"""Every fact that NVML tells of a GPU, one call each, so that a call which fails costs one fact and never the run."""

from __future__ import annotations

import ctypes
import difflib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pytest_gpufleet.hardware.nvml import MAX_NVLINKS, NoGpus, read_topology, session
from pytest_gpufleet.model.gpu import GpuTopology

# nvml.h. Plain integers: pynvml 13 defines some of these constants as tuples.
ECC_CORRECTED, ECC_UNCORRECTED = 0, 1
ECC_VOLATILE, ECC_AGGREGATE = 0, 1
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
NVLINK_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}
P2P = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
PCIE_TX, PCIE_RX = 0, 1
EVENT_XID = 0x8
FIELD_MEMORY_TEMPERATURE = 82
FIELD_NVLINK_SPEED = 164  # Mbit/s by nvml.h but MB/s in fact; the link goes into scopeId
FIELD_RECOVERY_ACTION = 230

ANSWER_SECONDS = 20.0
T = TypeVar("T")

# Errors by which NVML says that there is no such thing here; all others are trouble.
NOT_HERE = ("NotSupported", "FunctionNotFound", "ArgumentVersionMismatch")


@dataclass(frozen=True)
class Unavailable:
    """A fact that could not be read. `applicable` is False where this GPU or driver has no such thing."""

    reason: str
    applicable: bool

    def __str__(self) -> str:
        return self.reason


class FactError(Exception):
    """A source could not give a fact."""

    def __init__(self, reason: str, applicable: bool) -> None:
        super().__init__(reason)
        self.unavailable = Unavailable(reason, applicable)


class Source(Protocol):
    """Where facts come from: NVML, or the snapshot of a machine."""

    def count(self) -> int: ...

    def ask(self, index: int, fact: str) -> Any:
        """One fact of one GPU as plain JSON values. Raises FactError."""

    def xids(self) -> list[tuple[int, int]]:
        """The XIDs that the driver has reported since the last call (the first one arms it): (GPU, number)."""


def _field(nvml: Any, handle: Any, *fields: Any) -> list[int]:
    values = nvml.nvmlDeviceGetFieldValues(handle, list(fields))
    for value in values:
        if value.nvmlReturn:
            raise nvml.NVMLError(value.nvmlReturn)
    return [value.value.uiVal for value in values]


def _links(call: Callable[[int], Any], nvml: Any) -> list[Any]:
    """A value for each NVLink of a GPU; the first link that does not exist ends the list."""
    values: list[Any] = []
    for link in range(MAX_NVLINKS):
        try:
            values.append(call(link))
        except nvml.NVMLError as error:
            if not values or not _named(error, *NOT_HERE, "InvalidArgument"):
                raise
            break
    return values


def _named(error: BaseException, *names: str) -> bool:
    return type(error).__name__.removeprefix("NVMLError_") in names


def _fabric(nvml: Any, handle: Any) -> dict[str, int]:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return {"state": info.state, "status": info.status}


def _sram_threshold(nvml: Any, handle: Any) -> bool:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _inforom(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceValidateInforom(handle)
    except nvml.NVMLError as error:
        if _named(error, "CorruptedInforom"):
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
            if not _named(error, *NOT_HERE):
                raise
            limits[name], missing = None, error
    if missing and not any(limits.values()):
        raise missing
    return limits


def _nvlink_errors(nvml: Any, handle: Any) -> dict[str, list[int]]:
    """For each kind of error the count of each link."""

    def counts(number: int) -> list[int]:
        return _links(lambda link: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number), nvml)

    return {name: counts(number) for name, number in NVLINK_COUNTERS.items()}


def _clock_event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (nvml.NVMLError, AttributeError) as error:
        if isinstance(error, nvml.NVMLError) and not _named(error, *NOT_HERE):
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before driver 535


# What stays as it is while a machine runs.
FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda n, h: n.nvmlDeviceGetName(h),
    "uuid": lambda n, h: n.nvmlDeviceGetUUID(h),
    "serial": lambda n, h: n.nvmlDeviceGetSerial(h),
    "board_part_number": lambda n, h: n.nvmlDeviceGetBoardPartNumber(h),
    "vbios": lambda n, h: n.nvmlDeviceGetVbiosVersion(h),
    "inforom_version": lambda n, h: n.nvmlDeviceGetInforomImageVersion(h),
    "inforom_valid": _inforom,
    "pci_bus_id": lambda n, h: n.nvmlDeviceGetPciInfo(h).busId,
    "pci_device_id": lambda n, h: n.nvmlDeviceGetPciInfo(h).pciDeviceId,
    "memory_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total,
    "compute_capability": lambda n, h: list(n.nvmlDeviceGetCudaComputeCapability(h)),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_generation_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_width_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h),
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
    "recovery_action": lambda n, h: _field(n, h, FIELD_RECOVERY_ACTION)[0],
    "numa_node": lambda n, h: n.nvmlDeviceGetNumaNodeId(h),
    "cpu_affinity": lambda n, h: [int(word) for word in n.nvmlDeviceGetCpuAffinity(h, 16)],
    "fabric": _fabric,
    "nvlink_states": lambda n, h: _links(lambda link: n.nvmlDeviceGetNvLinkState(h, link), n),
    "nvlink_versions": lambda n, h: _links(lambda link: n.nvmlDeviceGetNvLinkVersion(h, link), n),
    "nvlink_remote_types": lambda n, h: _links(lambda link: n.nvmlDeviceGetNvLinkRemoteDeviceType(h, link), n),
    "nvlink_speeds": lambda n, h: _links(lambda link: _field(n, h, (FIELD_NVLINK_SPEED, link))[0] / 1000, n),
}

# What must not get worse. All of these are read around every test, so each is one cheap call.
COUNTERS: dict[str, Callable[[Any, Any], Any]] = {
    "ecc_uncorrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_VOLATILE),
    "ecc_uncorrected_aggregate": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_UNCORRECTED, ECC_AGGREGATE),
    "ecc_corrected_volatile": lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, ECC_CORRECTED, ECC_VOLATILE),
    "sram_threshold_exceeded": _sram_threshold,
    "remapped_rows": lambda n, h: list(n.nvmlDeviceGetRemappedRows(h)),
    "retired_pages_pending": lambda n, h: n.nvmlDeviceGetRetiredPagesPendingStatus(h),
    "pcie_replays": lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h),
}

# Counters that cost too much to be read around every test: on an H200 each of these 72 numbers takes 4 ms of CPU.
SLOW_COUNTERS: dict[str, Callable[[Any, Any], Any]] = {"nvlink_errors": _nvlink_errors}


# What telemetry samples.
READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "utilization_percent": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_used_bytes": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used,
    "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, TEMPERATURE_GPU),
    "memory_temperature_c": lambda n, h: _field(n, h, FIELD_MEMORY_TEMPERATURE)[0],
    "power_watts": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000,
    "sm_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_SM),
    "memory_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, CLOCK_MEMORY),
    "clock_event_reasons": _clock_event_reasons,
    "pcie_transmitted_kilobytes_per_second": lambda n, h: n.nvmlDeviceGetPcieThroughput(h, PCIE_TX),
    "pcie_received_kilobytes_per_second": lambda n, h: n.nvmlDeviceGetPcieThroughput(h, PCIE_RX),
}

# Every name that a fact can have; "p2p" is asked of pairs.
NAMES = (*FACTS, *COUNTERS, *SLOW_COUNTERS, *READINGS, "p2p")


def check_name(fact: str) -> None:
    """KeyError if no table knows a fact of this name: a check that asks for it would never look at anything."""
    if fact not in NAMES:
        near = difflib.get_close_matches(fact, NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(NAMES))}"
        raise KeyError(f"no GPU has a fact {fact!r}: {hint}")


# Readings that cost more than all others together (on an H200 a millisecond of CPU each): not in every sample.
SLOW_READINGS = ("pcie_transmitted_kilobytes_per_second", "pcie_received_kilobytes_per_second")


class Nvml:
    """The Source that is the driver of this machine. `handles` are the GPUs of the run, in their order."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._events: list[Any] | None = None  # for each GPU a set of events, None where there are none

    def count(self) -> int:
        return len(self._handles)

    def ask(self, index: int, fact: str) -> Any:
        if fact == "p2p":
            return self._call(self._p2p, self._handles[index])
        table = next(table for table in (FACTS, COUNTERS, SLOW_COUNTERS, READINGS) if fact in table)
        return self._call(table[fact], self._handles[index])

    def xids(self) -> list[tuple[int, int]]:
        if self._events is None:
            self._events = [self._armed(handle) for handle in self._handles]
        return [(index, number) for index, events in enumerate(self._events) for number in self._arrived(events)]

    def _armed(self, handle: Any) -> Any:
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(handle, EVENT_XID, events)
        except (self._nvml.NVMLError, AttributeError):  # the kernel log tells of XIDs too
            return None
        return events

    def _arrived(self, events: Any) -> Iterator[int]:
        while events is not None:
            try:
                yield int(self._nvml.nvmlEventSetWait_v2(events, 0).eventData)
            except self._nvml.NVMLError:  # most often: nothing has happened
                return

    def _p2p(self, nvml: Any, handle: Any) -> dict[str, list[int]]:
        """For each capability the nvmlGpuP2PStatus_t with every GPU (0 is OK), in the order of the GPUs."""
        return {
            name: [0 if peer is handle else nvml.nvmlDeviceGetP2PStatus(handle, peer, number) for peer in self._handles]
            for name, number in P2P.items()
        }

    def _call(self, call: Callable[[Any, Any], Any], handle: Any) -> Any:
        try:
            value = call(self._nvml, handle)
            value = value.decode() if isinstance(value, bytes) else value
        except self._nvml.NVMLError as error:
            raise FactError(f"NVML: {error}", applicable=not _named(error, *NOT_HERE)) from None
        except AttributeError as error:
            raise FactError(f"this version of nvidia-ml-py cannot ask: {error}", applicable=False) from None
        except Exception as error:  # a broken GPU's answers may not even decode
            raise FactError(f"nvidia-ml-py: {error!r}", applicable=True) from None
        return value


def read(source: Source, index: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of one GPU by name; what cannot be had is Unavailable."""
    values: dict[str, Any] = {}
    for fact in facts:
        try:
            values[fact] = source.ask(index, fact)
        except FactError as error:
            values[fact] = error.unavailable
    return values


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """The result of `call`, made in a daemon thread: Python's own pool would wait at exit for a GPU that hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def read_all(source: Source, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of every GPU, all GPUs at the same time. Of one whose driver does not answer in time, all are Unavailable:
    a GPU that hangs must not hang the run."""
    futures = [in_thread(read, source, index, facts) for index in range(source.count())]
    until = time.monotonic() + ANSWER_SECONDS
    values = []
    for future in futures:
        try:
            values.append(future.result(max(0.0, until - time.monotonic())))
        except FutureTimeout:
            silent = Unavailable(f"no answer from the driver within {ANSWER_SECONDS:g} s", applicable=True)
            values.append(dict.fromkeys(facts, silent))
    return values


def gpus_present() -> int:
    """How many GPUs NVML lists, also those that are hidden from this run or do not answer. 0 where it does not work."""
    with suppress(NoGpus), session() as nvml, suppress(nvml.NVMLError):
        return int(nvml.nvmlDeviceGetCount())
    return 0


def pci_addresses() -> list[str]:
    """Of all GPUs that NVML can talk to, also of those hidden from this run; empty where NVML does not work."""
    addresses = []
    with suppress(NoGpus), session() as nvml, suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(Exception):
                addresses.append(str(nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByIndex(index)).busId))
    return addresses


@contextmanager
def open_source(
    wanted: int | None = None, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[Source, GpuTopology]]:
    """The GPUs of this machine that the environment leaves visible, the first `wanted` of them, as a Source, and their
    topology. Raises NoGpus."""
    topology = read_topology(environment)
    if wanted is not None:
        topology = topology.first(wanted)
    with session() as nvml:
        yield Nvml(nvml, [nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in topology.gpus]), topology
