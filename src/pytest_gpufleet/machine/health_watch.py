"""Watches the health of all GPUs and of their host around every test: what gets worse while a test runs fails that
test."""

import threading
import time

import msgspec

from pytest_gpufleet.machine import health, kernel_log, xids
from pytest_gpufleet.machine.gpu_facts import COUNTERS
from pytest_gpufleet.machine.local_node import LocalNode
from pytest_gpufleet.machine.xids import OF_CRASHES, OF_PROCESSES
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import Sample

TEMPERATURES = ("temperature_c", "memory_temperature_c")


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`faults`, and what was only `noticed` and condemns nothing: with the places of a node alone (node 0). `unseen`:
    what may have got worse and nobody could see."""

    faults: tuple[Fault, ...] = ()
    noticed: tuple[Fault, ...] = ()
    unseen: str = ""


class Guard:
    """Reads counters, clock events and the kernel log of a node before and after each test. What its log held at first
    (node.take) is for the health checks to judge."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._failed = False  # the check before
        self._lock = threading.Lock()
        self._forget()
        self._before = self._read()
        self._since = time.monotonic()

    def note(self, sample: Sample) -> None:
        """Take in a sample of telemetry: what happens between two readings counts too."""
        with self._lock:
            for readings, reasons, hottest in zip(sample.gpus, self._reasons, self._hottest, strict=True):
                reasons.add(int(readings["clock_event_reasons"] or 0))
                for name in hottest:
                    hottest[name] = max(hottest[name], readings[name] or 0)

    def _forget(self) -> None:
        self._reasons: list[set[int]] = [set() for _ in self._node.topology.gpus]
        self._hottest: list[dict[str, float]] = [dict.fromkeys(TEMPERATURES, 0) for _ in self._node.topology.gpus]

    def check(self, failed: bool = False) -> Health:
        """What got worse since the last call. `failed`: the check that ends now has failed, and with it its processes
        were ended."""
        after, now = self._read(), time.monotonic()
        both = list(zip(self._before, after, strict=True))
        problems = [each for old, new in both for each in health.worsened(old, new, (now - self._since) / 60)]
        logged = self._node.kernel_log()
        # What processes leave behind belongs to the check that failed, and some of it comes only in the next one.
        # Without such a check, a crash of any process is reported; that one was ended is not.
        leftovers = frozenset() if failed else OF_PROCESSES if self._failed else OF_PROCESSES - OF_CRASHES
        counted = [xid for xid in logged.xids if xid.number not in leftovers]
        problems += xids.xids_of(after, counted) + xids.sxids(counted)
        found, noticed = kernel_log.judged(logged.host, after, "during")
        problems += found
        self._failed = failed
        with self._lock:
            since = list(zip(both, self._reasons, self._hottest, strict=True))
            self._forget()
        for (before, gpu), reasons, hottest in since:
            problems += health.slowdowns(before, gpu, {*reasons, gpu.get("clock_event_reasons") or 0})
            problems += health.too_hot(gpu, hottest)
        self._before, self._since = after, now
        unseen = f"an XID may have gone unseen: {logged.unread}" if logged.unread else ""
        return Health(tuple(problems), tuple(noticed), unseen)

    def _read(self) -> tuple[Gpu, ...]:
        return self._node.facts((*COUNTERS, "clock_event_reasons"))
