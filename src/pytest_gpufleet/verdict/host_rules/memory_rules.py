"""What counts as healthy of the memory of a host: the errors of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE

Controller = Mapping[str, Any]

# Corrected errors of a day that are still healthy: mcelog.conf(5) has 10 for a module ([dimm] ce-error-threshold), and
# 100 for what it cannot lay to any ([socket] mem-ce-error-threshold). Here they are for a run that is shorter, too.
CORRECTED_A_DAY, CORRECTED_A_DAY_OF_NO_MODULE = 10, 100
DAY = 86_400


def recorded_memory_errors(controllers: Sequence[Controller]) -> list[Fault]:
    """What the kernel has counted since it started, or since somebody set its counters to 0."""
    return [
        fault
        for controller in controllers
        for name, allowed, counts in _counted(controller)
        for fault in _faults(name, counts, allowed, controller["seconds"] or DAY)
    ]


def memory_errors_grown(before: Sequence[Controller], now: Sequence[Controller], seconds: float) -> list[Fault]:
    """What came on top of it between two readings so many seconds apart."""
    then = {name: counts for controller in before for name, _, counts in _counted(controller)}
    return [
        fault
        for controller in now
        for name, allowed, counts in _counted(controller)
        for fault in _faults(name, [count - was for count, was in zip(counts, then.get(name, counts), strict=True)],
                             allowed, seconds)
    ]  # fmt: skip


def _counted(controller: Controller) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Each module of a controller, and what belongs to none of them: by what name people find it, how many corrected
    errors a day it may have, its corrected and its uncorrected errors."""
    kinds = ("corrected", "uncorrected")
    rest = [controller[kind] or 0 for kind in kinds]
    for module in controller["modules"]:
        counts = [module[kind] or 0 for kind in kinds]
        rest = [max(0, left - count) for left, count in zip(rest, counts, strict=True)]
        where = f", {module['location']}" if module["location"] else ""
        yield f"{module['label']} ({controller['controller']}{where})", CORRECTED_A_DAY, counts
    yield f"memory controller {controller['controller']}", CORRECTED_A_DAY_OF_NO_MODULE, rest


def _faults(name: str, counts: Sequence[int], allowed: int, seconds: float) -> Iterator[Fault]:
    corrected, uncorrected = counts
    if uncorrected > 0:
        yield Fault("host_memory_uncorrected", (THIS_NODE,), f"{name}: {uncorrected:,} uncorrected errors")
    if corrected > allowed * max(1.0, seconds / DAY):
        told = f"{corrected:,} corrected errors in {seconds / 3600:.3g} h, {allowed} a day are still healthy"
        yield Fault("host_memory_corrected", (THIS_NODE,), f"{name}: {told}")
