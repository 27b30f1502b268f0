"""The host around the GPUs: kernel log, memory, processors, and what its BMC measures and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from pytest_gpufleet import Fault, LiveMachine, expect_none, not_applicable, not_judged
from pytest_gpufleet.machine import bmc, kernel_log, memory, processors
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.plugin import assertions

Now = Callable[[str], Any]
Notice = Callable[[Iterable[Fault]], None]

pytestmark = [
    pytest.mark.chapter("Host", "Is the machine around the GPUs whole, healthy, and set up as it should be?"),
    pytest.mark.proves_sound,
    pytest.mark.needs(gpus=True),
]


def test_no_grave_message_of_the_host_in_the_kernel_log(machine: LiveMachine) -> None:
    """No uncorrected hardware error of the host in the kernel log

    Host errors often show up later as a slow GPU. The kernel reports them first: machine checks, memory errors (EDAC),
    PCIe errors (AER), lockups, disks that do not answer or a file system that became read-only, network adapters
    without enough power, too hot or with failed firmware, Ethernet links that went down twice in the last 24 hours.
    Each such line since boot fails this check, with its device and what to do. The line stays until the machine
    restarts: repair the part, restart, run again. Corrected errors, and stalls and full memory from before the run, are
    shown beside the verdict and fail nothing; during the run, stalls and full memory fail the check in which they
    occur. Events of a container with its own memory limit are only shown.
    """
    assertions.require_answers([machine.logged.trouble])
    expect_none(kernel_log.judged(machine.logged.host, machine.gpus, "before")[0])


def test_every_socket_has_as_much_memory(machine: LiveMachine) -> None:
    """NUMA nodes have equal memory

    A module that is missing, not seated or switched off after errors takes its channel along, and the processors next
    to it work with less memory and slower. Compare `dmidecode -t memory` and `numactl --hardware` with the order, and
    reseat or replace the module that is not listed. A virtual machine has the memory that its host gives it.
    """
    setup = assertions.of_host(machine.host.get, processors.PROCESSOR_SETUP)
    if setup.virtual:
        not_applicable("this is a virtual machine: its host decides how much memory each of its NUMA nodes has")
    if len(setup.numa_memory) < 2:
        not_applicable("there is only one NUMA node to compare")
    expect_none(processors.nodes_with_less_memory(setup))


def test_memory_modules_are_alike(machine: LiveMachine) -> None:
    """Memory modules (DIMMs) are alike, at one speed, the same number on each socket

    One that is smaller, slower or missing makes its channel the slowest of the socket, and interleaved memory runs at
    the pace of that. The slot is named as on the board. Compare `dmidecode -t memory` with the order; reseat or replace
    the module. With two modules on a channel it is usual that all run below their rating. Only root may read this.
    """
    slots = assertions.of_host(machine.host.get, memory.MEMORY_MODULES)
    setup = processors.PROCESSOR_SETUP.of(machine.host)
    if isinstance(setup, Missing) or setup.virtual or not setup.sockets or not memory.filled_slots(slots):
        not_applicable("the firmware does not say kind and speed of real memory modules, as in a virtual machine")
    expect_none(memory.unfit_modules(slots, setup.sockets))


def test_host_memory_had_few_errors(machine: LiveMachine) -> None:
    """Host memory (EDAC): no uncorrected and few corrected errors since boot

    An uncorrected error kills what used the memory, or the whole machine; many corrected ones come before it. The named
    module is bad or badly seated: reseat it, and replace it if the errors come back. `edac-util -v` or `ras-mc-ctl
    --error-count` show the counters.
    """
    expect_none(memory.recorded_errors(assertions.of_host(machine.host.get, memory.MEMORY_ERRORS)))


def test_clock_source_is_fast(machine: LiveMachine) -> None:
    """The clock source is tsc or paravirtual, not hpet or acpi_pm

    Training and communication read the time very often. If the kernel found the time stamp counter (tsc) unstable, each
    reading takes fifty times as long (hpet, acpi_pm). `dmesg | grep -i clocksource` says why; it is often the firmware,
    or a BIOS setting.
    """
    setup = assertions.of_host(machine.host.get, processors.PROCESSOR_SETUP)
    if setup.clock_source is None:
        not_applicable("this system shows no clock source")
    expect_none(processors.slow_clock(setup))


def test_processors_are_online(machine: LiveMachine) -> None:
    """All CPUs are online

    CPUs taken offline, by the kernel after errors or by hand, leave the GPUs next to them with fewer processors than
    others have. Bring them back: `echo 1 > /sys/devices/system/cpu/cpuN/online`. If all second threads are off (SMT),
    that is a setting and no fault.
    """
    expect_none(processors.offline_processors(assertions.of_host(machine.host.get, processors.PROCESSOR_SETUP)))


# ---------------------------------------------------------------- power and cooling


@pytest.fixture(scope="module")
def asked_once(machine: LiveMachine) -> Now:
    """asked_once(fact): as the first of these checks has read it: asking the BMC takes seconds."""
    return cache(machine.now)


def log_of(found: bmc.Bmc) -> bmc.EventLog:
    if found.log is None:
        not_judged(f"the BMC's log cannot be read: {found.log_unreadable}")
    return found.log


@pytest.mark.level("standard")
def test_power_supplies_are_sound(asked_once: Now) -> None:
    """Power supplies work, have input power, and are redundant

    With a dead power supply the others carry its load: the machine runs, until a step of load or the next failure takes
    it down, or GPUs are slowed down by the power brake. An empty bay shows as lost redundancy. Look at cable and socket
    of the named one, then replace it; `ipmitool sdr type "Power Supply"` shows all.
    """
    found = assertions.of_host(asked_once, bmc.BMC)
    if not found.power:
        not_applicable("the BMC has no sensor of power supplies")
    expect_none(bmc.failed_supplies(found))


@pytest.mark.level("standard")
def test_fans_are_sound(asked_once: Now) -> None:
    """Fans are within BMC thresholds

    A dead fan shows as GPUs or memory modules that become slow in one part of the machine only. A fan without a reading
    counts as absent. Replace the named one, and look for what blocks it; `ipmitool sdr type Fan` shows all.
    """
    found = assertions.of_host(asked_once, bmc.BMC)
    if not found.fans:
        not_applicable("the BMC has no sensor of fans, as where water or the rack cools the machine")
    expect_none(bmc.failed_fans(found))


@pytest.mark.level("standard")
def test_air_comes_in_cool(asked_once: Now) -> None:
    """Inlet and component temperatures are within BMC thresholds

    With warm inlet air GPUs run hotter and slower: that is a fault of the room, not of the GPUs. Look at the cooling of
    the room and the rack, at blanking panels and at what blocks the air. A part that is too hot: look at its heat sink
    and at fans and ducts near it. `ipmitool sdr type Temperature` shows all.
    """
    found = assertions.of_host(asked_once, bmc.BMC)
    expect_none(bmc.high_temperatures(found))
    if not any(sensor.status != "ns" for sensor in found.temperatures if bmc.is_inlet(sensor)):
        not_applicable("no sensor of the BMC that has a reading is called inlet, intake or ambient")


@pytest.mark.level("standard")
def test_no_coolant_leaks(machine: LiveMachine) -> None:
    """Leak sensors are dry

    Coolant on a board ends in a short circuit. The BMC's sensors whose name has "leak" are asked over IPMI. The trays
    of NVIDIA's racks have theirs in Redfish alone, which needs an account: look there at LeakDetection, and give
    `--fleet-without leaks`.
    """
    sensors = assertions.of_host(machine.now, bmc.LEAKS)
    expect_none(bmc.coolant_leaks(sensors))
    if not any(sensor.status != "ns" for sensor in sensors):
        why = "the BMC has no leak sensor with a reading over IPMI"
        if sensors or any(gpu.of_rack for gpu in machine.gpus):
            not_judged(f"{why}: look at LeakDetection of its Redfish, then give --fleet-without leaks")
        not_applicable(why)


@pytest.mark.level("standard")
def test_bmc_logged_no_grave_error(asked_once: Now, notice: Notice) -> None:
    """BMC event log (SEL): no uncorrected error or power failure in the last 30 days

    The BMC remembers what the kernel forgets at a reboot: memory modules, processors, slots and power supplies that
    failed before. What went away again does not count, nor what is older by the BMC's own clock. `ipmitool sel elist`
    shows the log. Mend what is named, then save and clear the log (`ipmitool sel save FILE`, `ipmitool sel clear`).
    A log that is full is read as it is, and named beside the verdict: what happened since it was full is not in it.
    """
    log = log_of(assertions.of_host(asked_once, bmc.BMC))
    notice(bmc.log_full(log))
    expect_none(bmc.logged_errors(log))


@pytest.mark.level("standard")
@pytest.mark.at_the_end
def test_bmc_logged_nothing_during_the_run(machine: LiveMachine, notice: Notice) -> None:
    """BMC event log (SEL): no power, cooling, memory or PCIe error during the run

    A power supply that drops out for a second under load, a stalled fan or an error below the kernel shows only here,
    even if it went away again. A resumed run looks back to the begin of its first session. `ipmitool sel elist` shows
    the log. Look at the part that is named. A full log cannot show such an event: that is named beside the verdict, and
    the sensors count. To see more, save and clear it (`ipmitool sel save FILE`, `ipmitool sel clear`) and run again;
    the same if it was cleared during this run, for then it proves nothing.
    """
    if machine.before("bmc") is None:
        not_applicable("the BMC was not asked when this run began")
    before = assertions.of_host(machine.before, bmc.BMC)
    now = assertions.of_host(machine.now, bmc.BMC, read_before=True)
    news = bmc.logged_since(before.log, now.log) if before.log and now.log else []
    found = [*bmc.failed_supplies(now), *bmc.failed_fans(now), *bmc.high_temperatures(now)]
    expect_none([*found, *bmc.supplies_lost(before, now), *news])
    then, log = log_of(before), log_of(now)
    notice(bmc.log_full(log))
    if bmc.cleared_since(then, log):
        not_judged("the BMC's log was cleared while this run lasted")
    if log.full and log.events == then.events:
        not_applicable(
            "the BMC's log is full, so nothing that happened in this run can be seen in it: save and clear it"
        )
