"""The memory of the host: its modules by the firmware (SMBIOS), its errors by the kernel (EDAC), and what is wrong."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.processors import PROCESSOR_SETUP
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, HostFact, why_missing
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.place import Missing

ENTRIES = Path("sys/firmware/dmi/entries")  # of the kernel's module dmi-sysfs
# The System Management BIOS Reference Specification (DMTF DSP0134), 7.18, "Memory Device (Type 17)": where its values
# stand, little-endian, and how many bytes they have. Texts are numbers of the strings behind the values, 0 for none.
TOTAL_WIDTH, DATA_WIDTH, SIZE, EXTENDED_SIZE, TYPE = (0x08, 2), (0x0A, 2), (0x0C, 2), (0x1C, 4), (0x12, 1)
CONFIGURED_SPEED = (0x20, 2)
TEXTS = {"locator": 0x10, "bank": 0x11, "serial": 0x18, "part": 0x1A}
UNKNOWN, EXTENDED, MIB = 0xFFFF, 0x7FFF, 1 << 20
# 7.18.2, those that servers have.
TYPES = {0x18: "DDR3", 0x1A: "DDR4", 0x20: "HBM", 0x21: "HBM2", 0x22: "DDR5", 0x23: "LPDDR5", 0x24: "HBM3"}
VIRTUAL = "a virtual machine does not show the memory modules of its host, nor their errors"


@dataclass(frozen=True)
class Module:
    """A slot: its `locator` is "DIMM_A1". `bytes`: 0 if it is empty. `configured_speed`: in MT/s, as it runs."""

    locator: str | None = None
    bank: str | None = None
    serial: str | None = None
    part: str | None = None
    bytes: int | None = None
    type: str | None = None
    configured_speed: int | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.locator, self.bank and f"({self.bank})"))) or "a slot without a name"


def modules(root: Path = Path("/")) -> tuple[Module, ...]:
    entries = sorted((root / ENTRIES).glob("17-*/raw"), key=lambda entry: int(entry.parent.name.partition("-")[2]))
    if not entries and any((root / ENTRIES).glob("*")):
        raise Absent("the firmware lists no memory modules (SMBIOS type 17)")
    if not entries:
        raise why_missing(root, VIRTUAL, "the kernel does not show the tables of the firmware", "modprobe dmi-sysfs")
    try:
        return tuple(_module(entry.read_bytes()) for entry in entries)
    except PermissionError:
        why = "only root may read what the firmware says of memory modules"
        raise why_missing(root, VIRTUAL, why, AS_ROOT) from None


def _module(raw: bytes) -> Module:
    values, strings = raw[: raw[1]], raw[raw[1] :].split(b"\0")

    def text(offset: int) -> str | None:
        number = _number(values, (offset, 1))
        return (strings[number - 1].decode(errors="replace").strip() if 0 < number <= len(strings) else "") or None

    return Module(
        **{key: text(offset) for key, offset in TEXTS.items()},
        bytes=_bytes(values),
        type=TYPES.get(_number(values, TYPE)),
        configured_speed=_number(values, CONFIGURED_SPEED) or None,
    )


def _number(values: bytes, at: tuple[int, int]) -> int:
    """0 where an entry ends before it."""
    return int.from_bytes(values[at[0] : sum(at)], "little")


def _bytes(values: bytes) -> int | None:
    size = _number(values, SIZE)
    return None if size == UNKNOWN else (_number(values, EXTENDED_SIZE) if size == EXTENDED else size) * MIB


@dataclass(frozen=True)
class Counted:
    """Errors of a module, "DIMM_A1 (mc0, channel 0 slot 0)", in `seconds`, since its counters were last set to 0; or,
    if it is no `module`, what a memory controller counts for none of its own."""

    name: str
    counts: Mapping[str, int]
    seconds: int | None = None
    module: bool = True


# The drivers that count, by the maker of the processors (drivers/edac/Kconfig).
DRIVERS = {"GenuineIntel": "-a i10nm_edac skx_edac", "AuthenticAMD": "amd64_edac"}


def errors(root: Path = Path("/")) -> tuple[Counted, ...]:
    if not (controllers := sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))):
        about = tools.text(root / "proc/cpuinfo") or ""
        driver = next((driver for maker, driver in DRIVERS.items() if maker in about), "ghes_edac")
        if _without_correction(root):
            raise Absent("the memory modules correct no errors (SMBIOS type 17)")
        raise why_missing(root, VIRTUAL, "no EDAC driver counts the errors of host memory", f"modprobe {driver}")
    found = []
    for controller in controllers:
        seconds, rest = tools.whole(controller / "seconds_since_reset"), _counts(controller, "")
        for dimm in sorted(controller.glob("dimm[0-9]*"), key=lambda path: int(path.name[4:])):
            counts = _counts(dimm, "dimm_")
            rest = {kind: max(0, left - counts[kind]) for kind, left in rest.items()}
            where = ", ".join(filter(None, (controller.name, tools.text(dimm / "dimm_location"))))
            found.append(Counted(f"{tools.text(dimm / 'dimm_label') or dimm.name} ({where})", counts, seconds))
        found.append(Counted(f"memory controller {controller.name}", rest, seconds, module=False))
    return tuple(found)


def _counts(folder: Path, begin: str) -> dict[str, int]:
    kinds = {"corrected": "ce", "uncorrected": "ue"}
    return {kind: tools.whole(folder / f"{begin}{name}_count") or 0 for kind, name in kinds.items()}


def _without_correction(root: Path) -> bool:
    """Whether no DDR module, as desktops have them, has bits beside those of data. Others correct errors inside."""
    raw = list[bytes]()
    with suppress(OSError):
        raw = [entry.read_bytes() for entry in (root / ENTRIES).glob("17-*/raw")]
    there = [each for each in raw if _bytes(each) and TYPES.get(_number(each, TYPE), "").startswith("DDR")]
    widths = {(_number(each, TOTAL_WIDTH), _number(each, DATA_WIDTH)) for each in there}
    return bool(widths) and all(0 < total == data < UNKNOWN for total, data in widths)


MEMORY_MODULES = HostFact("memory_modules", tuple[Module, ...], modules, subject="memory")
MEMORY_ERRORS = HostFact("memory_errors", tuple[Counted, ...], errors, subject="memory")

# Corrected errors of a day that are still healthy: mcelog.conf(5) has 10 for a module ([dimm] ce-error-threshold), and
# 100 for what it cannot lay to any ([socket] mem-ce-error-threshold). Here they are for a run that is shorter, too.
CORRECTED_A_DAY, CORRECTED_A_DAY_OF_NO_MODULE = 10, 100
DAY = 86_400
# Of what its modules can carry, what the triad of STREAM reaches at least. Published from 0.67 (AM64x, TI SPRACV1B) to
# 0.78 (AM62x, TI SPRAD45A); a quarter less as stores read a line before they write it, and a fifth less for safety.
REACHED = 0.40
CHANNEL_BYTES = 8  # of a transfer, whatever the module's number of chips
MOST_MODULES_OF_A_CHANNEL = 2


def recorded_errors(counted: Iterable[Counted]) -> list[Fault]:
    """What the kernel has counted since it started, or since somebody set its counters to 0."""
    return [fault for each in counted for fault in _faults(each, each.seconds or DAY)]


def errors_grown(before: Iterable[Counted], now: Iterable[Counted], seconds: float) -> list[Fault]:
    """What came on top of it between two readings so many seconds apart; all where counters began anew."""
    then = {each.name: each.counts for each in before}
    grown = (replace(each, counts=tools.grown(then.get(each.name, each.counts), each.counts)) for each in now)
    return [fault for each in grown for fault in _faults(each, seconds)]


def _faults(counted: Counted, seconds: float) -> Iterator[Fault]:
    corrected, uncorrected = (counted.counts.get(kind, 0) for kind in ("corrected", "uncorrected"))
    allowed = CORRECTED_A_DAY if counted.module else CORRECTED_A_DAY_OF_NO_MODULE
    if uncorrected > 0:
        yield node_fault("host_memory_uncorrected", f"{counted.name}: {uncorrected:,} uncorrected errors")
    if corrected > allowed * max(1.0, seconds / DAY):
        what = f"{corrected:,} corrected errors in {seconds / 3600:.3g} h, {allowed} a day are still healthy"
        yield node_fault("host_memory_corrected", f"{counted.name}: {what}")


def filled_slots(slots: Iterable[Module]) -> list[Module]:
    """Those with a module of a known kind and speed. What hypervisors make up has none."""
    return [each for each in slots if each.bytes and each.configured_speed and (each.type or "").startswith("DDR")]


def unfit_modules(slots: Sequence[Module], sockets: int) -> list[Fault]:
    """Modules unlike the others or slower, and sockets that cannot have equally many. That all run below their rating
    is what many processors do, with two on a channel above all."""
    there = filled_slots(slots)
    fastest = max((each.configured_speed or 0 for each in there), default=0)
    kinds = Counter((each.type, each.bytes) for each in there)
    rare = {kind for kind, count in kinds.items() if 2 * count < max(kinds.values())}  # else it was bought so
    unlike = (each for each in there if (each.type, each.bytes) in rare)
    wrong = [node_fault("dimm_mismatch", f"{each}: {(each.bytes or 0) / 2**30:g} GiB, {each.type}") for each in unlike]
    for each in there:
        if (speed := each.configured_speed or 0) < fastest:
            wrong.append(node_fault("dimm_slow", f"{each} runs at {speed} MT/s, others at {fastest}"))
    if len(there) % sockets:
        empty = ", ".join(str(each) for each in slots if not each.bytes) or "no slot"
        what = f"{len(there)} modules for {sockets} sockets; empty or unreadable: {empty}"
        wrong.append(node_fault("numa_memory_imbalance", what))
    return wrong


def slower_than_modules(by_numa_node: Sequence[float], host: Mapping[str, Any]) -> list[Fault]:
    """All NUMA nodes together move less (GB/s) than the modules carry as they run. Nobody knows how many channels there
    are: at least half as many. None where not all nodes were measured, or no real modules are known."""
    slots, setup = MEMORY_MODULES.of(host), PROCESSOR_SETUP.of(host)
    if isinstance(slots, Missing) or isinstance(setup, Missing) or setup.virtual:
        return []
    there, reached = filled_slots(slots), sum(by_numa_node)
    speed = min((each.configured_speed or 0 for each in there), default=0)
    carried = len(there) / MOST_MODULES_OF_A_CHANNEL * speed * CHANNEL_BYTES / 1000
    if len(by_numa_node) < len(setup.numa_memory) or reached >= REACHED * carried:
        return []
    what = f"{reached:.4g} GB/s, {len(there)} modules at {speed} MT/s carry {carried:.4g} GB/s or more"
    return [node_fault("host_memory_slow", what)]
