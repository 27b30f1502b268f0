"""The baseboard management controller (BMC): its event log, power supplies, fans and temperatures, and what is wrong
with them. By ipmitool over IPMI: Redfish would need an address and an account. What it prints for people is parsed: its
`-c` quotes nothing, and has other columns for each kind of sensor. 1.8.18 and 1.8.19 print the same, but for dates
(lib/ipmi_sel.c). States and events are those of IPMI 2.0, section 42, in the words of include/ipmitool/ipmi_sel.h."""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.tools import Absent, HostFact, RunTool, Unreadable, output, unreadable_here, why_missing
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.place import grouped


class Sensor(msgspec.Struct, frozen=True):
    """`entity`: kind of part and number ("10.1"). `status`: "ok", "ns" without a reading, else the threshold passed."""

    name: str
    entity: str
    status: str
    reading: str

    def __str__(self) -> str:  # some vendors call all sensors "Status"
        return f"{self.name} ({self.entity})"


class LoggedEvent(msgspec.Struct, frozen=True):
    """`sensor`: with its type in front."""

    id: str
    at: str
    sensor: str
    what: str
    asserted: bool


class EventLog(msgspec.Struct, frozen=True):
    """`now`: by the BMC's clock. `events`: the newest, oldest first."""

    now: str
    full: bool
    events: tuple[LoggedEvent, ...]


class Bmc(msgspec.Struct, frozen=True):
    """`log`: None if it cannot be read, and `log_unreadable` says why."""

    power: tuple[Sensor, ...] = ()
    fans: tuple[Sensor, ...] = ()
    temperatures: tuple[Sensor, ...] = ()
    log: EventLog | None = None
    log_unreadable: str = ""


LEAK = re.compile("leak", re.IGNORECASE)  # by name: IPMI has no type of sensor for it
VIRTUAL = "a virtual machine has no BMC"
# For one walk over all sensors or the log. A BMC may take 5 s for each sensor that is not there (ipmitool, issue 145).
SECONDS = 180.0
DRIVERS = "modprobe -a dmi-sysfs ipmi_si ipmi_ssif ipmi_devintf"  # the first shows whether there is a BMC


def read(root: Path = Path("/"), run: RunTool = output) -> Bmc:
    _require(root)
    # The types of sensors as `ipmitool sdr type list` has them. Redundancy is of one or the other type.
    power, fans, temperatures = (
        tuple(sensor for kind in kinds for sensor in _sensors(run("ipmitool", "sdr", "type", kind, seconds=SECONDS)))
        for kinds in (("Power Supply", "Power Unit"), ("Fan",), ("Temperature",))
    )
    try:
        return Bmc(power, fans, temperatures, _log(run))
    except Unreadable as why:
        return Bmc(power, fans, temperatures, log_unreadable=str(why))


def read_leaks(root: Path = Path("/"), run: RunTool = output) -> tuple[Sensor, ...]:
    _require(root)
    return tuple(each for each in _sensors(run("ipmitool", "sdr", "elist", seconds=SECONDS)) if LEAK.search(each.name))


def _require(root: Path) -> None:
    # Where ipmitool looks for the kernel's interface (src/plugins/open/open.c).
    device = next((path for name in ("ipmi0", "ipmi/0", "ipmidev/0") if (path := root / "dev" / name).exists()), None)
    if device is None:
        raise _without(root, "there is no /dev/ipmi0")
    if not os.access(device, os.R_OK | os.W_OK):
        raise unreadable_here(root, "only root may ask the BMC, by /dev/ipmi0")


def read_firmware(root: Path = Path("/")) -> str:
    """Its version, as "24.9": the driver writes the part behind the point in hexadecimal
    (drivers/char/ipmi/ipmi_msghandler.c, firmware_revision_show)."""
    for path in sorted((root / "sys/devices/platform").glob("ipmi_bmc.*/firmware_revision")):
        if version := tools.text(path):
            return version
    raise _without(root, "no BMC answers the kernel of this system")


def _without(root: Path, why: str) -> Absent | Unreadable:
    """SMBIOS lists the interface of a BMC as type 38 (DMTF DSP0134, 7.39)."""
    entries = root / "sys/firmware/dmi/entries"
    if any(entries.glob("*")) and not any(entries.glob("38-*")):
        return Absent("the firmware lists no BMC (SMBIOS type 38)")
    return why_missing(root, VIRTUAL, why, DRIVERS)


def _sensors(printed: str) -> list[Sensor]:
    """Of lines like "PSU1 Status | E0h | ok | 10.1 | Presence detected"."""
    return [Sensor(row[0], row[3], row[2], row[4]) for row in _rows(printed, "|") if len(row) == 5]


def _rows(printed: str, between: str) -> list[list[str]]:
    return [[field.strip() for field in line.split(between)] for line in printed.splitlines()]


def _log(run: RunTool) -> EventLog:
    """Of lines like "7 | 09/08/2021 | 06:34:15 | Power Supply #0x3b | Failure detected | Asserted". Records of vendors
    have fewer columns and are left out. ipmitool walks the whole log to its last entries, milliseconds for each."""
    about = {row[0]: row[1] for row in _rows(run("ipmitool", "sel", "info"), ":") if len(row) == 2}
    full = about.get("Overflow") == "true" or about.get("Percent Used") == "100%"
    rows = _rows(run("ipmitool", "sel", "elist", "last", "200", seconds=SECONDS), "|")
    clock = run("ipmitool", "sel", "time", "get").strip()
    events = (
        LoggedEvent(row[0], f"{row[1]} {row[2]}", row[3], row[4], row[5] == "Asserted")
        for row in rows
        if len(row) >= 6 and row[5] in ("Asserted", "Deasserted")
    )
    return EventLog(clock, full, tuple(events))


def _day(at: str) -> date | None:
    """None for "Pre-Init". 1.8.18 writes the year with four digits, 1.8.19 as the locale C does."""
    for form in ("%m/%d/%Y", "%m/%d/%y"):
        with suppress(ValueError):
            return datetime.strptime(at.partition(" ")[0], form).date()
    return None


BMC_FIRMWARE = HostFact("bmc_firmware", str, read_firmware)
BMC = HostFact("bmc", Bmc, read, subject="bmc", on_request=True)
LEAKS = HostFact("leaks", tuple[Sensor, ...], read_leaks, subject="leaks", on_request=True)

# How far back the log speaks against a machine, in days by the BMC's own clock: a machine is put together, burnt in and
# delivered within some weeks. What is older was there in a life before, and belongs into the papers of a repair.
LOG_DAYS = 30

# A sensor beyond its critical or non-recoverable threshold. Beyond the non-critical ones a BMC only warns.
CRITICAL, NON_CRITICAL = ("lcr", "lnr", "ucr", "unr", "cr", "nr"), ("unc", "lnc", "nc")
PRESENT, CLEARED = "Presence detected", "Log area reset/cleared"
SUPPLY_STATES = (
    "Failure detected", "Predictive failure", "Power Supply AC lost", "AC lost or out-of-range",
    "AC out-of-range, but present", "Config Error", "Soft-power control failure",
)  # fmt: skip
NOT_REDUNDANT = ("Redundancy Lost", "Redundancy Degraded", "Non-Redundant")
WORN = ("Transition to Critical", "Transition to Non-recoverable", "Predictive Failure Asserted", "Install Error")
# Of the generic states of IPMI 2.0, table 42-2, those that say that something is so.
WET = ("State Asserted", "Limit Exceeded", "Transition to Critical", "Transition to Non-recoverable")
# The air that comes in: parts 37h and 40h (IPMI 2.0, table 43-13), or by its name. Power supplies (0Ah) have their own.
INLET, INLET_ENTITIES, SUPPLY_ENTITY = re.compile("inlet|ambient|intake", re.IGNORECASE), ("55", "64"), "10"

# The fault of events by the type of their sensor and how they begin, and whether they speak against a machine later
# too. Mains that were lost, fans and temperatures do so only if it is now: a machine is moved and unplugged.
LASTING, NOW = True, False
LOGGED = (
    ("bmc_memory_error", LASTING, "Memory", ("Uncorrectable ECC", "Parity")),
    ("bmc_cooling_error", LASTING, "Memory", ("Critical Overtemperature",)),
    ("bmc_processor_error", LASTING, "Processor",
     ("IERR", "Uncorrectable machine check exception", "SM BIOS Uncorrectable CPU-complex Error")),
    ("bmc_cooling_error", LASTING, ("Processor", "Chip Set"), ("Thermal Trip",)),
    ("bmc_bus_error", LASTING, "Critical Interrupt",
     ("Bus Fatal Error", "Bus Uncorrectable error", "PCI SERR", "Fatal NMI")),
    ("bmc_power_error", LASTING, "Power Supply", ("Failure detected", "Predictive failure")),
    ("bmc_power_error", LASTING, "Power Unit", ("Failure detected",)),
    ("bmc_power_error", NOW, "Power Supply", ("Power Supply AC lost", "AC lost or out-of-range", "Redundancy Lost")),
    ("bmc_power_error", NOW, "Power Unit", ("Redundancy Lost",)),
    ("bmc_cooling_error", NOW, "Fan", ("Lower Critical going low", "Lower Non-recoverable going low")),
    ("bmc_cooling_error", NOW, "Temperature", ("Upper Critical going high", "Upper Non-recoverable going high")),
)  # fmt: skip


def failed_supplies(found: Bmc) -> list[Fault]:
    """An empty bay shows in redundancy: nobody may have bought a supply for a sensor without a reading (ns)."""
    failed = _faults("power_supply_failed", found.power, CRITICAL, SUPPLY_STATES)
    return failed + _faults("power_not_redundant", found.power, states=NOT_REDUNDANT)


def failed_fans(found: Bmc) -> list[Fault]:
    """Fans that turn too slowly, by the BMC's own thresholds, or fail. One that has no reading is not plugged in."""
    return _faults("fan_failed", found.fans, CRITICAL, (*WORN, *NOT_REDUNDANT))


def high_temperatures(found: Bmc) -> list[Fault]:
    """Air that comes in beyond any of the BMC's own thresholds for it, and parts beyond their critical ones."""
    inlets = [sensor for sensor in found.temperatures if is_inlet(sensor)]
    others = [sensor for sensor in found.temperatures if sensor not in inlets]
    too_warm = _faults("inlet_temperature", inlets, (*CRITICAL, *NON_CRITICAL))
    return too_warm + _faults("component_temperature", others, CRITICAL, WORN)


def coolant_leaks(leaks: Iterable[Sensor]) -> list[Fault]:
    return _faults("coolant_leak", leaks, CRITICAL, WET)


def is_inlet(sensor: Sensor) -> bool:
    kind = sensor.entity.partition(".")[0]
    return kind in INLET_ENTITIES or (kind != SUPPLY_ENTITY and INLET.search(sensor.name) is not None)


def _faults(
    code: str, sensors: Iterable[Sensor], statuses: Sequence[str] = (), states: tuple[str, ...] = ()
) -> list[Fault]:
    faults = []
    for sensor in sensors:
        what = [state for state in sensor.reading.split(", ") if state.startswith(states)]
        if sensor.status in statuses:
            what.insert(0, f"{sensor.reading}, beyond the BMC's threshold {sensor.status}")
        faults += [node_fault(code, f"{sensor}: {each}") for each in what]
    return faults


def logged_errors(log: EventLog) -> list[Fault]:
    """Errors of the last LOG_DAYS that did not go away again. Those of which nobody knows the day count too."""
    errors, over, day, today = [], set(), None, _day(log.now)
    for event in reversed(log.events):
        day = _day(event.at) or day  # one that the BMC had no time for: before the next that has a day
        recent = not day or not today or (today - day).days <= LOG_DAYS
        if not event.asserted:
            over.add((event.sensor, event.what))
        elif (event.sensor, event.what) not in over and _code(event, lasting=True) and recent:
            errors.append(event)
    return _summed_up(reversed(errors))


def logged_since(before: EventLog, now: EventLog) -> list[Fault]:
    """What the BMC has logged between two readings, also where it went away again since."""
    return _summed_up(event for event in now.events if event not in before.events and event.asserted and _code(event))


def log_full(log: EventLog) -> list[Fault]:
    """Shown only: nearly all BMCs take no more events then, some write over old ones, and many healthy ones are so."""
    last = f"its last entry is of {log.events[-1].at}" if log.events else "none of its entries can be read"
    what = f"{last}, and it may have taken none since: save and clear it"
    return [node_fault("bmc_log_full", what)] if log.full else []


def cleared_since(before: EventLog, now: EventLog) -> bool:
    """Whether somebody has cleared the log between two readings, for which not every BMC has an event."""
    lost = before.events and before.events[-1] not in now.events
    return bool(lost) or any(event.what == CLEARED and event not in before.events for event in now.events)


def supplies_lost(before: Bmc, now: Bmc) -> list[Fault]:
    was, there = ([str(each) for each in found.power if PRESENT in each.reading] for found in (before, now))
    return [node_fault("power_supply_failed", f"{sensor}: it is gone") for sensor in was if sensor not in there]


def _code(event: LoggedEvent, lasting: bool = False) -> str:
    """The code of its fault; "" if it speaks against nothing."""
    if LEAK.search(event.sensor) and event.what.startswith(WET):
        return "coolant_leak"
    for code, lasts, sensor, what in LOGGED:
        if event.sensor.startswith(sensor) and event.what.startswith(what) and (lasts or not lasting):
            return code
    return ""


def _summed_up(events: Iterable[LoggedEvent]) -> list[Fault]:
    faults = []
    for (sensor, what), found in grouped(((event.sensor, event.what), event) for event in events).items():
        times = "once" if len(found) == 1 else f"{len(found)} times, the last"
        faults.append(node_fault(_code(found[-1]), f"{sensor}: {what}, {times}, on {found[-1].at}"))
    return faults
