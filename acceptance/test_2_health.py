"""What the GPUs and the kernel remember of errors before this run. While it runs, every test is watched as well."""

from __future__ import annotations

from functools import partial

import pytest

from pytest_gpufleet import LiveMachine, expect_none, not_applicable
from pytest_gpufleet.machine import health, kernel_log
from pytest_gpufleet.plugin import assertions

pytestmark = [
    pytest.mark.chapter("Health", "Does any GPU, or the kernel, report an error?"),
    pytest.mark.proves_sound,
    pytest.mark.needs(gpus=True),
]


def test_no_memory_error_is_recorded(machine: LiveMachine, fleet_used: bool) -> None:
    """No uncorrectable GPU memory error, no row remapping pending or failed

    An uncorrectable error kills the program that meets it. Pending repairs are done by a reset of the GPU; a repair
    that failed, memory that the driver calls unrepairable, a bank without spare rows or hundreds of remapped rows call
    for its replacement. A new GPU has no remapped row and has had no uncorrectable error in its life; of hardware that
    is not new, which --fleet-used says, that does not count. A counter that cannot be read proves nothing: see the
    kernel log, whether this user may use `nvidia-smi -q`, and whether nvidia-ml-py is as old as the driver.
    """
    expect_none(error for gpu in machine.gpus for error in health.recorded_errors(gpu, fleet_used))
    assertions.require_readable(machine.gpus)


def test_no_grave_xid_in_the_kernel_log(machine: LiveMachine) -> None:
    """No grave XID of a GPU and no fatal SXid of an NVSwitch in the kernel log

    The driver reports GPU errors there as XIDs. Hardware errors fail this test with the action that NVIDIA recommends;
    others may come from faulty programs. An XID of a GPU that NVML no longer lists counts too: that GPU has failed
    since. GPUs that are only hidden from this run are left out. Errors of NVSwitches are SXids. All GPUs share the
    NVSwitches, so every fatal one fails this test.
    """
    assertions.require_answers([machine.logged.trouble])
    condemning = [xid for xid in machine.logged.xids if xid.condemning]
    here = [*machine.present, *(gpu.pci_bus_id for gpu in machine.gpus)]
    expect_none(kernel_log.xids_of(machine.gpus, condemning) + kernel_log.xids_of_none(here, condemning))


def test_gpus_are_cool_at_idle(machine: LiveMachine) -> None:
    """Idle GPU temperature is at most 60 °C

    A cold plate without contact, blocked air or a changed fan curve shows before any load: healthy GPUs from Hopper on
    idle at 30 to 45 °C. A GPU that has just worked gets two minutes to cool down. If all are hot, look at inlet air or
    water; if one is, at its heat sink, cold plate and thermal paste.
    """
    if not any(map(health.has_idle_ceiling, machine.gpus)):
        not_applicable("no ceiling at idle is known for this model")
    expect_none(health.hot_at_idle(machine.gpus, partial(machine.now, "temperature_c")))
