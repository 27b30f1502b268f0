"""Watches the health of all GPUs around every test: what gets worse while a test runs fails that test."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pytest_gpufleet.hardware import facts
from pytest_gpufleet.hardware.facts import Source
from pytest_gpufleet.hardware.machine import GpuFacts, Machine
from pytest_gpufleet.hardware.xids import KernelLog
from pytest_gpufleet.verdict import health

# Identity and what the rules need besides the counters; these do not change.
CONSTANT = ("name", "serial", "pci_bus_id", "uuid", "pcie_generation_max", "pcie_width")
# The sum over a GPU's links is one call; the count of each link is 72.
SLOW = "nvlink_errors"


class HealthWorsened(AssertionError):
    """A GPU got worse while a test ran."""


class Guard:
    """Reads counters, clock events and the kernel log before and after each test."""

    def __init__(self, source: Source, machine: Machine, log: KernelLog) -> None:
        self._source = source
        self._machine = machine
        self._log = log
        self._threads = ThreadPoolExecutor(max(1, source.count()), thread_name_prefix="gpufleet-guard")
        totals = any(isinstance(gpu["nvlink_totals"], dict) for gpu in machine.gpus)
        self._counters = {name: call for name, call in facts.COUNTERS.items() if not (totals and name == SLOW)}
        self._before = self._read()
        self._since = time.monotonic()

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
        for gpu in after:
            if isinstance(reasons := gpu["clock_event_reasons"], int):
                problems += health.slowdowns(gpu.identity, [reasons])
        self._before, self._since = after, now
        return problems

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _read(self) -> list[GpuFacts]:
        names: Mapping[str, Any] = {**self._counters, "clock_event_reasons": None}

        def one(position: int) -> GpuFacts:
            gpu = self._machine.gpus[position]
            constant = {name: gpu[name] for name in CONSTANT}
            return GpuFacts(gpu.index, {**constant, **facts.read(self._source, position, names)})

        return list(self._threads.map(one, range(self._source.count())))
