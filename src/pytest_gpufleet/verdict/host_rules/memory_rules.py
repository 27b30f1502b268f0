"""What counts as healthy of the memory of a host: its modules, their errors, and what they reach together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE

Controller = Mapping[str, Any]

# Corrected errors of a day that are still healthy: mcelog.conf(5) has 10 for a module ([dimm] ce-error-threshold), and
# 100 for what it cannot lay to any ([socket] mem-ce-error-threshold). Here they are for a run that is shorter, too.
CORRECTED_A_DAY, CORRECTED_A_DAY_OF_NO_MODULE = 10, 100
DAY = 86_400
# Of what its modules can carry, what the triad of STREAM reaches at least. Published from 0.67 (AM64x, TI SPRACV1B) to
# 0.78 (AM62x, TI SPRAD45A); a quarter less where stores read a line before they write it, as here, and a fifth less so
# that no healthy machine misses it.
REACHED = 0.40
CHANNEL_BYTES = 8  # of a transfer, whatever the module's number of chips
MOST_MODULES_OF_A_CHANNEL = 2


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


def filled_slots(modules: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Slots with a module that tells its kind and speed. What hypervisors make up does not."""
    there = (each for each in modules if each["bytes"] and each["configured_speed"])
    return [each for each in there if (each["type"] or "").startswith("DDR")]


def unfit_modules(modules: Sequence[Mapping[str, Any]], sockets: int) -> list[Fault]:
    """Modules that are unlike the others or run slower than they, and sockets that cannot have equally many. That all
    run below their rating is what many processors do to them, with two on a channel above all."""
    there = filled_slots(modules)
    fastest = max((each["configured_speed"] for each in there), default=0)
    kinds = Counter((each["type"], each["bytes"]) for each in there)
    rare = {kind for kind, count in kinds.items() if 2 * count < max(kinds.values())}  # else it was bought so
    faults = [
        Fault("memory_module_unlike", (THIS_NODE,), f"{_slot(each)}: {each['bytes'] / 2**30:g} GiB, {each['type']}")
        for each in there
        if (each["type"], each["bytes"]) in rare
    ]
    faults += [
        Fault("memory_module_slow", (THIS_NODE,), f"{_slot(each)} runs at {speed} MT/s, others at {fastest}")
        for each in there
        if (speed := each["configured_speed"]) < fastest
    ]
    if len(there) % sockets:
        empty = ", ".join(_slot(each) for each in modules if not each["bytes"])
        told = f"{len(there)} modules for {sockets} sockets; empty or unreadable: {empty or 'no slot'}"
        faults.append(Fault("memory_uneven", (THIS_NODE,), told))
    return faults


def _slot(module: Mapping[str, Any]) -> str:
    bank = module["bank"] and f"({module['bank']})"
    return " ".join(filter(None, (module["locator"], bank))) or "a slot without a name"


def memory_below_modules(by_numa_node: Sequence[float], host: Mapping[str, Any]) -> list[Fault]:
    """That all NUMA nodes together move less (GB/s) than the modules carry at the speed that they run at. Nobody tells
    how many channels there are: at least half as many as modules. None where not all nodes were measured, or the facts
    of the host do not tell of real modules."""
    modules, setup = host.get("memory_modules"), host.get("processor_setup")
    if not isinstance(modules, list) or not isinstance(setup, Mapping) or setup["virtual"]:
        return []
    if len(by_numa_node) < len(setup["numa_memory"]):
        return []
    there, reached = filled_slots(modules), sum(by_numa_node)
    speed = min((each["configured_speed"] for each in there), default=0)
    carried = len(there) / MOST_MODULES_OF_A_CHANNEL * speed * CHANNEL_BYTES / 1000
    told = f"{reached:.4g} GB/s, {len(there)} modules at {speed} MT/s carry {carried:.4g} GB/s or more"
    return [Fault("host_memory_slow", (THIS_NODE,), told)] if reached < REACHED * carried else []
