"""What is read of a BMC: broken parts are named, and machines that only look so pass."""

from datetime import date
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from pytest_gpufleet.machine import bmc
from pytest_gpufleet.model import codec
from tests.acceptance.checks import outcomes
from tests.machine.trees import laid_out, replaced
from tests.machines import recorded, set_gpus

SUPPLIES = """PS Redundancy    | 77h | ok  |  7.1 | Fully Redundant
Status           | 85h | ok  | 10.1 | Presence detected
Status           | 86h | ok  | 10.2 | Presence detected
"""
# Two of four power supplies without mains, next to the R740xd of trees/bmc.txt.
DGX_1 = """PSU Alert        | 34h | ns  | 208.1 | Event-Only
PSU Redundancy   | E8h | ok  | 21.1 | Non-Redundant: Insufficient Resources
PSU1 Status      | E0h | ok  | 10.1 | Presence detected, Power Supply AC lost
PSU2 Status      | E1h | ok  | 10.2 | Presence detected, Power Supply AC lost
PSU3 Status      | E2h | ok  | 10.3 | Presence detected
PSU4 Status      | E3h | ok  | 10.4 | Presence detected
"""
# JumpScale's health check of power supplies, sample 2: two bays that nobody bought a supply for.
TWO_BAYS_EMPTY = """PSU1_Status | DEh | ok | 10.1 | Presence detected
PSU2_Status | DFh | ns | 10.2 | No Reading
PSU3_Status | E0h | ok | 10.3 | Presence detected
PSU4_Status | E1h | ns | 10.4 | No Reading
PSU Redundancy | E6h | ok | 21.1 | Fully Redundant
"""
# A Cisco server with one of two supplies.
ONE_MISSING = """PSU1_STATUS      | 26h | ok  | 10.1 | Presence detected
PSU1_PWRGD       | 28h | ok  | 10.1 | State Asserted
PSU1_POUT        | 2Bh | ok  | 10.1 | 120 Watts
PSU2_STATUS      | 2Ch | ok  | 10.2 |
PSU2_PWRGD       | 2Eh | ns  | 10.2 | No Reading
PS_RDNDNT_MODE   | ADh | ok  | 20.0 | Non-Redundant: Sufficient from Redundant
"""
# Checkmk, the comments of its check of ipmi.
DEAD = """PS1 Status       | C8h | ok | 10.1 | Presence detected, Failure detected
PS2 Status       | C9h | ok | 10.2 | Presence detected
Power Redundancy | 02h | ok | 21.1 | Redundancy Lost
"""


def read(tmp_path, *changes):
    """The BMC of trees/bmc.txt after these changes of its text."""
    tree = laid_out("bmc", tmp_path, replaced(*changes))
    return bmc.read(tree.root, tree.run)


def found(faults):
    assert all(str(subject) == "node" for fault in faults for subject in fault.subjects)
    return {(fault.name, fault.what.partition(":")[0]) for fault in faults}


FAN, INLET, PROCESSOR = "| ok  | 29.7 | 1960 RPM", "| ok  |  7.1 | 14 degrees C", "| ns  |  3.1 | No Reading"
SENSORS = {
    "no mains": (bmc.failed_supplies, SUPPLIES, DGX_1, {
        ("power_supply_failed", "PSU1 Status (10.1)"), ("power_supply_failed", "PSU2 Status (10.2)"),
        ("power_not_redundant", "PSU Redundancy (21.1)")}),
    "one missing": (bmc.failed_supplies, SUPPLIES, ONE_MISSING, {("power_not_redundant", "PS_RDNDNT_MODE (20.0)")}),
    "dead": (bmc.failed_supplies, SUPPLIES, DEAD, {
        ("power_supply_failed", "PS1 Status (10.1)"), ("power_not_redundant", "Power Redundancy (21.1)")}),
    "bays that are empty by design": (bmc.failed_supplies, SUPPLIES, TWO_BAYS_EMPTY, set()),
    "stalling fan": (bmc.failed_fans, FAN, "| lcr | 29.7 | 420 RPM", {("fan_failed", "FANB (29.7)")}),
    "slow fan": (bmc.failed_fans, FAN, "| lnc | 29.7 | 700 RPM", set()),
    "warm air": (bmc.high_temperatures, INLET, "| unc |  7.1 | 43 degrees C",
                 {("inlet_temperature", "Inlet Temp (7.1)")}),
    "hot processor": (bmc.high_temperatures, PROCESSOR, "| ucr |  3.1 | 98 degrees C",
                      {("component_temperature", "Temp (3.1)")}),
    "warm processor": (bmc.high_temperatures, PROCESSOR, "| unc |  3.1 | 88 degrees C", set()),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "old", "new", "faults"), SENSORS.values(), ids=SENSORS)
def test_power_supplies_fans_and_temperatures(tmp_path, rule, old, new, faults):
    assert found(rule(read(tmp_path, (old, new)))) == faults


MEMORY = "   8 | 06/17/2025 | 10:03:02 | Memory | Uncorrectable ECC (@DIMMG1(CPU1)) | Asserted\n"
CORRECTED = "   7 | 06/17/2025 | 10:00:00 | Memory #0x01 | Correctable ECC | Asserted\n"
IERR = "System ACPI Power State #0xd5 | S0/G0: working", "Processor #0x91 | IERR"
LONG_AGO = "06/18/2025 08:00:00", "08/18/2025 08:00:00"
LEAK = "   8 | 06/17/2025 | 10:03:02 | Cooling Device Leak_Det_CPU0 | State Asserted | Asserted\n"


@pytest.mark.parametrize(("changes", "errors"), [
    ([(CORRECTED, CORRECTED + MEMORY)], {("bmc_memory_error", "Memory")}),
    ([(CORRECTED, CORRECTED + MEMORY), LONG_AGO], set()),
    # As 1.8.19 writes dates and time.
    ([(CORRECTED, CORRECTED + MEMORY.replace("/2025", "/25")), ("06/18/2025 08", "08/18/25 08")], set()),
    ([(" Bus Fatal Error | Deasserted", " Bus Fatal Error | Asserted")],
     {("bmc_bus_error", "Critical Interrupt #0x90")}),
    ([("  6 | 06/17/2025 | 09:29:15 | Power Supply #0xc8", "  6 | 06/17/2025 | 09:29:15 | Power Supply #0xc9")],
     {("bmc_power_error", "Power Supply #0xc8")}),
    ([("Memory #0x01 | Correctable ECC", "Power Supply #0x01 | Power Supply AC lost")], set()),  # it was moved
    # Before the BMC knew the time, and so just before the next event that has one.
    ([IERR], {("bmc_processor_error", "Processor #0x91")}),
    ([IERR, LONG_AGO], set()),
    ([(CORRECTED, CORRECTED + LEAK)], {("coolant_leak", "Cooling Device Leak_Det_CPU0")}),
    ([(CORRECTED, CORRECTED + LEAK.replace("State Asserted", "State Deasserted"))], set()),
])  # fmt: skip
def test_the_log_speaks_against_a_machine(tmp_path, changes, errors):
    assert found(bmc.logged_errors(read(tmp_path, *changes).log)) == errors


def test_what_comes_and_what_goes_during_a_run(tmp_path):
    """What is logged counts also if it went away again; a power supply that is gone at the end is lost."""
    before = read(tmp_path / "before")
    dropped = (
        "   8 | 06/18/2025 | 06:34:16 | Power Supply #0x3b | Power Supply AC lost | Asserted\n"
        "   9 | 06/18/2025 | 06:34:17 | Power Supply #0x3b | Power Supply AC lost | Deasserted\n"
    )
    gone = ("86h | ok  | 10.2 | Presence detected", "86h | ns  | 10.2 | No Reading")
    now = read(tmp_path / "now", (CORRECTED, CORRECTED + dropped), gone)
    assert found(bmc.logged_since(before.log, now.log)) == {("bmc_power_error", "Power Supply #0x3b")}
    assert found(bmc.supplies_lost(before, now)) == {("power_supply_failed", "Status (10.2)")}
    assert bmc.logged_since(before.log, before.log) == bmc.supplies_lost(before, before) == []
    came_back = read(tmp_path / "back", (CORRECTED, CORRECTED + dropped.partition("\n")[2]))
    assert bmc.logged_since(before.log, came_back.log) == []
    assert not bmc.cleared_since(before.log, now.log)
    cleared = replace(before.log, events=(replace(before.log.events[0], at="06/18/2025 07:00:00"),))
    assert bmc.cleared_since(before.log, cleared)
    without_a_word = replace(cleared, events=(replace(cleared.events[0], what="Failure detected"),))
    assert bmc.cleared_since(before.log, without_a_word)


def test_a_bmc_may_take_minutes_for_its_sensors(tmp_path):
    """5 s for each that is not there: ipmitool/ipmitool issue 145."""
    tree = laid_out("bmc", tmp_path, lambda text: text + ELIST)
    run = Mock(wraps=tree.run)
    bmc.read(tree.root, run)
    bmc.read_leaks(tree.root, run)
    assert min(call.kwargs["seconds"] for call in run.call_args_list if "sdr" in call.args) >= 150


# No published listing of ipmitool with a leak sensor is known: the form is that of SUPPLIES, states are those of IPMI.
DRY = """Leak_Det_CPU0    | A1h | ok  | 30.1 | State Deasserted
Leak_Det_Mfld    | A2h | ok  | 30.2 | Transition to OK
LEAKAGE_3        | A3h | ns  | 30.3 | No Reading
"""
ELIST = "== $ ipmitool sdr elist\nInlet Temp       | 04h | ok  |  7.1 | 14 degrees C\n"


@pytest.mark.parametrize(("old", "new", "leaks"), [
    ("", "", set()),
    ("A1h | ok  | 30.1 | State Deasserted", "A1h | ok  | 30.1 | State Asserted", {"Leak_Det_CPU0 (30.1)"}),
    ("Transition to OK", "Transition to Critical from less severe", {"Leak_Det_Mfld (30.2)"}),
    ("A2h | ok  | 30.2 | Transition to OK", "A2h | ucr | 30.2 | 4.9 Volts", {"Leak_Det_Mfld (30.2)"}),
], ids=["dry", "asserted", "critical", "beyond its threshold"])  # fmt: skip
def test_leak_sensors(tmp_path, old, new, leaks):
    tree = laid_out("bmc", tmp_path, lambda text: text + ELIST + DRY.replace(old, new))
    sensors = bmc.read_leaks(tree.root, tree.run)
    assert len(sensors) == 3
    assert found(bmc.coolant_leaks(sensors)) == {("coolant_leak", sensor) for sensor in leaks}
    check = outcomes(recorded(), now={"leaks": codec.plain(sensors)})["test_no_coolant_leaks"]
    assert check.what == ("failed" if leaks else "passed")


@pytest.mark.parametrize(("gpu", "sensors", "what"), [
    ("NVIDIA H200", [], "not applicable"),  # cooled by air
    ("NVIDIA GB200", [], "skipped"),  # whose trays have them in Redfish alone
    ("NVIDIA H200", [bmc.Sensor("Leak_1", "30.1", "ns", "No Reading")], "skipped"),
], ids=["air", "rack", "without a reading"])  # fmt: skip
def test_leak_sensors_that_say_nothing(gpu, sensors, what):
    there = recorded(set_gpus(name=gpu))
    assert outcomes(there, now={"leaks": codec.plain(sensors)})["test_no_coolant_leaks"].what == what


CHECKS = (
    "test_power_supplies_are_sound", "test_fans_are_sound", "test_air_comes_in_cool", "test_bmc_logged_no_grave_error",
    "test_bmc_logged_nothing_during_the_run",
)  # fmt: skip


def check_all(first, now, notice=lambda faults: None):
    first, now = map(codec.plain, (first, now))
    ended = outcomes(recorded(), now={"bmc": now}, before={"bmc": first}, asked_once={"bmc": first}.get, notice=notice)
    return {name: ended[name].what for name in CHECKS}


def test_the_checks(tmp_path):
    sound = read(tmp_path / "sound")
    days = [bmc._day(at) for at in (sound.log.now, *(event.at for event in sound.log.events[:2]))]
    assert days == [date(2025, 6, 18), date(2025, 6, 16), None]
    dead = read(tmp_path / "dead", (SUPPLIES, DEAD))
    assert check_all(dead, dead) == {**dict.fromkeys(CHECKS, "passed"), CHECKS[0]: "failed", CHECKS[-1]: "failed"}
    assert set(check_all(None, None).values()) == {"not applicable"}
    # What could be asked when the run began, and cannot any more, does not show that nothing happened.
    silent = read(tmp_path / "late", ("sel elist last 200\n", "sel elist last 200 ! too late\n"))
    assert (silent.log, silent.log_unreadable, len(silent.power)) == (None, "too late", 3)
    for now in (None, silent):
        assert check_all(sound, now) == {**dict.fromkeys(CHECKS, "passed"), CHECKS[-1]: "skipped"}
    assert check_all(silent, sound)[CHECKS[-1]] == "skipped"


FULL = ("Overflow         : false", "Overflow         : true")


def test_a_full_log_is_shown_beside_the_verdict_and_what_it_holds_counts(tmp_path):
    """Also what comes, in one that writes over its oldest entries."""
    shown = []
    full, sound = read(tmp_path / "full", FULL), read(tmp_path / "sound")
    assert set(check_all(sound, sound, shown.extend).values()) == {"passed"}
    assert shown == []
    ends = check_all(full, full, shown.extend)
    assert ends == {**dict.fromkeys(CHECKS, "passed"), CHECKS[-1]: "not applicable"}
    assert [fault.name for fault in shown] == ["bmc_log_full"] * 2
    grave = read(tmp_path / "grave", FULL, (CORRECTED, CORRECTED + MEMORY))
    assert check_all(grave, grave)["test_bmc_logged_no_grave_error"] == "failed"
    boot = MEMORY.replace("Memory | Uncorrectable ECC (@DIMMG1(CPU1))", "System Event #0x01 | OEM System boot event")
    harmless = read(tmp_path / "harmless", FULL, (CORRECTED, CORRECTED + boot))
    dead = read(tmp_path / "dead", FULL, (SUPPLIES, DEAD))
    ends = [check_all(full, now)[CHECKS[-1]] for now in (grave, dead, harmless)]
    assert ends == ["failed", "failed", "passed"]
