"""Watches the health of all GPUs around every test: what gets worse while a test runs fails that test."""

from __future__ import annotations

import threading
import time

from pytest_gpufleet.hardware import nvml
from pytest_gpufleet.hardware.kernel_log import KernelLog
from pytest_gpufleet.hardware.nvml import Source
from pytest_gpufleet.model.facts import COUNTERS
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.model.sample import Sample
from pytest_gpufleet.model.xid_catalogue import Xid
from pytest_gpufleet.verdict import health_rules

# Identity and what the rules need besides the counters; these do not change.
CONSTANT = ("name", "serial", "pci_bus_id", "uuid", "pcie_generation_max", "pcie_width")
TEMPERATURES = ("temperature_c", "memory_temperature_c")


class Guard:
    """Reads counters, clock events and the kernel log before and after each test."""

    def __init__(self, source: Source, machine: Machine, log: KernelLog) -> None:
        self._source = source
        self._machine = machine
        self._log = log
        self.unread = ""  # why lines of the kernel log since the last time were not seen
        self._lock = threading.Lock()
        self._forget()
        source.xids()  # from here on
        self._before = self._read()
        self._since = time.monotonic()

    def note(self, sample: Sample) -> None:
        """Take in a sample of telemetry: what happens between two readings counts too."""
        with self._lock:
            for readings, reasons, hottest in zip(sample.gpus, self._reasons, self._hottest, strict=True):
                reasons.add(readings["clock_event_reasons"] or 0)
                for name in hottest:
                    hottest[name] = max(hottest[name], readings[name] or 0)

    def _forget(self) -> None:
        self._reasons: list[set[int]] = [set() for _ in self._machine.gpus]
        self._hottest: list[dict[str, float]] = [dict.fromkeys(TEMPERATURES, 0) for _ in self._machine.gpus]

    def check(self) -> list[Fault]:
        """What got worse since the last call."""
        after, now = self._read(), time.monotonic()
        minutes = (now - self._since) / 60
        problems = [
            problem
            for old, new in zip(self._before, after, strict=True)
            for problem in health_rules.worsened(old, new, minutes)
        ]
        problems += self._xids()
        with self._lock:
            all_reasons, all_hottest = self._reasons, self._hottest
            self._forget()
        for gpu, reasons, hottest, facts_of in zip(after, all_reasons, all_hottest, self._machine.gpus, strict=True):
            now_seen = gpu["clock_event_reasons"]
            seen = {*reasons, now_seen} if isinstance(now_seen, int) else reasons
            problems += health_rules.slowdowns(gpu, seen)
            problems += health_rules.too_hot(facts_of, hottest)
        self._before, self._since = after, now
        return problems

    def _xids(self) -> list[Fault]:
        """What the kernel log and NVML have told since the last time; most XIDs are told by both, SXids by the log."""
        gpus = self._machine.gpus
        logged = self._log.new()
        self.unread = logged.unread
        told = [
            Xid(str(gpus[index]["pci_bus_id"]), number, "")
            for index, number in self._source.xids()
            if not any(xid.number == number and xid.of(str(gpus[index]["pci_bus_id"])) for xid in logged.xids)
        ]
        return health_rules.xids_of(gpus, [*logged.xids, *told]) + health_rules.sxids(logged.xids)

    def _read(self) -> list[Gpu]:
        now = nvml.read_all(self._source, (*COUNTERS, "clock_event_reasons"))
        return [
            Gpu(gpu.index, {**{name: gpu[name] for name in CONSTANT}, **values})
            for gpu, values in zip(self._machine.gpus, now, strict=True)
        ]
