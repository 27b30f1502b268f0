"""What is around the GPUs: the processors and the memory of the host."""

from __future__ import annotations

import pytest

from pytest_gpufleet import (
    Machine,
    expect_none,
    nodes_with_less_memory,
    not_applicable,
    of_host,
    offline_processors,
    recorded_memory_errors,
    slow_clock,
)

pytestmark = [
    pytest.mark.chapter("Host", "Is the machine around the GPUs whole, healthy, and set up as it should be?"),
    pytest.mark.proves_sound,
    pytest.mark.needs(gpus=True),
]


def test_every_socket_has_as_much_memory(machine: Machine) -> None:
    """No socket has less memory than another one

    A module that is missing, not seated or switched off after errors takes its channel along, and the processors next
    to it work with less memory and slower. Compare `dmidecode -t memory` and `numactl --hardware` with the order, and
    reseat or replace the module that is not listed.
    """
    setup = of_host(machine.host.get, "processor_setup")
    if len(setup["numa_memory"]) < 2:
        not_applicable("this system shows one NUMA node, which has no other one to be like")
    expect_none(nodes_with_less_memory(setup))


def test_host_memory_had_few_errors(machine: Machine) -> None:
    """The host's memory had no uncorrected errors since the system started, and no module many that were corrected

    An uncorrected error kills what used the memory, or the whole machine; many corrected ones come before it. The
    module that is named is bad or badly seated: reseat it, and replace it if the errors come back. `edac-util -v` or
    `ras-mc-ctl --error-count` show the counters.
    """
    expect_none(recorded_memory_errors(of_host(machine.host.get, "memory_errors")))


def test_clock_source_is_fast(machine: Machine) -> None:
    """Programs read the time from the processors, or from the hypervisor, and not over the bus

    Everything that trains or communicates looks at the time very often. Where the kernel took the time stamp counter
    for unstable, each look takes fifty times as long (hpet, acpi_pm). `dmesg | grep -i clocksource` says why; it is
    often the firmware, or a BIOS setting.
    """
    setup = of_host(machine.host.get, "processor_setup")
    if setup["clock_source"] is None:
        not_applicable("this system does not tell its clock source")
    expect_none(slow_clock(setup))


def test_processors_are_online(machine: Machine) -> None:
    """No processor that is there is switched off

    Whoever switched single ones off, the kernel after errors or somebody by hand, left the GPUs next to them with fewer
    processors than others have. Bring them back: `echo 1 > /sys/devices/system/cpu/cpuN/online`. Second threads that
    are all off (SMT) are left as they are.
    """
    expect_none(offline_processors(of_host(machine.host.get, "processor_setup")))
