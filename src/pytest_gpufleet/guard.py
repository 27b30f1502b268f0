"""Watches the health of all GPUs around every test: what gets worse while a test runs fails that test."""

from __future__ import annotations

import threading
import time

from pytest_gpufleet.hardware import facts
from pytest_gpufleet.hardware.facts import Source
from pytest_gpufleet.hardware.machine import GpuFacts, Machine
from pytest_gpufleet.hardware.telemetry import Sample
from pytest_gpufleet.hardware.xids import KernelLog
from pytest_gpufleet.verdict import health

# Identity and what the rules need besides the counters; these do not change.
CONSTANT = ("name", "serial", "pci_bus_id", "uuid", "pcie_generation_max", "pcie_width")


class HealthWorsened(AssertionError):
    """A GPU got worse while a test ran."""


class Guard:
    """Reads counters, clock events and the kernel log before and after each test."""

    def __init__(self, source: Source, machine: Machine, log: KernelLog) -> None:
        self._source = source
        self._machine = machine
        self._log = log
        self._samples: list[Sample] = []
        self._lock = threading.Lock()
        self._before = self._read()
        self._since = time.monotonic()

    def note(self, sample: Sample) -> None:
        """Take in a sample of telemetry: what happens between two readings counts too."""
        with self._lock:
            self._samples.append(sample)

    def check(self) -> list[str]:
        """What got worse since the last call, one line a finding; each names its GPU."""
        after, now = self._read(), time.monotonic()
        minutes = (now - self._since) / 60
        problems = [
            problem
            for old, new in zip(self._before, after, strict=True)
            for problem in health.worsened(old, new, minutes)
        ]
        problems += health.xids_of(self._machine.gpus, self._log.new())
        with self._lock:
            samples, self._samples = self._samples, []
        for position, gpu in enumerate(after):
            seen = [gpu["clock_event_reasons"], *(sample.gpus[position]["clock_event_reasons"] for sample in samples)]
            problems += health.slowdowns(gpu.identity, [reasons for reasons in seen if isinstance(reasons, int)])
            hottest = {
                name: max((t for sample in samples if (t := sample.gpus[position][name]) is not None), default=0)
                for name in ("temperature_c", "memory_temperature_c")
            }
            problems += health.too_hot(gpu.identity, self._machine.gpus[position], hottest)
        self._before, self._since = after, now
        return problems

    def _read(self) -> list[GpuFacts]:
        names = {**facts.COUNTERS, "clock_event_reasons": None}
        return [
            GpuFacts(gpu.index, {**{name: gpu[name] for name in CONSTANT}, **values})
            for gpu, values in zip(self._machine.gpus, facts.read_all(self._source, names), strict=True)
        ]
