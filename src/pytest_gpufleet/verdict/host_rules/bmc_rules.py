"""What the BMC tells of power and cooling, and of errors: what is wrong now, what its log says against the machine, and
what it has logged during a run. The states and events are those of IPMI 2.0, section 42, as ipmitool words them
(include/ipmitool/ipmi_sel.h)."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.place import THIS_NODE

Sensor = Mapping[str, str]
Event = Mapping[str, Any]
Bmc = Mapping[str, Any]

# How far back the log speaks against a machine, in days by the BMC's own clock: a machine is put together, burnt in and
# delivered within some weeks. What is older was there in a life before, and belongs into the papers of a repair.
LOG_DAYS = 30

# A sensor beyond its critical or non-recoverable threshold. Beyond the non-critical ones a BMC only warns.
CRITICAL = ("lcr", "lnr", "ucr", "unr", "cr", "nr")
SUPPLY_STATES = (
    "Failure detected", "Predictive failure", "Power Supply AC lost", "AC lost or out-of-range",
    "AC out-of-range, but present", "Config Error", "Soft-power control failure",
)  # fmt: skip
NOT_REDUNDANT = ("Redundancy Lost", "Redundancy Degraded", "Non-Redundant")
WORN = ("Transition to Critical", "Transition to Non-recoverable", "Predictive Failure Asserted", "Install Error")
# The air that comes in: kinds of parts 37h and 40h (IPMI 2.0, table 43-13), or by what vendors call it. Power supplies
# (0Ah) have inlets of their own.
INLET, INLET_ENTITIES, SUPPLY_ENTITY = re.compile("inlet|ambient|intake", re.IGNORECASE), ("55", "64"), "10"

# Events by the type of their sensor and how they begin: their fault, and whether they speak against a machine later
# too. Mains that were lost, fans and temperatures do so only if it is now: a machine is moved and unplugged.
LOGGED = {
    ("Memory", "Uncorrectable ECC"): ("bmc_memory_error", True),
    ("Memory", "Parity"): ("bmc_memory_error", True),
    ("Memory", "Critical Overtemperature"): ("bmc_cooling_error", True),
    ("Processor", "IERR"): ("bmc_processor_error", True),
    ("Processor", "Thermal Trip"): ("bmc_cooling_error", True),
    ("Processor", "Uncorrectable machine check exception"): ("bmc_processor_error", True),
    ("Processor", "SM BIOS Uncorrectable CPU-complex Error"): ("bmc_processor_error", True),
    ("Chip Set", "Thermal Trip"): ("bmc_cooling_error", True),
    ("Critical Interrupt", "Bus Fatal Error"): ("bmc_bus_error", True),
    ("Critical Interrupt", "Bus Uncorrectable error"): ("bmc_bus_error", True),
    ("Critical Interrupt", "PCI SERR"): ("bmc_bus_error", True),
    ("Critical Interrupt", "Fatal NMI"): ("bmc_bus_error", True),
    ("Power Supply", "Failure detected"): ("bmc_power_error", True),
    ("Power Supply", "Predictive failure"): ("bmc_power_error", True),
    ("Power Unit", "Failure detected"): ("bmc_power_error", True),
    ("Power Supply", "Power Supply AC lost"): ("bmc_power_error", False),
    ("Power Supply", "AC lost or out-of-range"): ("bmc_power_error", False),
    ("Power Supply", "Redundancy Lost"): ("bmc_power_error", False),
    ("Power Unit", "Redundancy Lost"): ("bmc_power_error", False),
    ("Fan", "Lower Critical going low"): ("bmc_cooling_error", False),
    ("Fan", "Lower Non-recoverable going low"): ("bmc_cooling_error", False),
    ("Temperature", "Upper Critical going high"): ("bmc_cooling_error", False),
    ("Temperature", "Upper Non-recoverable going high"): ("bmc_cooling_error", False),
}
PRESENT, CLEARED = "Presence detected", "Log area reset/cleared"


def power_ills(bmc: Bmc) -> list[Fault]:
    """Power supplies that fail or have no mains, and redundancy that is lost. A bay that is empty shows in redundancy:
    a sensor without reading (ns) may be of a bay that no supply was bought for."""
    sensors: Sequence[Sensor] = bmc["power"]
    return [
        *_faults("power_supply_failed", sensors, lambda sensor: [*_passed(sensor), *_states(sensor, SUPPLY_STATES)]),
        *_faults("power_not_redundant", sensors, lambda sensor: _states(sensor, NOT_REDUNDANT)),
    ]


def fan_ills(bmc: Bmc) -> list[Fault]:
    """Fans that turn too slowly, by the BMC's own thresholds, or fail. One that has no reading is not plugged in."""
    states = (*WORN, *NOT_REDUNDANT)
    return _faults("fan_failed", bmc["fans"], lambda sensor: [*_passed(sensor), *_states(sensor, states)])


def temperature_ills(bmc: Bmc) -> list[Fault]:
    """Air that comes in beyond any of the BMC's own thresholds for it, and parts beyond their critical ones."""
    inlets = [sensor for sensor in bmc["temperatures"] if is_inlet(sensor)]
    others = [sensor for sensor in bmc["temperatures"] if not is_inlet(sensor)]
    return [
        *_faults("inlet_temperature", inlets, lambda sensor: _passed(sensor, (*CRITICAL, "unc", "lnc", "nc"))),
        *_faults("component_temperature", others, lambda sensor: [*_passed(sensor), *_states(sensor, WORN)]),
    ]


def is_inlet(sensor: Sensor) -> bool:
    kind = sensor["entity"].partition(".")[0]
    return kind in INLET_ENTITIES or (kind != SUPPLY_ENTITY and INLET.search(sensor["name"]) is not None)


def _faults(code: str, sensors: Iterable[Sensor], ills: Callable[[Sensor], list[str]]) -> list[Fault]:
    return [Fault(code, (THIS_NODE,), f"{_name(sensor)}: {ill}") for sensor in sensors for ill in ills(sensor)]


def _name(sensor: Sensor) -> str:
    """With the part that it is of, since some vendors call all of them "Status"."""
    return f"{sensor['name']} ({sensor['entity']})"


def _passed(sensor: Sensor, statuses: Sequence[str] = CRITICAL) -> list[str]:
    status = sensor["status"]
    return [f"{sensor['reading']}, beyond the BMC's threshold {status}"] if status in statuses else []


def _states(sensor: Sensor, ill: Sequence[str]) -> list[str]:
    """Those of its states that are of these kinds."""
    return [state for state in sensor["reading"].split(", ") if state.startswith(tuple(ill))]


def logged_errors(log: Mapping[str, Any]) -> list[Fault]:
    """What the BMC's log says against a machine: errors of the last LOG_DAYS that did not go away again."""
    events: Sequence[Event] = log["events"]
    standing, over, day = [], set(), None
    for event in reversed(events):
        kind, day = (
            _kind(event),
            event["day"] or day,
        )  # one that the BMC had no time for: before the next that has a day
        if not event["asserted"]:
            over.add(kind)
        elif kind not in over and _code(event, lasting=True) and _recent(day, log["today"]):
            standing.append(event)
    return _summed_up(reversed(standing))


def logged_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Fault]:
    """What the BMC has logged between two readings, also where it went away again since."""
    return _summed_up(event for event in _new(before, now) if event["asserted"] and _code(event))


def log_full(log: Mapping[str, Any]) -> list[Fault]:
    """That the log has no room: nearly all BMCs take no more events then, and some write over their oldest ones. It is
    so of many machines that are sound, so it speaks against none."""
    if not log["full"]:
        return []
    last = f"its last entry is of {log['events'][-1]['at']}" if log["events"] else "none of its entries can be read"
    return [Fault("bmc_log_full", (THIS_NODE,), f"{last}, and it may have taken none since: save and clear it")]


def cleared_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether somebody has cleared the log between two readings, and with it what it would have told."""
    return any(event["what"] == CLEARED for event in _new(before, now))


def supplies_lost(before: Bmc, now: Bmc) -> list[Fault]:
    """Power supplies that were there and had a reading, and no longer have."""
    there = {_name(sensor) for sensor in now["power"] if PRESENT in sensor["reading"]}
    gone = [sensor for sensor in before["power"] if PRESENT in sensor["reading"] and _name(sensor) not in there]
    return [Fault("power_supply_failed", (THIS_NODE,), f"{_name(sensor)}: it is gone") for sensor in gone]


def _new(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Event]:
    known = [dict(event) for event in before["events"]]
    return (event for event in now["events"] if dict(event) not in known)


def _code(event: Event, lasting: bool = False) -> str:
    """The code of its fault; "" if it speaks against nothing."""
    for (sensor, what), (code, lasts) in LOGGED.items():
        if event["sensor"].startswith(sensor) and event["what"].startswith(what) and (lasts or not lasting):
            return code
    return ""


def _kind(event: Event) -> tuple[str, str]:
    return event["sensor"], event["what"]


def _recent(day: str | None, today: str | None) -> bool:
    """Also where nobody can tell."""
    return not day or not today or (date.fromisoformat(today) - date.fromisoformat(day)).days <= LOG_DAYS


def _summed_up(events: Iterable[Event]) -> list[Fault]:
    """A fault for each kind of event of each sensor."""
    faults = []
    for (sensor, what), found in grouped((_kind(event), event) for event in events).items():
        times = "once" if len(found) == 1 else f"{len(found)} times, the last"
        faults.append(Fault(_code(found[-1]), (THIS_NODE,), f"{sensor}: {what}, {times}, on {found[-1]['at']}"))
    return faults
