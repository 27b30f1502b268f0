"""The node that this process runs on: its GPUs, in the order of the run, and the host around them."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from pytest_gpufleet.machine import host, locks, nvml
from pytest_gpufleet.machine.gpu_facts import COUNTERS, READINGS, SLOW_COUNTERS
from pytest_gpufleet.machine.kernel_log import NVLINK_5, KernelLog, Logged, Xid, behind
from pytest_gpufleet.machine.nvml import Nvml
from pytest_gpufleet.machine.software import software
from pytest_gpufleet.model.gpu import Gpu, GpuTopology, Missing
from pytest_gpufleet.model.measurement import Sample


class LocalNode:
    """Data alone: no GPU context is needed. `topology`: with CONSTANTS. `driver`: None where there is no GPU."""

    def __init__(self, driver: Nvml | None, topology: GpuTopology, kernel_log: str = "/dev/kmsg") -> None:
        self.topology = topology
        self._driver = driver
        self._path = kernel_log
        self._log: KernelLog | None = None
        self._latest: tuple[Xid, ...] = ()  # what it had the last time
        self._absent: set[tuple[int, str]] = set()  # readings that a GPU does not have, so that it is asked once

    def facts(self, names: Sequence[str]) -> tuple[Gpu, ...]:
        if self._driver is None:
            return ()
        now = nvml.read_all(self._driver, names)
        return tuple(Gpu(gpu.index, {**gpu.facts, **facts}) for gpu, facts in zip(self.topology.gpus, now, strict=True))

    def host(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        return host.read(names)

    def sample(self) -> Sample:
        """The readings of all GPUs now. They are asked at the same time, for some calls block for a while."""
        assert self._driver is not None
        now, asked = round(time.time(), 3), []
        for gpu in range(self._driver.count()):
            names = [name for name in READINGS if (gpu, name) not in self._absent]
            asked.append(nvml.in_thread(nvml.read, self._driver, gpu, names))
        readings: list[dict[str, Any]] = []
        for gpu, found in enumerate(each.result() for each in asked):
            missing = {name: value for name, value in found.items() if isinstance(value, Missing)}
            self._absent.update((gpu, name) for name, value in missing.items() if value.absent)
            readings.append({**dict.fromkeys(READINGS), **found, **dict.fromkeys(missing)})
        return Sample(now, tuple(readings))

    def kernel_log(self) -> Logged:
        """Errors since the last call, first those from before. Most XIDs are reported by NVML and the kernel's log, one
        later than the other; SXids and the sub-codes of NVLink 5 by the log alone."""
        if self._driver is None:
            return Logged()
        self._log = self._log or KernelLog(self._path)
        reported, logged = self._driver.xids(), self._log.new()
        known, self._latest = (*self._latest, *logged.xids), logged.xids
        at = [gpu.pci_bus_id for gpu in self.topology.gpus]
        new = ((at[index], number) for index, number in reported if number not in NVLINK_5)
        xids = [Xid(*each, "") for each in new if not any(xid.number == each[1] and xid.of(each[0]) for xid in known)]
        undecoded = sorted({number for _, number in reported if number in NVLINK_5 and logged.trouble})
        unread = f"what XIDs {undecoded} of NVLinks mean stands in the kernel log alone" if undecoded else ""
        host = tuple(behind(message, at) for message in logged.host)
        return Logged((*logged.xids, *xids), logged.trouble, logged.unread or unread, host)

    def present(self) -> tuple[str, ...]:
        return self._driver.present() if self._driver is not None else ()

    def lock(self) -> ExitStack:
        """Make the GPUs this run's own, until what is returned is closed or its process is gone. Raises GpuTaken."""
        return locks.lock(self.topology.gpus)


@dataclass(frozen=True)
class Machine:
    """As it is at one moment: its GPUs, in the order of the run, and its host. `present`: the PCI bus ids of all its
    GPUs, also of hidden ones; "" for one that does not answer. `node`: its number in the run."""

    gpus: tuple[Gpu, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    logged: Logged = field(default_factory=Logged)
    present: tuple[str, ...] = ()
    node: int = 0
    _read_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read, whatever was done to the clock since."""
        return time.monotonic() - self._read_at


def take(node: LocalNode) -> Machine:
    gpus = node.facts((*COUNTERS, *SLOW_COUNTERS))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Machine(gpus, node.host(), now, node.kernel_log(), node.present())


@contextmanager
def opened(wanted: int | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[LocalNode]:
    """This machine with the first `wanted` GPUs that the environment leaves visible, in its order. Raises NoGpus."""
    with nvml.session() as driver:
        yield LocalNode(*nvml.chosen(driver, wanted, environment))


def without_gpus(why: str, *problems: str) -> LocalNode:
    """This machine where it has no GPUs to use, and why; `problems`: if there should be some."""
    return LocalNode(None, GpuTopology(problems=problems, absent=why, **software()))
