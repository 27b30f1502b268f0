"""What counts as healthy of the parts of a host: its processors, its memory, its drives."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE

# Clock sources that are read over the bus, each time: about 1 us instead of 0.02 us, and not by every processor at
# once. arch/x86/kernel/hpet.c rates its own 250, drivers/clocksource/acpi_pm.c 200, the kernel's last resorts below
# 10; tsc, kvm-clock, hyperv_clocksource_tsc_page and arch_sys_counter have 300 to 500. check_processor.py of Meta's GCM
# asks for the name of one.
SLOW_CLOCKS = ("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies")
# Of 16 modules of a socket one is 6 %. What the firmware and the kernel keep for themselves is some GiB of one node.
LESS_MEMORY = 0.05


def slow_clock(processors: Mapping[str, Any]) -> list[Fault]:
    """A clock source that slows down every program that looks at the time."""
    source = processors["clock_source"]
    return [Fault("clock_source_slow", (THIS_NODE,), f"{source} is in use")] if source in SLOW_CLOCKS else []


def offline_processors(processors: Mapping[str, Any]) -> list[Fault]:
    """Processors that are there and switched off, unless that is how somebody turned off all second threads."""
    offline = processors["offline"]
    if not offline or processors["smt"] in ("off", "forceoff"):
        return []
    shown = ", ".join(map(str, offline[:8])) + (" and others" if len(offline) > 8 else "")
    return [Fault("cpu_offline", (THIS_NODE,), f"{len(offline)} are offline: {shown}")]


def nodes_with_less_memory(processors: Mapping[str, Any]) -> list[Fault]:
    """NUMA nodes that have less memory than the one that has most."""
    memory = processors["numa_memory"]
    most = max(memory.values(), default=0)
    less = [(node, nbytes / 1e9) for node, nbytes in memory.items() if nbytes < (1 - LESS_MEMORY) * most]
    told = [f"NUMA node {node} has {size:.4g} GB, another one {most / 1e9:.4g}" for node, size in less]
    return [Fault("numa_memory_imbalance", (THIS_NODE,), what) for what in told]


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
        for name, allowed, counts in _errors_of(controller)
        for fault in _memory_faults(name, counts, allowed, controller["seconds"] or DAY)
    ]


def memory_errors_grown(before: Sequence[Controller], now: Sequence[Controller], seconds: float) -> list[Fault]:
    """What came on top of it between two readings so many seconds apart."""
    then = {name: counts for controller in before for name, _, counts in _errors_of(controller)}
    faults: list[Fault] = []
    for name, allowed, counts in (each for controller in now for each in _errors_of(controller)):
        grown = [count - was for count, was in zip(counts, then.get(name, counts), strict=True)]
        faults += _memory_faults(name, grown, allowed, seconds)
    return faults


def _errors_of(controller: Controller) -> Iterator[tuple[str, int, Sequence[int]]]:
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


def _memory_faults(name: str, counts: Sequence[int], allowed: int, seconds: float) -> Iterator[Fault]:
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
        Fault("dimm_mismatch", (THIS_NODE,), f"{_slot(each)}: {each['bytes'] / 2**30:g} GiB, {each['type']}")
        for each in there
        if (each["type"], each["bytes"]) in rare
    ]
    faults += [
        Fault("dimm_slow", (THIS_NODE,), f"{_slot(each)} runs at {speed} MT/s, others at {fastest}")
        for each in there
        if (speed := each["configured_speed"]) < fastest
    ]
    if len(there) % sockets:
        empty = ", ".join(_slot(each) for each in modules if not each["bytes"])
        told = f"{len(there)} modules for {sockets} sockets; empty or unreadable: {empty or 'no slot'}"
        faults.append(Fault("numa_memory_imbalance", (THIS_NODE,), told))
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


# NVM Express Base Specification, SMART / Health Information, Critical Warning. Bit 1 is for its temperature.
HOT = 1 << 1
WORN = 1 << 2
WARNINGS = {
    1 << 0: "its spare blocks are below its own threshold",
    WORN: "its reliability is degraded",
    1 << 3: "it can only be read",
    1 << 4: "the backup of its volatile memory failed",
    1 << 5: "its persistent memory region is unreliable",
}
USED_UP = 100  # % of the writes that the maker expects it to last for, as the same log counts them


def sick_drives(drives: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """By what drives say of themselves. Many unsafe shutdowns, or a few per cent of wear, are no sickness."""
    return [
        Fault(code, (THIS_NODE,), f"{drive['device']}{f' ({model})' if (model := drive['model']) else ''}: {what}")
        for drive in drives
        if "silent" not in drive
        for code, what in _sickness(drive)
    ]


def _sickness(drive: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    warning, used = drive["critical_warning"] or 0, drive["used"] or 0
    if worn := used >= USED_UP:
        yield "drive_worn", f"{used} % of the writes that it was made for are used"
        warning &= ~WORN  # which is what some makers mean by it: smartmontools issue 537
    for bit, what in WARNINGS.items():
        if warning & bit:
            yield "drive_failing", what
    if warning & HOT:
        yield "drive_too_hot", f"{drive['celsius']} °C are outside its own limits"
    if drive["passed"] is False and not warning and not worn:
        yield "drive_failing", "its own test of its health (SMART) failed"
    yield from _drive_errors(drive)


def _drive_errors(drive: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of SSDs the blocks that were replaced are left out: makers count other things there."""
    kinds = {"media_errors": "errors of its medium", "pending": "sectors that it cannot read now",
             "uncorrectable": "sectors that it could not correct"}  # fmt: skip
    if drive["rotating"]:
        kinds["reallocated"] = "sectors that it had to replace"
    for kind, words in kinds.items():
        if count := drive[kind]:
            yield "drive_errors", f"{count:,} {words}"
